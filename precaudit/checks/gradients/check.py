"""The verb ``gradcheck``: a kernel and its reference, outputs and gradients, each against FP64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from precaudit.checks.gradients.case import KERNEL, ArrayFinding
from precaudit.checks.gradients.causes import Conclusions
from precaudit.checks.gradients.given import make_cases as given_cases
from precaudit.checks.gradients.sides import NotApplicable, Sides
from precaudit.judging.verdicts import Status, exit_code
from precaudit.progress import Advance, silent
from precaudit.recording.tracing.conditions import number_versions
from precaudit.schema.brief import Brief
from precaudit.schema.records.errors import ErrorRecord

SEEDS = 3


@dataclass(frozen=True, repr=False)
class Checked(Brief):
    """A kernel beside its reference; ``conclusions``: what is wrong with which side, the worst first."""

    name: str
    cases: tuple[str, ...]
    found: tuple[ArrayFinding, ...]
    conclusions: tuple[str, ...]
    notes: tuple[str, ...] = ()
    failing: Mapping[str, tuple[Any, ...]] | None = None
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[Status, int]:
        """How many arrays of either side have each status."""
        every: list[Status] = [f.verdict.status for f in self.found]
        return {status: every.count(status) for status in dict.fromkeys(every)}

    @property
    def exit_code(self) -> int:
        """0 both sides are honest float32, or as honest as the reference declares; 1 one is not; 3 cannot be judged."""
        return exit_code(self.counts)

    @property
    def records(self) -> tuple[ErrorRecord, ...]:
        """Every record, as ``gate`` reads them from a file."""
        return tuple(f.record for f in self.found)


def gradcheck(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[..., Any] | Sequence[Any],
    *,
    argnums: Sequence[int] | None = None,
    exact: Callable[..., Any] | None = None,
    seeds: int = SEEDS,
    hostile: bool = True,
    name: str = KERNEL,
    advance: Advance = silent,
) -> Checked:
    """Return how far a kernel's and its reference's outputs and vector-Jacobian products are from FP64.

    ``inputs``: the arguments of both, or a function of a seed (and, if it takes one, of a float format's name) that
    returns them or several of them by name. ``argnums``: which are differentiated (default: all that hold floats
    alone; where none is, outputs alone are judged). ``exact``: the formula on FP64 arrays; else the reference's own,
    traced on float32 inputs, in FP64. ``hostile``: with inputs made from the first ones that kernels fail on. The
    kernel is never evaluated in FP64: it runs.
    Raises UserError for what cannot be differentiated or does not fit.
    """
    sides = Sides(kernel, reference, exact, argnums)
    found: list[ArrayFinding] = []
    notes: dict[str, None] = {}
    done: list[str] = []
    failing: dict[str, tuple[Any, ...]] = {}
    conclusions = Conclusions()
    cases = given_cases(inputs, seeds, hostile)
    for i, (case, make) in enumerate(cases):
        advance(i, len(cases), case)
        given = make()
        try:
            c, made = sides.case(case, given)
        except NotApplicable as why:
            notes[f"left out {case}: {why}"] = None
            continue
        done.append(case)
        found += made
        for f in made:
            if f.verdict.status in ("fail", "nonfinite", "unknown"):
                failing.setdefault(case, given)
                conclusions.add(c, f, made)
    notes |= dict.fromkeys(sides.all_notes())
    left = dict.fromkeys(f.case for f in found if f.verdict.status == "not run")
    if left:
        notes[f"not judged where float32 leaves its range on both sides: {', '.join(left)}"] = None
    return Checked(
        name,
        tuple(done),
        tuple(map(conclusions.with_cause, found)),
        conclusions.every,
        tuple(notes),
        failing,
        str(jax.devices()[0].device_kind),
        number_versions(),
    )

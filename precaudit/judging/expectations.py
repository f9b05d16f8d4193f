"""What a compared run should hold, of a model or of a program, and what its verdicts inherit from each other."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, singledispatch
from itertools import chain
from typing import Any

from precaudit.judging import programs
from precaudit.judging.applied_rules import JUDGED
from precaudit.judging.budgets import Known
from precaudit.judging.expected import disturbances, missing_formulas, missing_pairs, missing_records
from precaudit.judging.spilled import Spilled
from precaudit.judging.verdicts import Verdict, inheriting
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.unique import UniqueHashes, require_unique
from precaudit.recording.runs.written import Comparison
from precaudit.schema.filed import of_kinds
from precaudit.schema.limits import Limits
from precaudit.schema.policies import besides
from precaudit.schema.records.errors import ErrorRecord, StateError

Verdicts = Iterable[Verdict]


@dataclass(frozen=True)
class Expected:
    """What judging asks of a compared run.

    ``layers``, ``names``: what budgets may name, ``own_names``: where points are the program's own. ``missing``:
    verdicts on what is not there, given which records were seen. ``disturbed``: on what recording changed.
    ``settled``: verdicts with what they inherit, given all records. ``besides``: what makes errors besides rounding,
    and is meant; ``sources``: the line that made each point.
    """

    layers: int
    names: Callable[[], Known]
    missing: Callable[[Container[Any]], Iterator[Verdict]]
    disturbed: Callable[[Limits], Iterator[Verdict]]
    settled: Callable[[Verdicts, Sequence[ErrorRecord]], Iterator[Verdict]]
    notes: Sequence[str]
    own_names: bool = False
    besides: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)


def expected_of(found: Comparison[Any]) -> Expected:
    """Return what judging asks of a compared run, by the kind of run that it is."""
    return _expected(found.run, found)


@singledispatch
def _expected(run: Any, _found: Comparison[Any]) -> Expected:
    raise TypeError(f"{type(run).__name__} is no run")


@_expected.register
def _(run: Run, found: Comparison[Run]) -> Expected:
    asked = run.record.requested
    pairs = found.prefill_decode

    def names() -> Known:
        caches = {e.point for e in of_kinds(found.errors, StateError)}
        return Known(frozenset((*asked.points, *caches)), frozenset(asked.phases))

    def missing(seen: Container[Any]) -> Iterator[Verdict]:
        require_unique(found.folder / "prefill_decode.jsonl", ((p.prompt, p.against, p.step) for p in pairs))
        return chain(missing_records(run, seen), missing_pairs(run, pairs), missing_formulas(run, found.formula, seen))

    return Expected(
        int(run.record.model.config["layers"]),
        names,
        missing,
        partial(disturbances, run, found.errors),
        lambda verdicts, _errors: inheriting(Spilled(_once(verdicts))),
        found.notes,
        besides=besides(run.record.policy),
    )


@_expected.register
def _(run: Opened, _found: Comparison[Opened]) -> Expected:
    def settled(verdicts: Verdicts, errors: Sequence[ErrorRecord]) -> Iterator[Verdict]:
        return programs.with_indices(programs.suspect(Spilled(verdicts), errors), run)

    return Expected(
        programs.layers_of(run),
        partial(programs.program_budget_names, run),
        lambda seen: chain(programs.unpaired_views(run), programs.missing_program_records(run, seen)),
        lambda _limits: programs.program_disturbances(run),
        settled,
        programs.notes(run),
        own_names=True,
        sources=programs.sources(run),
    )


def _once(verdicts: Verdicts) -> Iterator[Verdict]:
    """Yield one verdict a kind and place: the first, as a missing tensor shows in coverage and in the records.

    Of a kind and place there is one record (``Rules.apply``), whose verdict needs no look unless it is missing.
    """
    seen = UniqueHashes()
    for v in verdicts:
        if v.status == "missing":
            new = seen.add(v.place)
        else:
            new = v.kind in JUDGED or seen.add((v.kind, v.place, v.index, v.text))
        if new:
            yield v

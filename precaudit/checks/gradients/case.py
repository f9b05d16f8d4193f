"""One case of a gradcheck: every array of both sides, judged by what honest realisations of the formula leave."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.checks.gradients.formula import DRAWS, Formula
from precaudit.checks.gradients.measure import Distance, measure_distance
from precaudit.checks.gradients.noise import spread
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import Verdict
from precaudit.numbers.arrays import Array, rounder, widen
from precaudit.numbers.formats import FORMATS
from precaudit.references.alone import measure_alone
from precaudit.schema.limits import default_limits
from precaudit.schema.metrics.sizes import norm
from precaudit.schema.records.errors import ErrorRecord, StateError

KERNEL, REFERENCE = "kernel", "reference"
STRICT = "strict"  # the kernel compiled without excess precision
AGAIN = "again"
CONSTANT = 2.0**-8  # relative: what rounding a constant to bfloat16, read twice, changes


@dataclass(frozen=True)
class ArrayFinding:
    """One array of one side in one case: its record, verdict, and distance from FP64.

    ``declared``: it is no farther off than the reference's own formats explain. ``cause``: what explains an array that
    does not pass, in words.
    """

    case: str
    side: str
    array: str
    record: ErrorRecord
    verdict: Verdict
    distance: Distance | None = None
    declared: bool = False
    cause: str = ""


@dataclass(frozen=True)
class GradientCase:
    """One case run: both sides' arrays beside FP64's, and their jaxprs. ``outputs``: how many of them are outputs.

    ``formula``: that of ``exact``; ``draws``: realisations of it in float32.
    """

    name: str
    inputs: tuple[Any, ...]
    cotangents: Any
    names: list[str]
    outputs: int
    formula: Formula
    exact: list[Array]
    runs: dict[str, list[Array]]
    own: dict[str, Formula]
    draws: list[list[Array]]

    def judge(self, side: str, i: int, draws: Sequence[Sequence[Array]]) -> ArrayFinding:
        """Judge one array by what honest realisations make of the same inputs."""
        stored, exact = self.runs[side][i], self.exact[i]
        true = rounder(FORMATS[stored.dtype.name].name)(exact)
        true = np.where(np.isfinite(true), exact, true)  # what overflows in the format is infinite there
        tiny = float(jnp.finfo(stored.dtype).smallest_normal)
        wide = widen(stored)
        # ∞ or NaN: which depends on the order of honest sums. A device may take what is subnormal for zero.
        same = ~np.isfinite(wide) & ~np.isfinite(true) | (np.abs(wide) <= tiny) & (np.abs(true) <= tiny)
        kept = np.where(same, np.zeros((), stored.dtype), stored).astype(stored.dtype)
        apart, together = (
            [d[i] for d in some if np.array_equal(np.isfinite(d[i]), np.isfinite(exact))]
            for some in (draws[:DRAWS], draws[DRAWS:])
        )
        with np.errstate(all="ignore"):
            honest = [np.where(same, 0.0, x) for x in spread(apart, together, exact)]
            record = measure_alone(kept, np.where(same, 0.0, true), honest, self.names[i], draws is self.draws).record
        phase = "forward" if i < self.outputs else "backward"
        record = msgspec.structs.replace(
            record, prompt=self.name, phase=phase, point=f"{side}.{self.names[i]}", candidate=side
        )
        verdict = judge(record, default_limits())
        if verdict is None or verdict.status == "pass":
            verdict = Verdict.of(record, "pass")
        return ArrayFinding(self.name, side, self.names[i], record, verdict, measure_distance(stored, true))

    def wider(self, side: str) -> list[list[Array]]:
        """Return realisations with the roundings that the reference declares, made as those of a side are."""
        strict = side == STRICT
        if strict not in self._wider:
            own = self.own[REFERENCE].strictly if strict else self.own[REFERENCE]
            self._wider[strict] = own.draws(self.cotangents, self.inputs, jax.default_backend(), declared=True)
        return self._wider[strict]

    @cached_property
    def _wider(self) -> dict[bool, list[list[Array]]]:
        return {}

    def own_formula(self, side: str) -> list[Array]:
        """Return one side's arrays in FP64, by its own formula; raises CannotLift."""
        side = KERNEL if side == STRICT else side
        if side not in self._own_formulas:
            self._own_formulas[side] = self.own[side].exact(self.cotangents, self.inputs)
        return self._own_formulas[side]

    @cached_property
    def _own_formulas(self) -> dict[str, list[Array]]:
        return {}

    def declared_draws(self, side: str, every: bool = False) -> list[list[Array]]:
        """Return realisations with the roundings that one side's equations declare, about the exact arrays.

        ``every``: those too that a compiler may leave out, and need not. What its formula differs by is no rounding,
        and is taken away; unless it holds constants that a narrow format rounded, and differs by no more than these
        may. Raises CannotLift.
        """
        if (side, every) not in self._declared_by_side:
            own, formula = self.own_formula(side), self.own[side].strictly if every else self.own[side]
            if formula.constants():
                own = [e if _near(o, e) else o for o, e in zip(own, self.exact, strict=True)]
            draws = formula.draws(self.cotangents, self.inputs, jax.default_backend(), declared=True)
            self._declared_by_side[side, every] = [about(self.exact, d, own) for d in draws]
        return self._declared_by_side[side, every]

    @cached_property
    def _declared_by_side(self) -> dict[tuple[str, bool], list[list[Array]]]:
        return {}

    def differing(self, again: Sequence[Array]) -> list[ArrayFinding]:
        """Return the kernel's arrays that have other bits when it runs again on the same inputs."""
        found = []
        for name, a, b in zip(self.names, self.runs[KERNEL], again, strict=True):
            if a.tobytes() != b.tobytes():
                r = StateError(
                    prompt=self.name,
                    phase=AGAIN,
                    step=0,
                    layer=None,
                    point=f"{KERNEL}.{name}",
                    candidate=KERNEL,
                    reference=KERNEL,
                    n=a.size,
                    mismatched=max(int(np.sum(a != b)), 1),
                )
                verdict = judge(r, default_limits())
                assert verdict is not None
                found.append(ArrayFinding(self.name, KERNEL, name, r, verdict))
        return found


def about(exact: Sequence[Array], drawn: Sequence[Array], own: Sequence[Array]) -> list[Array]:
    """Return realisations of one formula as deviations of another's values; where both are not finite, as they are."""
    with np.errstate(invalid="ignore"):
        return [np.where(np.isfinite(o), e + (x - o), x) for e, x, o in zip(exact, drawn, own, strict=True)]


def _near(own: Array, exact: Array) -> bool:
    """Whether two formulas differ by no more than constants that were rounded may."""
    finite = np.isfinite(own) & np.isfinite(exact)
    return bool(norm(own[finite] - exact[finite]) <= CONSTANT * norm(exact[finite]))


def mark_unknown(f: ArrayFinding) -> ArrayFinding:
    """Return what was found where FP64 itself may be off: unknown unless it passes."""
    if f.verdict.status == "pass":
        return f
    text = "the reference's FP64 values contain a constant that a narrow format rounded"
    return mark_unjudged(f, unknown=text)


def mark_unjudged(f: ArrayFinding, **why: str) -> ArrayFinding:
    """Return what was found with the reason that it is not judged, in its record too."""
    record = msgspec.structs.replace(f.record, **why)
    verdict = judge(record, default_limits())
    assert verdict is not None
    return replace(f, record=record, verdict=verdict)

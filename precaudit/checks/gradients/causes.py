"""Why one array of a gradcheck is off: roundings that its function declares, a constant, or another formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from precaudit.checks.gradients.case import AGAIN, KERNEL, REFERENCE, STRICT, ArrayFinding, GradientCase
from precaudit.checks.gradients.constants import Constant, find_exchange
from precaudit.checks.gradients.formula import Formula, as_float32
from precaudit.checks.gradients.lines import kernel_lines, line_shares, short_line
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.numbers.arrays import widen
from precaudit.schema.records.base import value

NEARLY = 0.9  # of an error that is a factor of the whole array
SOME, NAMED = 0.1, 3  # of an error's energy, that a line is named for; and at most how many
UNEXPLAINED = "no format narrower than float32 explains it: the formula differs"
NOT_DECLARED = "rounding to the formats it declares does not explain it: the formula differs"
NOT_INSIDE = "with all that its kernels round inside in float32 it does not pass either: the formula differs"
ON_GPU = 'TF32 explains it: this GPU uses it for float32 products below precision="highest"'


@dataclass(frozen=True)
class Cause:
    """What explains an error: ``kind``, by which errors are grouped, and in words, which may compile to find lines."""

    kind: str
    words: Callable[[], str]


class Conclusions:
    """What is said of arrays that do not pass: one sentence a side, format, verdict, array and kind of cause."""

    def __init__(self) -> None:
        self._told: dict[tuple[str | None, ...], str] = {}

    @property
    def every(self) -> tuple[str, ...]:
        """The sentences, in the order in which their first cases were found."""
        return tuple(self._told.values())

    def add(self, c: GradientCase, f: ArrayFinding, made: Sequence[ArrayFinding]) -> None:
        """Add what is wrong with one array of a case, unless its like was told; the first of a kind names the lines.

        What is wrong with the kernel as it runs is not told again of it without excess precision.
        """
        ours = (x.verdict.status for x in made if (x.side, x.array) == (KERNEL, f.array))
        if f.side == STRICT and any(status != "pass" for status in ours):
            return
        why = cause(c, f)
        group = (f.side, f.record.dtype, f.verdict.status, why.kind if why is not None else "")
        if (*group, f.array) in self._told:
            return
        first = group not in {known[:-1] for known in self._told}
        lines = why is not None and (first or bool(c.own[f.side].places))
        self._told[*group, f.array] = verdict_text(f, made, why.words() if why is not None and lines else "")


def cause(c: GradientCase, f: ArrayFinding) -> Cause | None:
    """Return what explains one array's error; None where its size was not judged."""
    if f.verdict.value is None or f.distance is None or f.verdict.status == "nonfinite" or f.record.phase == AGAIN:
        return None
    formula, i = c.own[f.side], c.names.index(f.array)
    narrow = formula.narrow()
    if formula.places:
        return _inside(c, f, formula, i)
    if not narrow and jax.default_backend() != "gpu":
        return Cause("formula", lambda: UNEXPLAINED + _constant(c, f, i))
    try:
        passes = c.judge(f.side, i, c.declared_draws(f.side)).verdict.status == "pass"
    except CannotLift:
        return Cause("", lambda: f"formats narrower than float32 inside: {', '.join(map(short_line, narrow))}")
    if not passes:
        return Cause("formula", lambda: (NOT_DECLARED if narrow else UNEXPLAINED) + _constant(c, f, i))
    if not narrow:
        return Cause("TF32", lambda: ON_GPU)
    return Cause("rounding", lambda: f"rounding explains it: {_lines(c, f, i)}")


def _inside(c: GradientCase, f: ArrayFinding, formula: Formula, i: int) -> Cause:
    """Return the same of a function with Pallas kernels: it runs again with what they round in float32."""
    straight = formula.with_raised_kernels(c.cotangents, c.inputs)
    again = replace(c, runs={**c.runs, f.side: straight}).judge(f.side, i, c.draws)
    before, after = (x.distance.normwise if x.distance is not None else np.inf for x in (f, again))
    if again.verdict.status != "pass" and not after < NEARLY * before:
        return Cause("formula", lambda: NOT_INSIDE + _constant(c, f, i))

    def words() -> str:
        told = _largest_lines(kernel_lines(formula, c.cotangents, c.inputs, i, straight[i]))
        if again.verdict.status != "pass":
            return f"{after:.2g} of its norm without what rounds inside its kernels, {told}; the rest stands outside"
        return f"rounding explains it, {after:.2g} of its norm without: {told}"

    return Cause("rounding" if again.verdict.status == "pass" else "rounding in part", words)


def _constant(c: GradientCase, f: ArrayFinding, i: int) -> str:
    """Return which constant stands for which of the reference's, in words; empty where no exchange explains it."""
    if f.side == REFERENCE:
        return ""
    run = widen(c.runs[f.side][i])
    cotangents, held = jax.tree.map(as_float32, (c.cotangents, c.inputs))
    found = find_exchange(c.own[f.side], c.formula, cotangents, held, i, run, c.exact[i])
    if found is None:
        return ""
    mine, its, left = found
    what = f"{_at(mine)} stands for {_at(its)}" if mine.value else f"{_at(its)} is left out"
    return f", {what} (with that, {left:.2g} of its norm is unexplained)"


def _at(constant: Constant) -> str:
    return f"{constant.value:.6g}" + (f" at {short_line(constant.line)}" if constant.line else "")


def _lines(c: GradientCase, f: ArrayFinding, i: int) -> str:
    return _largest_lines(line_shares(c.own[f.side], c.cotangents, c.inputs, i, c.own_formula(f.side)[i]))


def verdict_text(f: ArrayFinding, every: Sequence[ArrayFinding], why: str) -> str:
    """Return what is wrong with one array, in words; ``why``: what explains it, where that is told."""
    r, v = f.record, f.verdict
    at = f"{f.array} ({f.case})"
    side = "the kernel without excess precision" if f.side == STRICT else f.side
    if r.phase == AGAIN:
        return f"{side}: {at}: {r.mismatched:,} of {r.n:,} elements differ in a second run on the same inputs"
    if v.value is None or f.distance is None:
        return f"{side}: {at}: {v.text}"
    if v.status == "nonfinite":
        return f"{side}: {at}: {r.nonfinite:,} elements are not finite where FP64 is, or finite where it is not"
    size = f"wrong by {f.distance.componentwise:.3g} roundings at {list(f.distance.worst)}, "
    size += f"{f.distance.normwise:.2g} of its norm"
    why = f"; {why}" if why else ""
    other = next((x for x in every if x.side != f.side and x.array == f.array), f)
    if f.side == REFERENCE and other.verdict.status == "pass":
        return f"the reference is the less precise side: {at} is {size}{why}"
    over = f"{v.metric} {value(v.value):.3g} at {v.scope}, limit {v.limit:.3g}"
    return f"{side}: {at} is {size}: more than float32's error ({over}){_factor_text(f)}{why}"


def _factor_text(f: ArrayFinding) -> str:
    """Return by which factor an array is off, where that is nearly all of its error."""
    gain = f.record.unexplained.gain if f.record.unexplained is not None else None
    if gain is None or f.distance is None or abs(value(gain.value)) < NEARLY * f.distance.normwise:
        return ""
    factor = f"{1 + value(gain.value):.6g}"
    return f"; it is {factor} × FP64" if factor != "1" else ""


def _largest_lines(lines: Sequence[tuple[str, float]]) -> str:
    """Return the lines with the largest shares, in words."""
    return ", ".join(f"{short_line(line)} ({100 * share:.0f} %)" for line, share in lines[:NAMED] if share >= SOME)

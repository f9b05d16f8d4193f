"""Why one array of a gradcheck is off: roundings that its function declares, a constant, or another formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from precaudit.checks.gradients.case import AGAIN, KERNEL, REFERENCE, STRICT, ArrayFinding, GradientCase
from precaudit.checks.gradients.infinities import first_infinite, range_lost
from precaudit.checks.gradients.lines import kernel_lines, line_shares, short_line
from precaudit.checks.gradients.mistakes import KNOWN, Explained, Mistakes
from precaudit.interpreters.jaxpr.shadow import CannotLift, refusal
from precaudit.schema.digits import digits
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import LocalError, StateError

NEARLY = 0.9  # of an error that is a factor of the whole array
SOME, NAMED = 0.1, 3  # of an error's energy, that a line is named for; and at most how many
UNEXPLAINED = "no format narrower than float32 explains it: the formula differs"
NOT_DECLARED = "rounding to the formats it declares does not explain it: the formula differs"
NOT_INSIDE = "with all that its kernels round inside in float32 it does not pass either: the formula differs"
NOT_FINITE_EITHER = "its formula gives that in FP64, too: the formula differs"
NOT_KNOWN = f"none of the known mistakes explains it ({KNOWN})"
LOST_SO = "what is computed from that is finite, and not FP64's"
ON_GPU = 'TF32 explains it: this GPU uses it for float32 products below precision="highest"'
AS_THE_KERNEL = "as the kernel with excess precision"


@dataclass(frozen=True)
class Cause:
    """What explains an error: ``kind``, by which errors are grouped, and in words, which may compile to find lines."""

    kind: str
    words: Callable[[], str]


@dataclass
class _Group:
    """Findings with one cause: the text of the first, what explains it, and the cases that they are of."""

    first: ArrayFinding
    made: Sequence[ArrayFinding]
    why: str
    cases: list[str]

    @property
    def text(self) -> str:
        n = len(self.cases) - 1
        more = f" and {n:,} more" if n else ""
        return verdict_text(self.first, self.made, self.why, more)


class Conclusions:
    """What is said of arrays that do not pass: one sentence a side, format, verdict, array and cause."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str | None, ...], _Group] = {}
        self._why: dict[tuple[str, str, str, str], str] = {}
        self._mistakes = Mistakes()

    @property
    def every(self) -> tuple[str, ...]:
        """The sentences, in the order in which their first cases were found."""
        return tuple(group.text for group in self._groups.values())

    def with_cause(self, f: ArrayFinding) -> ArrayFinding:
        """Return what was found with what explains it, in words; as it is where it passes."""
        why = self._why.get((f.case, f.side, f.array, f.record.phase))
        return f if why is None else replace(f, cause=why)

    def add(self, c: GradientCase, f: ArrayFinding, made: Sequence[ArrayFinding]) -> None:
        """Add what is wrong with one array of a case to those of its cause; the first of a cause names lines.

        What is wrong with the kernel as it runs is not told again of it without excess precision.
        """
        place = f.case, f.side, f.array, f.record.phase
        ours = (x.verdict.status for x in made if (x.side, x.array) == (KERNEL, f.array))
        if f.side == STRICT and any(status != "pass" for status in ours):
            self._why[place] = AS_THE_KERNEL
            return
        why = find_cause(c, f, self._mistakes)
        key = (f.side, f.array, f.record.dtype, f.verdict.status, f.record.phase, why.kind)
        if key not in self._groups:
            self._groups[key] = _Group(f, made, why.words(), [])
        self._groups[key].cases.append(f.case)
        self._why[place] = self._groups[key].why or f.verdict.text


def find_cause(c: GradientCase, f: ArrayFinding, mistakes: Mistakes) -> Cause:
    """Return what explains one array that does not pass; its words are empty where its verdict says all."""
    if f.record.phase == AGAIN or f.distance is None or (f.verdict.value is None and f.verdict.status != "nonfinite"):
        return Cause("verdict", lambda: "")
    formula, i = c.own[f.side], c.names.index(f.array)
    if f.verdict.status == "nonfinite":
        return _not_finite(c, f, i, mistakes)
    if (at := range_lost(c, f)) is not None:
        line, operation = at
        return Cause(f"range {at}", lambda: f"{operation} at {short_line(line)} exceeds its format's range: {LOST_SO}")
    narrow = formula.narrow()
    if formula.places:
        return _inside(c, f, i, mistakes)
    if not narrow and jax.default_backend() != "gpu":
        return _other_formula(UNEXPLAINED, mistakes.find(c, f.side, i, c.runs[f.side][i]))
    try:
        passes = any(
            c.judge(f.side, i, c.declared_draws(f.side, every)).verdict.status == "pass" for every in (False, True)
        )
    except CannotLift:
        return Cause("", lambda: f"formats narrower than float32 inside: {', '.join(map(short_line, narrow))}")
    if not passes:
        start = NOT_DECLARED if narrow else UNEXPLAINED
        return _other_formula(start, mistakes.find(c, f.side, i, c.runs[f.side][i]))
    if not narrow:
        return Cause("TF32", lambda: ON_GPU)
    return Cause("rounding", lambda: f"rounding explains it: {_lines(c, f, i)}")


def _other_formula(start: str, found: Explained | None) -> Cause:
    """Return the cause of an error that no rounding explains: a mistake, or that none of those known does."""
    if found is None:
        return Cause("formula", lambda: f"{start}; {NOT_KNOWN}")
    return Cause(f"formula {found.mistake.key}", lambda: f"{start}, {found.words}")


def _not_finite(c: GradientCase, f: ArrayFinding, i: int, mistakes: Mistakes) -> Cause:
    """Return why an array is not finite where FP64 is: its range ends at a line, or its formula gives that in FP64."""
    run = c.runs[f.side][i]
    try:
        own = c.own_formula(f.side)[i]
        same = np.array_equal(np.isfinite(own), np.isfinite(run.astype(np.float64)))
        at = None if same else first_infinite(c.own[f.side], c.own[f.side].leaves(c.cotangents, c.inputs))
    except CannotLift as error:
        why = refusal(error)
        return Cause("not finite", lambda: f"where is not known: {why}")
    if same:
        return _other_formula(NOT_FINITE_EITHER, mistakes.find(c, f.side, i, run))
    if at is None:
        return Cause("not finite", lambda: "no operation outside its loops gives that first")
    line, operation = at
    return Cause(f"range {at}", lambda: f"{operation} at {short_line(line)} gives it first: out of its format's range")


def _inside(c: GradientCase, f: ArrayFinding, i: int, mistakes: Mistakes) -> Cause:
    """Return the same of a function with Pallas kernels: it runs again with what they round in float32."""
    formula = c.own[f.side]
    straight = formula.with_raised_kernels(c.cotangents, c.inputs)
    again = replace(c, runs={**c.runs, f.side: straight}).judge(f.side, i, c.draws)
    before, after = (x.distance.normwise if x.distance is not None else np.inf for x in (f, again))
    if again.verdict.status != "pass" and not after < NEARLY * before:
        return _other_formula(NOT_INSIDE, mistakes.find(c, f.side, i, straight[i]))

    def words() -> str:
        told = _largest_lines(kernel_lines(formula, c.cotangents, c.inputs, i, straight[i]))
        if again.verdict.status != "pass":
            left = f"{digits(after, 2)} of its norm"
            return f"{left} without what rounds inside its kernels, {told}; the rest stands outside"
        return f"rounding explains it, {digits(after, 2)} of its norm without: {told}"

    return Cause("rounding" if again.verdict.status == "pass" else "rounding in part", words)


def _lines(c: GradientCase, f: ArrayFinding, i: int) -> str:
    return _largest_lines(line_shares(c.own[f.side], c.cotangents, c.inputs, i, c.own_formula(f.side)[i]))


def verdict_text(f: ArrayFinding, every: Sequence[ArrayFinding], why: str, more: str = "") -> str:
    """Return what is wrong with one array, in words; ``why``: what explains it; ``more``: how many cases do so, too."""
    r, v = f.record, f.verdict
    at = f"{f.array} ({f.case}{more})"
    side = "the kernel without excess precision" if f.side == STRICT else f.side
    if isinstance(r, StateError):
        return f"{side}: {at}: {r.mismatched:,} of {r.n:,} elements differ in a second run on the same inputs"
    if v.value is None or f.distance is None:
        return f"{side}: {at}: {v.text}"
    if v.status == "nonfinite":
        told = f"{side}: {at}: {r.nonfinite:,} of {r.n:,} elements: not finite where FP64 is, or finite where it is not"
        return f"{told}; {why}" if why else told
    size = f"wrong by {digits(f.distance.componentwise)} roundings at {list(f.distance.worst)}, "
    size += f"{digits(f.distance.normwise, 2)} of its norm"
    why = f"; {why}" if why else ""
    other = next((x for x in every if x.side != f.side and x.array == f.array), f)
    if f.side == REFERENCE and other.verdict.status == "pass":
        return f"the reference is the less precise side: {at} is {size}{why}"
    over = f"{v.metric} {digits(v.value)} at {v.scope}, limit {digits(v.limit)}"
    return f"{side}: {at} is {size}: more than float32's error ({over}){_factor_text(f)}{why}"


def _factor_text(f: ArrayFinding) -> str:
    """Return by which factor an array is off, where that is nearly all of its error."""
    left = f.record.unexplained if isinstance(f.record, LocalError) else None
    gain = left.gain if left is not None else None
    if gain is None or f.distance is None or abs(value(gain.value)) < NEARLY * f.distance.normwise:
        return ""
    factor = digits(1 + value(gain.value), 6)
    return f"; it is {factor} × FP64" if factor != "1" else ""


def _largest_lines(lines: Sequence[tuple[str, float]]) -> str:
    """Return the lines with the largest shares, in words."""
    return ", ".join(f"{short_line(line)} ({100 * share:.0f} %)" for line, share in lines[:NAMED] if share >= SOME)

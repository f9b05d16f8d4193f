"""What a failed assertion tells the author of a kernel: how far off, where, and what would make it, in eight lines."""

from collections.abc import Sequence
from math import isfinite

import numpy as np

from precaudit.diagnosis.evidence.alone import Alone, FewSlices, main_slices
from precaudit.judging.verdicts import Verdict
from precaudit.numbers.arrays import Array
from precaudit.reports.escaping import terminal_line
from precaudit.schema.digits import digits
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord

MANY = 10  # times the reference, from which on that is no percentage
LEADING = "axis"  # what an axis is called whose meaning nobody said


def assertion_message(
    verdict: Verdict, record: ErrorRecord, alone: Alone, expected: float, off: int, axes: Sequence[str]
) -> str:
    """Return why an array is not its reference up to rounding.

    ``expected``: the relative error of rounding alone; ``off``: elements whose errors are beyond it.
    """
    error = ratio(norm(alone.candidate - alone.reference), norm(alone.reference))
    times = f", and this is {digits(error / expected)} × as much" if expected and error > expected else ""
    where, v = alone.where(), verdict
    rounding = f"rounding to {alone.form} alone gives {digits(expected)}{times}"
    lines = [
        f"fail: the relative error of {v.point} is {digits(error)}; {rounding}",
        f"over its limit: {v.metric} {digits(v.value)} at {v.scope}, limit {digits(v.limit)}",
        _elements(off, alone.candidate.size),
        _worst(record),
        _where(where, alone, axes),
        _scale(where, alone, axes),
        _explanation(alone),
    ]
    return "\n".join(terminal_line(line) for line in lines)


def slices_text(x: FewSlices, axes: Sequence[str], shape: Sequence[int]) -> str:
    """Return slices in words: ``head 3 (axis 1, of 8)``, ``tokens 17, 18 (axis 0, of 256)``."""
    name = axes[x.axis]
    plural = "s" if len(x.indices) > 1 and name != LEADING else ""
    what = "index" if name == LEADING else f"{name}{plural}"
    return f"{what} {', '.join(map(str, x.indices))} (axis {x.axis}, of {shape[x.axis]:,})"


def nonfinite(e: ErrorRecord, bad: Array, axes: Sequence[str]) -> str:
    """Return that elements are NaN or infinite, the first of them, and which slices hold them: ``bad``."""
    many = "1 element is" if e.nonfinite == 1 else f"{e.nonfinite:,} elements are"
    text = f"nonfinite: {e.point} [local] {many} NaN or infinite; {_worst(e)}"
    found = [slices_text(x, axes, bad.shape) for x in main_slices(bad.astype(np.float64), np.ones(bad.shape))]
    return "\n".join(terminal_line(line) for line in (text, *([f"where: {', '.join(found)}"] if found else [])))


def _elements(off: int, n: int) -> str:
    if not off:
        return "elements: no single error is beyond rounding; together they are"
    return f"elements: {off:,} of {n:,} ({digits(100 * off / n)} %) have errors beyond rounding"


def _worst(e: ErrorRecord) -> str:
    w = e.worst
    if w is None:
        return "worst element: not known"
    c, r = value(w.candidate), value(w.reference)
    if not r or not isfinite(c):
        return f"worst element {list(w.index)}: {digits(c)}, reference {digits(r)}"
    apart = f"{100 * (c / r - 1):+.3g} %" if abs(c / r) < MANY else f"{digits(c / r)} ×"
    return f"worst element {list(w.index)}: {digits(c)}, reference {digits(r)} ({apart})"


def _where(found: Sequence[FewSlices], alone: Alone, axes: Sequence[str]) -> str:
    if not found:
        return "where: spread over every axis"
    shape = alone.candidate.shape
    return "where: " + "; ".join(f"{digits(100 * x.share)} % of it in {slices_text(x, axes, shape)}" for x in found[:3])


def _scale(found: Sequence[FewSlices], alone: Alone, axes: Sequence[str]) -> str:
    whole = f"{100 * alone.gain():+.3g} % over all"
    if not found:
        return f"scale: {whole}"
    return f"scale: {100 * alone.gain(found[0]):+.3g} % in {_brief(found[0], axes)}, {whole}"


def _brief(x: FewSlices, axes: Sequence[str]) -> str:
    return slices_text(x, axes, [0] * len(axes)).partition(" (")[0]


def _explanation(alone: Alone) -> str:
    made = alone.explain()
    if made is None:
        return "explained by: none that was tried (other formats, cut digits, narrow sums, a scale)"
    rest = "the rest is rounding" if made.closes else "the rest is not rounding"
    return f"explained by: {made.says} ({digits(100 * made.share)} % of the error; {rest})"

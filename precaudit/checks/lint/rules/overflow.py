"""Recorded values that a point's format does not hold."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

import ml_dtypes
import numpy as np

from precaudit.checks.lint.flow import FLOATS, Equation, Graph, as_moved, tap
from precaudit.checks.lint.recorded import Extent
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView

MOST = 65504.0  # of float16
NEAR = MOST / 4


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit the points stored as float16 of which a run recorded larger values, and where it first had infinities."""
    for view in views:
        graph, endless = view.tapped_graph, set[int]()
        for e in graph.equations:
            extent = (view.extents or {}).get(tap(e))
            if extent is None or e.result not in FLOATS:
                continue
            largest = most(graph, e, extent)
            follows = largest == inf and bool(endless & graph.behind(e.outputs[0], _all).keys())
            if largest == inf:
                endless.add(e.outputs[0])
            if (says := _says(tap(e), largest, e.result)) and not follows:
                yield Hit(view.phase, e.source, tap(e), says, severity="error" if largest > MOST else "warning")


def most(graph: Graph, e: Equation, extent: Extent) -> float:
    """Return the largest magnitude of a point; where a mask of the program's text is a part of it, the largest value.

    A mask is a constant below what float16 nearly holds, or minus infinity.
    """
    for v in graph.behind(e.inputs[0], _through_mask):
        given = np.asarray(graph.constants.get(v, 0.0))
        if str(given.dtype) in FLOATS and given.size and float(given.astype(np.float64).min()) < -NEAR:
            return max(extent.high, 0.0)
    return extent.most


def _says(point: str, largest: float, dtype: str) -> str:
    """Return what is wrong; "" where nothing is."""
    if largest == inf:
        return f"A run recorded infinity at {point}: more than {dtype} holds ({ml_dtypes.finfo(dtype).max:,.6g})."
    if dtype != "float16" or not largest > NEAR:
        return ""
    over = "more than float16 holds (65,504)" if largest > MOST else "within 4 × of what float16 holds"
    return f"A run recorded {largest:,.0f} at {point}: {over}."


def _through_mask(e: Equation) -> Iterable[int]:
    return (0, 1) if e.primitive in ("add", "sub", "max", "mul") else as_moved(e)


def _all(e: Equation) -> Iterable[int]:
    return range(len(e.inputs))


RULE = Rule(
    "overflow",
    "error",
    "run",
    "Values that a format does not hold",
    "A point is stored as float16, and a recorded run had values there that are, or nearly are, larger than its "
    "largest, 65,504; or the run had infinities there.",
    "bfloat16 or float32 for this point, or a smaller scale",
    "the least and largest values of a recorded run",
    check,
)

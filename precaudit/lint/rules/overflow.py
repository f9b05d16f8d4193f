"""Recorded values that float16 does not hold."""

from collections.abc import Iterator, Sequence

from precaudit.lint.rule import Hit, Rule
from precaudit.lint.view import View

MOST = 65504.0  # of float16
NEAR = MOST / 4


def check(views: Sequence[View]) -> Iterator[Hit]:
    """Hit the points that the program stores as float16 and that a run recorded larger values of."""
    for view in views:
        for point, largest in (view.ranges or {}).items():
            if not largest > NEAR:
                continue
            for e in view.equations:
                if e.result == "float16" and e.primitive == "name" and e.made.params["name"] == point:
                    over = "more than float16 holds (65,504)" if largest > MOST else "within 4 × of what float16 holds"
                    says = f"A run recorded {largest:,.0f} at {point}: {over}."
                    yield Hit(view.phase, e.source, point, says, severity="error" if largest > MOST else "warning")


RULE = Rule(
    "overflow",
    "error",
    "run",
    "Values that float16 does not hold",
    "A point is stored as float16, and a recorded run had values there that are, or nearly are, larger than its "
    "largest, 65,504.",
    "bfloat16 or float32 for this point, or a smaller scale",
    "the largest magnitudes of a recorded run",
    check,
)

"""What sums of rows say of an operation that was not recorded: which, how much, and how to learn more."""

from typing import Any

from precaudit.diagnosis.evidence.records import Finding
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import SumError

CAUSE = "its sums are not what its inputs give"
NOT_FINITE = "not finite"
ALIGNED = 0.9  # cosine of an error and its values from which one factor makes it


def by_sums(e: SumError, fails: str, more: str, shared: dict[str, Any]) -> Finding:
    """Return the finding of a record of sums that fails: an operation and a size, no cause."""
    held = shared | {"fails": fails}
    if e.nonfinite:
        says = f"{e.nonfinite} of its rows have NaN or infinities, and its inputs have none. {_unseen(more)}"
        return Finding(kind="unknown", cause=NOT_FINITE, says=says, explained=None, equal=None, second=None, **held)
    gain, off = value(e.gain or 0.0), value(e.rel_l2 or 0.0)
    scaled = abs(gain) > ALIGNED * off
    size = f"; its values are {digits(100 * abs(gain), 2)} % too {'large' if gain > 0 else 'small'}" if scaled else ""
    says = f"seeded sums of its rows are not those that {_made_of(e)}{size}. {_unseen(more)}"
    return Finding(kind="unknown", cause=CAUSE, says=says, explained=None, equal=None, second=None, **held)


def _made_of(e: SumError) -> str:
    """Return what the sums have to be, in words: what its inputs give, or every operation from an earlier one on."""
    if e.inherits is not None:
        return f"every operation from {e.inherits} to it gives"
    return f"{' and '.join(inputs := POINTS[e.point].inputs)} give{'s' if len(inputs) == 1 else ''}"


def _unseen(more: str) -> str:
    return f"The rows were not recorded: {more}"

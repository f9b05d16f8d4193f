"""What sums of rows say of an operation that was not recorded: which, how much, and how to learn more."""

from typing import Any

from precaudit.evidence.records import Finding
from precaudit.graphs.decoder import POINTS
from precaudit.records import ErrorRecord, value

CAUSE = "its sums are not what its inputs give"
ALIGNED = 0.9  # cosine of an error and its values from which one factor makes it


def by_sums(e: ErrorRecord, fails: str, more: str, shared: dict[str, Any]) -> Finding:
    """Return the finding of a record of sums that fails: an operation and a size, no cause."""
    gain, off = value(e.gain or 0.0), value(e.rel_l2 or 0.0)
    inputs = " and ".join(POINTS[e.point].inputs)
    scaled = abs(gain) > ALIGNED * off
    size = f"; its values are {100 * abs(gain):.2g} % too {'large' if gain > 0 else 'small'}" if scaled else ""
    says = f"seeded sums of its rows are not those that {inputs} give{size}. The rows were not recorded: {more}"
    held = shared | {"fails": fails}
    return Finding(kind="unknown", cause=CAUSE, says=says, explained=None, equal=None, second=None, **held)

"""The rows of a recorded tensor, as points.jsonl says them: a range, or a list."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from precaudit.schema.records.runs import PointRecord

if TYPE_CHECKING:  # the gate reads runs, and no tensor of them
    from precaudit.numbers.arrays import Array


@lru_cache(maxsize=64)
def pack_positions(positions: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return ([first, end), "range") for consecutive rows, else (the rows, "list")."""
    if positions and positions == tuple(range(positions[0], positions[0] + len(positions))):
        return (positions[0], positions[-1] + 1), "range"
    return positions, "list"


def positions_of(record: PointRecord) -> Sequence[int]:
    """Return the rows a record holds."""
    return range(*record.positions) if record.rows == "range" else record.positions


def unpack_positions(record: PointRecord) -> "Array":
    """Return the rows a record holds, int64."""
    import numpy as np

    return np.asarray(positions_of(record), np.int64)

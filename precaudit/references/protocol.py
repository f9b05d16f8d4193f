"""What a run is held against: FP64 of the whole program, and every operation made again on what the run recorded."""

from collections.abc import Iterable
from typing import Protocol

from precaudit.numbers.arrays import Array
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ErrorRecord


class Reference(Protocol):
    """The textbook of a family (``textbook``), or a program's own jaxpr (``traced``).

    Both make an operation again in FP64 and under honest roundings, and hold what these leave to a componentwise bound
    and to the noise of honest programs (``closing.Yardstick``), so that a record's numbers mean the same of both.
    """

    def values(self, place: Place) -> Array | None:
        """Return FP64 values of the whole program at a place; None where it did not come there."""

    def local(self, place: Place) -> Iterable[ErrorRecord]:
        """Yield the records of the operation at a place, from recorded inputs; of its phase, every step's."""

    def forward(self, place: Place) -> Iterable[ErrorRecord]:
        """Yield the records of a place against FP64 of the whole program; of its phase, every step's."""

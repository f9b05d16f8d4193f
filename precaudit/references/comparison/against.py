"""The errors of a place against a reference, whichever it is."""

from collections.abc import Iterable, Iterator

from precaudit.references.protocol import Reference
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ErrorRecord


def place_errors(reference: Reference, places: Iterable[Place]) -> Iterator[ErrorRecord]:
    """Yield the errors of places: of an operation alone, from recorded inputs, and of the whole program so far."""
    for place in places:
        yield from reference.local(place)
        yield from reference.forward(place)

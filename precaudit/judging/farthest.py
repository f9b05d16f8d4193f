"""How far values are from FP64, whatever explains it: what a verdict alone does not say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.devices import Way
from precaudit.schema.records.errors import ErrorRecord, ForwardError, LocalError

Ways = Mapping[str, Sequence[Way]]


@dataclass(frozen=True)
class Farthest:
    """The largest relative error from FP64 of a whole run, and of one operation by itself.

    ``ways``: how the compiler makes the products of that operation, where it was read. ``cancelled``: points that are
    left out, since their terms cancel: rounding is as large as they are, and a relative error of them says nothing.
    """

    whole: float
    at: Place
    own: float = 0.0
    made_at: Place | None = None
    ways: tuple[Way, ...] = ()
    cancelled: tuple[str, ...] = ()


@dataclass
class Sizes:
    """The largest forward and local errors of records as they stream by; what is not finite is judged elsewhere."""

    _largest: dict[str, tuple[float, Place]] = field(default_factory=dict)
    _cancelled: dict[str, None] = field(default_factory=dict)

    def add(self, e: ErrorRecord) -> None:
        """Look at a record; of one that is not finite the other elements say nothing."""
        if e.nonfinite:
            return
        if isinstance(e, ForwardError) and e.noise is not None and value(e.noise) >= 1.0:
            self._cancelled.setdefault(e.point)
        elif isinstance(e, ForwardError | LocalError) and e.rel_l2 is not None:
            size = value(e.rel_l2)
            if isfinite(size) and size > self._largest.get(e.kind, (-1.0, None))[0]:
                self._largest[e.kind] = size, Place.of(e)

    def farthest(self, made: Ways) -> Farthest | None:
        """Return the largest of each; None where no forward error is known. ``made``: how products are, by point."""
        if "forward" not in self._largest:
            return None
        whole, at = self._largest["forward"]
        if "local" not in self._largest:
            return Farthest(whole, at, cancelled=tuple(self._cancelled))
        own, place = self._largest["local"]
        ways = tuple(made.get(place.point) or made.get("", ()))
        return Farthest(whole, at, own, place, ways, tuple(self._cancelled))


def ways_made(each: Iterable[Ways]) -> Ways:
    """Return how products are made, by point, of all compiled programs of a run that tell.

    Products that are told by number (``product.N``) are no point's: "" has the way of them all where they have one.
    """
    found: dict[str, dict[Way, None]] = {}
    for made in each:
        for point, ways in made.items():
            found.setdefault(point, {}).update(dict.fromkeys(ways))
    every = {w for ways in found.values() for w in ways}
    return {point: tuple(ways) for point, ways in found.items()} | {"": tuple(every) if len(every) == 1 else ()}

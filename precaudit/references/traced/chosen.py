"""Whether what a recorded program's sorts, top-ks and argmaxes chose is what its recorded values choose (JAX)."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import structs

from precaudit.interpreters.jaxpr.choices import choices
from precaudit.interpreters.jaxpr.shadow import CannotLift, refusal
from precaudit.interpreters.jaxpr.sites import STATE, Site, unique_names
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.programs import Opened
from precaudit.schema.places import Place
from precaudit.schema.records.errors import StateError

ROUNDINGS = 4.0  # unit roundoffs that two values may be apart, of which a compiler compares the unrounded ones


class Choices:
    """A program's choices, compiled once."""

    def __init__(self, made: Tagged, layers: Sequence[int] | None = None) -> None:
        known = zip(unique_names(made.states), made.states, strict=True)
        self.states: dict[str, Site] = {name: s for name, s in known if s.name in made.tags}
        self.units = {s.name: FORMATS[made.tags[s.name].by].unit_roundoff for s in self.states.values()}
        self.layers, self.distances = layers, jax.jit(choices(made.call, self.units, layers))

    def records(
        self, opened: Opened, case: str, call: int, taps: dict[str, Array], args: tuple[Any, ...]
    ) -> Iterator[StateError]:
        """Yield a record of every choice, of each step of its outermost scan where it is in one."""
        if not self.states:
            return
        found, why = self._distances(taps, args)
        for name, site in self.states.items():
            limit, steps = ROUNDINGS * self.units[site.name], prod(site.stacked)
            apart = found.get(name)
            known = apart is not None and not np.isnan(apart).any()
            off = (apart > limit).reshape(steps, -1) if known and apart is not None else None
            for layer in range(steps) if site.stacked else (None,):
                here = self._record(opened, case, call, name, layer)
                if off is None:
                    yield structs.replace(here, unknown=why or "what it chooses by is not computed here")
                else:
                    yield structs.replace(here, dtype=np.dtype(site.dtype).name, **_count_choices(off[layer or 0]))

    def _distances(self, taps: dict[str, Array], args: tuple[Any, ...]) -> tuple[dict[str, Array], str | None]:
        """Return how far each choice is from that of the recorded values, and why there is none."""
        try:
            with jax.enable_x64(True):
                given = {n: jnp.asarray(x) for n, x in taps.items()}
                return {n: np.asarray(x) for n, x in self.distances(given, *args).items()}, None
        except (CannotLift, NotImplementedError) as error:
            return {}, refusal(error)

    def _record(self, opened: Opened, case: str, call: int, name: str, layer: int | None) -> StateError:
        here = Place(case, opened.record.phase, call, layer, name.removeprefix(STATE))
        return here.record(StateError, opened.record.id, "recorded values")


def _count_choices(off: Array) -> dict[str, Any]:
    """Return how many choices there are, how many are off, and which."""
    places = tuple((int(i), int(i) + 1) for i in np.flatnonzero(off))
    return {"n": off.size, "mismatched": len(places), "rows": places or None}

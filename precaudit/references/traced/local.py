"""Local errors of a program's run: each segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from precaudit.arrays import Array
from precaudit.records import ErrorRecord, Way
from precaudit.references.traced.forward import effort
from precaudit.references.traced.judged import At, Call, Segments, unknown
from precaudit.references.traced.remade import (
    DRAWS,
    FIRST,
    HONEST,
    INSIDE,
    NARROW,
    TERMS,
    UNSHARED,
    Draws,
    Remade,
    Tapped,
    once,
)
from precaudit.references.traced.search import Search
from precaudit.references.traced.units import Units
from precaudit.references.traced.unrounded import Place, Rows, Unrounded
from precaudit.runs.programs import CARRIED, Opened, places
from precaudit.threads import one_blas_thread
from precaudit.transforms.emulate import Realisation, exactly
from precaudit.transforms.narrow import held, moved_as_bits
from precaudit.transforms.opaque import KNOWN, Opaque
from precaudit.transforms.shadow import CannotLift, refusal
from precaudit.transforms.sites import numbered
from precaudit.transforms.sums import sums_narrow
from precaudit.transforms.tag import Tagged

Ways = dict[tuple[str, ...], Realisation]
# What is said of products that a GPU's compiled program does not name.
OPEN_PRODUCTS: dict[Way, str] = {"float32": "products in float32", "rounded products": TERMS}


class Emulations:
    """A program's segments, compiled once: in FP64, as its equations round, and as drawn realisations.

    ``units``: how a TPU or a GPU makes products, None of a CPU; where a TPU's vector unit makes some, every way is
    tried with their terms rounded, too. ``opaque``: of the program that ``made`` leaves blank in part.
    """

    def __init__(
        self, made: Tagged, layers: Sequence[int] | None = None, units: Units | None = None, opaque: Opaque = KNOWN
    ) -> None:
        ways = HONEST | (NARROW if sums_narrow(made.jaxpr.jaxpr) else {})
        self.open = units is not None and units.leaves_open(made.jaxpr.jaxpr)
        tried, self.gpu = FIRST, units is not None and units.gpu
        if units is not None and units.gpu:
            ways, tried = _on_gpu(ways, units, units.otherwise(made.jaxpr.jaxpr))
        elif units is not None:
            tried = (*FIRST, INSIDE, UNSHARED)
            ways = {name: units.making(how) for name, how in {**ways, UNSHARED: Realisation("unshared")}.items()}
            if units.vector:
                ways |= {(TERMS, *name): replace(how, unit="vector") for name, how in ways.items()}
        self.first = {name for name in ways if _declared(name) in tried}
        # steps that are not recorded go on with what was made in them: nothing there cuts what has no FP64 meaning off
        self.opaque = opaque.segment if layers is None else opaque.whole
        self.tapped, self.layers = Tapped(made, layers, self.opaque), layers
        self.states = {n for n, s in zip(numbered(made.states), made.states, strict=True) if s.stacked}
        with jax.enable_x64(True):
            self.exact = jax.jit(exactly(made.call, steps=layers), compiler_options=effort(made))
            self.honest = {name: Remade(self.tapped, how) for name, how in ways.items()}
            draws = [replace(how, sums="shuffled") for how in DRAWS] if self.gpu else DRAWS  # as its threads come
            self.drawn = Draws(self.tapped, draws)
            mine = ways.items() if self.gpu else ()
            self.tied = {n: Remade(self.tapped, replace(how, ties=True)) for n, how in mine if n in self.first}
            twice = self.drawn.ways if self.gpu else ()
            self.apart = {way: Remade(self.tapped, replace(way.how, apart=True)) for way in twice}
            first = [how for name, how in ways.items() if name in self.first]
            self.together = jax.jit(moved_as_bits(once(self.tapped, first)), compiler_options=effort(made))

    def records(
        self, opened: Opened, case: str, call: int, taps: dict[str, Array], args: tuple[Any, ...]
    ) -> list[ErrorRecord]:
        """Return a call's local records, one for every point and step of its scans.

        Noise is drawn of what the least does not close. What does not close so is tried in every honest way, with its
        inputs as they were before they were rounded, too; what still does not, with some inputs so and others as
        recorded, and then with the noise that these have before they are rounded.
        """
        every = [(p, layer) for p, layer in places(opened.record) if p.primitive != CARRIED]
        blank = [(p, layer, self.opaque.get(self.tapped.names.get(p.name, p.name))) for p, layer in every]
        here = Call(opened, case, call, taps)
        unmeant = [unknown(here, p, layer, why) for p, layer, why in blank if why is not None]
        known = [(p, layer) for p, layer, why in blank if why is None]
        try:
            with one_blas_thread(), jax.enable_x64(True):
                return [*unmeant, *self._known(replace(here, taps=self._steps(taps)), args, known)]
        except (CannotLift, NotImplementedError) as error:
            return [*unmeant, *(here.record(p, layer, unknown=refusal(error)) for p, layer in known)]

    def _known(self, call: Call, args: tuple[Any, ...], every: Sequence[At]) -> list[ErrorRecord]:
        """Return the records of places whose segments have an FP64 meaning."""
        points = {p.name: p for p, _ in every}

        def rows(place: Place, values: Array) -> Array:
            return call.rows(points[place[0]], place[1])(values)

        more = Unrounded(self.tapped, self.honest, self.first, call.taps, args, rows)
        # not held here: what all places make is gigabytes
        search = Search(call, every, self._made(call.taps, args, [(p.name, layer) for p, layer in every], rows), more)
        search.noise(self.drawn)
        search.layers_first()
        search.ways()
        search.inputs(self.drawn.ways)
        if self.gpu:
            search.on_gpu(self.apart, self.tied)
        return search.found

    def _made(
        self, taps: dict[str, Array], args: tuple[Any, ...], every: Sequence[Place],
        rows: Callable[[Place, Array], Array],
    ) -> Segments:  # fmt: skip
        """Return all segments in FP64 and in the first ways."""

        def of(values: dict[str, Any]) -> Rows:
            host = {name: np.asarray(x) for name, x in values.items()}
            return {place: rows(place, host[place[0]]) for place in every if place[0] in host}

        names = [name for name in self.honest if name in self.first]
        if self.tapped.small:
            rounded = (of(self.honest[name].rounded(taps, args)) for name in names)
            exact, *made = of(self.exact(taps, *args)), *rounded
        else:
            exact, *made = map(of, self.together(*held((taps, *args))))
        return Segments(exact, dict(zip(names, made, strict=True)), open=self.open, gpu=self.gpu)

    def _steps(self, taps: dict[str, Array]) -> dict[str, Array]:
        """Return a call's taps; what loops decided, which is recorded at every step, at those steps that points are."""
        if self.layers is None:
            return taps
        return {n: x[[i for i in self.layers if i < len(x)]] if n in self.states else x for n, x in taps.items()}


def _on_gpu(ways: Ways, units: Units, otherwise: Sequence[Way]) -> tuple[Ways, tuple[tuple[str, ...], ...]]:
    """Return ways as a GPU has them, and which are tried first; those products that are left open in every way."""
    made = {name: units.making(how) for name, how in ways.items()}
    if not otherwise:
        return made, FIRST
    forms = {(): otherwise[0]} | {(OPEN_PRODUCTS[way],): way for way in otherwise[1:]}
    every = {(*form, *name): replace(how, otherwise=way) for form, way in forms.items() for name, how in made.items()}
    return every, (*FIRST, *((*form, *name) for form in forms if form for name in FIRST))


def _declared(name: tuple[str, ...]) -> tuple[str, ...]:
    """Return a way's name without how products are made."""
    return name[1:] if name[:1] == (TERMS,) else name

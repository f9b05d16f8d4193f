"""Segments of a program, or of one step of its scan, compiled: in FP64, as equations round, and as drawn (JAX)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.extend.core as jex
import numpy as np

from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.jaxpr.multiplying import narrow_product, single_product
from precaudit.interpreters.jaxpr.realisations import (
    Realisation,
    contracts,
    converts_twice,
    elidable,
    rounds_all,
)
from precaudit.interpreters.jaxpr.sums import sums_in_lanes, sums_narrow
from precaudit.numbers.arrays import Array
from precaudit.references.traced.accumulations import Accumulations
from precaudit.references.traced.judged import At, JudgedCall, Recomputed, Segments
from precaudit.references.traced.remade import (
    COMPUTED,
    CONTRACTED,
    CONVERTED,
    DRAWS,
    FIRST,
    FUSED,
    HONEST,
    INSIDE,
    LANED,
    NARROW,
    NARROW_PRODUCTS,
    TERMS,
    TWICE,
    UNROUNDED_STATISTICS,
    UNSHARED,
    Redrawn,
    Remade,
    Several,
    Tapped,
)
from precaudit.references.traced.search import Closing, Search
from precaudit.references.traced.units import Units
from precaudit.references.traced.unrounded import Name, Place, Rows, Unrounded
from precaudit.schema.records.devices import Way

Cut = Callable[[Place, Array], Array]  # a place's rows [rows, N] out of a point's values
# What is said of products that a GPU's compiled program does not name.
OPEN_PRODUCTS: dict[Way, str] = {"float32": "products in float32", "rounded products": TERMS}


@dataclass(frozen=True)
class Realisations:
    """How segments may be made: ``honest`` ways by name, ``first`` those tried of every segment; ``draws``: for noise.

    ``open``: whether of some product it is not known how it is made; ``gpu``: whether one makes them;
    ``narrow_products``: whether a backend might sum some in a format of 16 bits; ``in_order``: and some in float32 term
    after term; ``by_conversions``: whether some values of 16 bits are converted to a wider format.
    """

    honest: Mapping[Name, Realisation]
    first: frozenset[Name]
    draws: tuple[Realisation, ...]
    open: bool
    gpu: bool
    narrow_products: bool
    in_order: bool
    by_conversions: bool


def realisations(jaxpr: jex.Jaxpr, units: Units | None, flush: bool = False) -> Realisations:
    """Return how the segments of an open jaxpr may be made.

    ``units``: how the device makes products, None: as they declare; where a TPU's vector unit makes some, every way is
    tried with their terms rounded, too. ``flush``: whether the device makes 0 of subnormals.
    """
    narrow = sums_narrow(jaxpr)
    ways: Mapping[Name, Realisation] = HONEST | (NARROW if narrow else {}) | (LANED if sums_in_lanes(jaxpr) else {})
    ways = {name: how for name, how in ways.items() if not how.contracted or contracts(jaxpr)}
    more = (CONTRACTED if contracts(jaxpr) else {}) | (TWICE if converts_twice(jaxpr) else {})
    ways = {**ways, **{name: how for name, how in more.items() if narrow or how.sums == "exact"}}
    tried, gpu = FIRST, units is not None and units.gpu
    if units is not None and units.gpu:
        ways, tried = _on_gpu(ways, units, units.otherwise(jaxpr))
    elif units is not None and units.cpu:
        ways = {name: units.making(how) for name, how in ways.items()}
    elif units is not None:
        tried = (*FIRST, INSIDE, UNSHARED)
        own: dict[Name, Realisation] = {
            UNSHARED: Realisation("unshared"),
            UNROUNDED_STATISTICS: Realisation("statistics"),
        }
        ways = {name: units.making(how) for name, how in {**ways, **own}.items()}
        if units.vector:
            ways |= {(TERMS, *name): replace(how, unit="vector") for name, how in ways.items()}
    draws = tuple(replace(how, sums="shuffled") for how in DRAWS) if gpu else DRAWS  # as its threads come
    first = frozenset(name for name in ways if _declared_way(name) in tried)
    ways = {name: replace(how, flush=flush) for name, how in ways.items()}
    draws = tuple(replace(how, flush=flush) for how in draws)
    if units is not None and units.split:
        draws = tuple(replace(how, split=units.split) for how in draws)
    cpu, equations = units is None or units.cpu, list(walk_equations(jaxpr))
    narrow_products, in_order = (cpu and any(map(of, equations)) for of in (narrow_product, single_product))
    return Realisations(
        ways,
        first,
        draws,
        units is not None and units.leaves_open(jaxpr),
        gpu,
        narrow_products,
        in_order,
        cpu and elidable(jaxpr),
    )


class CompiledSegments:
    """Segments compiled when first asked for, under every realisation, and with sums in the formats of ``accum``."""

    def __init__(self, tapped: Tapped, how: Realisations, accum: Sequence[str] = ()) -> None:
        self.tapped, self.how, self.accumulations = tapped, how, Accumulations(tapped, accum)
        self.honest = {name: Remade(tapped, way) for name, way in how.honest.items()}
        self.names = [name for name in how.honest if name in how.first]
        self.strict = [n for n, way in how.honest.items() if rounds_all(way)]
        self.first = Several(tapped, [self.honest[name] for name in self.names], exact=True)
        self.drawn = Several(tapped, [Remade(tapped, way) for way in how.draws])
        self.redrawn = Redrawn(tapped, replace(how.draws[0], seed=0))
        narrow = replace(NARROW_PRODUCTS, flush=how.draws[0].flush)
        pairs = {n: way for n, way in how.honest.items() if how.by_conversions and n[-1:] in (CONVERTED, COMPUTED)}
        self.by_conversions = {n: Remade(tapped, replace(way, by_conversions=True)) for n, way in pairs.items()}
        fused = replace(FUSED, flush=how.draws[0].flush)
        self.in_order = Remade(tapped, fused) if how.in_order else None
        self.narrow_products = Remade(tapped, narrow) if how.narrow_products else None
        mine = how.honest.items() if how.gpu else ()
        self.tied = {n: Remade(tapped, replace(way, ties=True)) for n, way in mine if n in how.first}
        twice = self.drawn.ways if how.gpu else ()
        self.apart = {way: Remade(tapped, replace(way.how, apart=True)) for way in twice}

    def start(
        self,
        call: JudgedCall,
        every: Sequence[At],
        taps: dict[str, Array],
        args: tuple[Any, ...],
        cut: Cut,
        closing: Closing | None = None,
    ) -> Callable[[], list[Recomputed]]:
        """Have JAX make what places make in FP64 and in the first ways; return what gives their records.

        ``taps``, ``args``: of what is compiled; ``closing``: what closed steps before.
        """
        made = self.first.made({p.name for p, _ in every}, taps, args)
        more = Unrounded(self.tapped, self.honest, self.how.first, taps, args, cut)
        return partial(self._records, call, every, more, made, closing)

    def _records(
        self,
        call: JudgedCall,
        every: Sequence[At],
        more: Unrounded,
        made: list[dict[str, Any]],
        closing: Closing | None,
    ) -> list[Recomputed]:
        """Return the records of places; ``made``: what the first ways make.

        Noise is drawn of what the least does not close. What does not close so is tried in every honest way, with its
        inputs as they were before they were rounded, too; what still does not, with some inputs so and others as
        recorded, with the noise that these have before they are rounded, and then with more draws.
        """
        # not held here: what all places make is gigabytes
        search = Search(call, every, self._segments(made, [(p.name, layer) for p, layer in every], more.rows), more)
        if closing is not None:
            search.as_before(closing)
        search.noise(self.drawn)
        if closing is None:
            search.layers_first()
            search.ways()
        else:
            search.ways_noted(closing)
        if self.by_conversions:
            search.by_conversions(self.by_conversions)
        search.inputs(self.drawn.ways)
        search.more_noise(self.redrawn)
        if self.in_order is not None:
            search.in_order(self.in_order)
        search.excess_precision([self.honest[name] for name in self.strict])
        if self.narrow_products is not None:
            search.narrow_products(self.narrow_products)
        if self.how.gpu:
            search.on_gpu(self.apart, self.tied)
        return [*search.found, *self.accumulations.records(call, every, more.taps, more.args, more.rows)]

    def _segments(self, made: list[dict[str, Any]], every: Sequence[Place], cut: Cut) -> Segments:
        """Return segments in FP64 and in the first ways; it is let go."""

        def of(values: dict[str, Any]) -> Rows:
            host = {name: np.asarray(x) for name, x in values.items()}
            return {place: cut(place, host[place[0]]) for place in every if place[0] in host}

        exact, *rounded = map(of, made)
        made.clear()
        return Segments(exact, dict(zip(self.names, rounded, strict=True)), open=self.how.open, gpu=self.how.gpu)


def _on_gpu(
    ways: Mapping[Name, Realisation], units: Units, otherwise: Sequence[Way]
) -> tuple[Mapping[Name, Realisation], tuple[Name, ...]]:
    """Return ways as a GPU has them, and which are tried first; those products that are left open in every way."""
    made = {name: units.making(how) for name, how in ways.items()}
    if not otherwise:
        return made, FIRST
    forms = {(): otherwise[0]} | {(OPEN_PRODUCTS[way],): way for way in otherwise[1:]}
    every = {(*form, *name): replace(how, otherwise=way) for form, way in forms.items() for name, how in made.items()}
    return every, (*FIRST, *((*form, *name) for form in forms if form for name in FIRST))


def _declared_way(name: tuple[str, ...]) -> tuple[str, ...]:
    """Return a way's name without how products are made."""
    return name[1:] if name[:1] == (TERMS,) else name

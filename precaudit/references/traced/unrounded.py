"""Segments that read narrow inputs as they were before these were rounded, all or some of them (JAX).

A compiler that widens what it has just rounded hands the unrounded value on (docs/numerics.md, fact 2).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.references.traced.excess_precision import Choices, Segment
from precaudit.references.traced.remade import (
    BY_CONVERSIONS,
    INPUTS,
    SOME,
    Redrawn,
    Remade,
    Several,
    Tapped,
    Values,
    widen_some,
)
from precaudit.schema.metrics.sizes import EXPONENT, smallest_normal

Name = tuple[str, ...]
Place = tuple[str, int | None]  # a point and its layer
Rows = dict[Place, Array]
Left = Mapping[str, Sequence[int | None]]


@jax.jit
def _rounding_to(recorded: jax.Array, before: jax.Array) -> Any:
    """Return FP64 values before they were rounded, no farther from what was recorded than rounding puts them.

    Where an emulation has another value, such as a long sum in a narrow format, the nearest that rounds to it.
    ``half``: as ``metrics.sizes.half_ulp``.
    """
    name = recorded.dtype.name
    wide, smallest = recorded.astype(np.float64), smallest_normal(name)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(wide, np.int64) & EXPONENT, np.float64)
    ulp = FORMATS[name].unit_roundoff * jnp.minimum(power, 2.0**1023)
    half = jnp.where(jnp.abs(wide) < smallest, smallest, ulp) * (1 - 2.0**-30)  # so that it rounds to what was recorded
    return jnp.clip(before, wide - half, wide + half)


class Unrounded:
    """What is tried of a call's segments that the first ways leave open; ``honest``: all ways, ``first`` among them.

    Of what is made only the places that are left are kept, as ``rows(place, values of the point)`` cuts them out.
    """

    def __init__(
        self,
        tapped: Tapped,
        honest: Mapping[Name, Remade],
        first: Collection[Name],
        taps: Values,
        args: tuple[Any, ...],
        rows: Callable[[Place, Array], Array],
    ) -> None:
        self.tapped, self.taps, self.args = tapped, taps, args
        self.honest, self.first, self.rows = honest, first, rows
        self._before: dict[tuple[Remade, str], Array] = {}
        self._wide: dict[str, Array] = {}

    def drawn(self, draws: Several, left: Left) -> tuple[Rows, ...]:
        """Return what drawn realisations make of recorded inputs; in memory of its own where it is little."""
        made = draws.made(left, self.taps, self.args)
        few = {n for n, layers in left.items() if n in self.tapped.sites and self._little(n, layers)}
        found: tuple[Rows, ...] = tuple({} for _ in made)
        for rows, each in zip(found, made, strict=True):
            for name in (n for n in left if n in each):
                x = np.asarray(each[name])
                cut = {(name, layer): self.rows((name, layer), x) for layer in left[name]}
                rows |= {at: y.copy() for at, y in cut.items()} if name in few else cut
        return found

    def redrawn(self, draws: Redrawn, left: Left) -> tuple[Rows, ...]:
        """Return what more draws make of recorded inputs."""
        made = draws.made(frozenset(left), self.taps, self.args)
        host = [{name: np.asarray(each[name]) for name in left if name in each} for each in made]
        return tuple(
            {(n, layer): self.rows((n, layer), x).copy() for n, x in each.items() for layer in left[n]} for each in host
        )

    def sizes(self, left: Left) -> Rows:
        """Return (|A|·|B|) of places."""
        made = self.tapped.sizes(frozenset(left), self.taps, self.args)
        return {(n, layer): self.rows((n, layer), np.asarray(x)).copy() for n, x in made.items() for layer in left[n]}

    def _little(self, name: str, layers: Sequence[int | None]) -> bool:
        """Whether layers are less than half of a point's."""
        return 2 * len(layers) < prod(self.tapped.sites[name].stacked)

    def all_inputs(self, left: Left) -> dict[Name, Rows]:
        """Return what the first ways make of narrow inputs as each has them before they are rounded."""
        ways = {name: way for name, way in self.honest.items() if name in self.first}
        return {(*name, INPUTS): self._of(way, left, self._given_values(way, left)) for name, way in ways.items()}

    def by_conversions(self, ways: Mapping[Name, Remade], left: Left) -> dict[Name, Rows]:
        """Return what ways make that read narrow inputs unrounded where these are converted to a wider format alone."""
        return {
            (*name, BY_CONVERSIONS): self._of(way, left, self._given_values(self.honest[name], left))
            for name, way in ways.items()
        }

    def other_ways(self, left: Left) -> dict[Name, Rows]:
        """Return what the other ways make."""
        ways = {name: way for name, way in self.honest.items() if name not in self.first}
        return {name: self._of(way, left, self._recorded_values(left)) for name, way in ways.items()}

    def some_inputs(self, left: Left) -> dict[Name, Rows]:
        """Return what each way makes with some narrow inputs read unrounded, the others as recorded.

        Which: those whose number has a bit set, or not set, so that of any two inputs either is read so without the
        other. A point is made again where a choice is another one of what its segment reads.
        """
        tried: dict[str, set[frozenset[str]]] = {p: set() for p in left}
        found = {}
        for bit in range(max(len(self.tapped.narrow(self.taps)) - 1, 1).bit_length()):
            for value in (0, 1):
                choice = f"{bit}.{value}"
                some = self._chosen(choice)
                mine = {p: frozenset(some.intersection(self._reads(p))) for p in left}
                new = {p: layers for p, layers in left.items() if mine[p] not in tried[p]}
                for p in new:
                    tried[p].add(mine[p])
                for name, way in self.honest.items() if new else ():
                    found[(*name, SOME, choice)] = self._of(way, new, self._partly(choice, new))
        return found

    def made_as(self, name: Name, left: Left) -> Rows:
        """Return what one way makes: of those that ``all_inputs``, ``other_ways`` and ``some_inputs`` name."""
        if name[-1:] == (INPUTS,):
            way = self.honest[name[:-1]]
            return self._of(way, left, self._given_values(way, left))
        if SOME in name:
            at = name.index(SOME)
            return self._of(self.honest[name[:at]], left, self._partly(name[at + 1], left))
        return self._of(self.honest[name], left, self._recorded_values(left))

    def made_by(self, way: Remade, left: Left) -> Rows:
        """Return what a way that is none of the honest ones makes of recorded values."""
        return self._of(way, left, self._recorded_values(left))

    def _chosen(self, choice: str) -> set[str]:
        """Return the narrow values whose number has a bit set, or not set: "bit.value"."""
        bit, value = map(int, choice.split("."))
        return {k for i, k in enumerate(self.tapped.narrow(self.taps)) if (i >> bit) & 1 == value}

    def _partly(self, choice: str, left: Left) -> Values:
        """Return recorded values, those that are chosen as they were before they were rounded."""
        known, some = self._before_of(self.honest[()], self._inputs(left)), self._chosen(choice)
        return {k: known[k] if k in some and k in known else x for k, x in self._recorded_values(left).items()}

    def differences(self, drawn: Collection[Remade], left: Left, unrounded: Rows) -> tuple[Rows, ...]:
        """Return what realisations differ by from ``unrounded``, each with the inputs that it makes itself."""
        made = (self._of(way, left, self._given_values(way, left)) for way in drawn)
        with np.errstate(invalid="ignore"):  # equal infinities
            return tuple({place: x - unrounded[place] for place, x in each.items()} for each in made)

    def again(self, drawn: Mapping[Remade, Remade], left: Left) -> tuple[Rows, ...]:
        """Return what realisations differ by where a reader of float32 values makes what it reads once more.

        A GPU's compiler makes what several fusions read in each of them, its sums in another order. ``drawn``: each
        beside the same with two of each value.
        """
        inputs = list(dict.fromkeys(k for p in left for k in self.tapped.narrow_reads(p, self.taps, self.args, 32)))
        recorded = self._recorded_values(left)
        found = []
        for way, apart in drawn.items() if inputs else ():
            before = way.before(inputs, self._recorded_values(inputs), self.args)
            other = recorded | {k: jnp.asarray(x).astype(np.float32) for k, x in before.items()}
            two = {k: jnp.stack([x, other[k]]) for k, x in recorded.items()}
            try:
                first, second = self._of(apart, left, two), apart.before(left, two, self.args)
            except NotImplementedError:  # an operation that JAX does not make of two of each
                return ()
            plain = self._of(way, left, recorded)
            held = {name: np.asarray(x) for name, x in second.items()}
            found.append({place: x - plain[place] for place, x in first.items()})
            found.append({place: self.rows(place, held[place[0]]) - x for place, x in plain.items()})
        return tuple(found)

    def tied(self, ways: Mapping[Name, Remade], left: Left) -> dict[Name, Rows]:
        """Return what ways make of recorded values with what operands near a tie may make of it."""
        return {name: self._of(way, left, self._recorded_values(left)) for name, way in ways.items()}

    def choices(self, way: Remade, point: str, layers: Sequence[int | None]) -> Choices:
        """Return the choices of what a point's segment reads unrounded, its inputs among them."""
        steps = self.tapped.steps_of_layers(point, layers) if not self.tapped.small else None
        segment = Segment(self.tapped, way.how, point, steps, self._given_values(way, [point]), self.args)

        def rows(values: Array) -> Rows:
            cut = self.rows if steps is None else partial(self._row, steps=steps)
            return {(point, layer): cut((point, layer), values) for layer in layers}

        return Choices(segment, rows)

    def _reads(self, point: str) -> list[str]:
        return self.tapped.narrow_reads(point, self.taps, self.args)

    def _inputs(self, points: Collection[str]) -> list[str]:
        return list(dict.fromkeys(k for p in points for k in self._reads(p)))

    def _recorded_values(self, points: Collection[str]) -> Values:
        """Return recorded values, the narrow ones that points read in FP64: widened, and copied to the device, once."""
        inputs = self._inputs(points)
        new = widen_some({k: self.taps[k] for k in inputs if k not in self._wide}, inputs)
        self._wide |= {k: jnp.asarray(x) for k, x in new.items()}
        return self.taps | {k: self._wide[k] for k in inputs}

    def _given_values(self, way: Remade, points: Collection[str]) -> Values:
        """Return recorded values with the narrow ones that are read as a way has them before they are rounded."""
        return self.taps | self._before_of(way, self._inputs(points))

    def _before_of(self, way: Remade, inputs: Collection[str]) -> Values:
        missing = [k for k in inputs if (way, k) not in self._before]
        made = way.before(missing, self._recorded_values(missing), self.args) if missing else {}
        for k, before in made.items():  # from the host, as what was recorded: a mesh's would be compiled for once more
            self._before[way, k] = jnp.asarray(np.asarray(_rounding_to(self.taps[k], before)))
        return {k: self._before[way, k] for k in inputs if (way, k) in self._before}

    def _of(self, way: Remade, left: Left, values: Values) -> Rows:
        found = {}
        for name, x, steps in way.some(left, values, self.args):
            for layer in left[name]:
                place = name, layer
                found[place] = (self.rows(place, x) if steps is None else self._row(place, x, steps)).copy()
        return found

    def _row(self, place: Place, x: Array, steps: Sequence[int]) -> Array:
        """Return rows [rows, N] of a layer out of what was made of some steps of its outermost scan."""
        name, layer = place
        site = self.tapped.sites[name]
        inner = prod(site.stacked[1:])
        step, rest = divmod(layer or 0, inner)
        return x.reshape(-1, *site.shape)[steps.index(step) * inner + rest].reshape(
            -1, site.shape[-1] if site.shape else 1
        )

"""A program's segments made again under one realisation of its rounding: all of them, or those of some points (JAX)."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.arrays import Array, widen
from precaudit.references.traced.forward import effort, small
from precaudit.runs.programs import OWN_SUMS
from precaudit.transforms.emulate import Emulated, Realisation, emulated, float_bits
from precaudit.transforms.plant import Planted
from precaudit.transforms.reads import reads
from precaudit.transforms.shadow import traced
from precaudit.transforms.sites import numbered
from precaudit.transforms.tag import Tagged
from precaudit.transforms.together import Interpreter, together

# How the equations may round, the best kept; and realisations more, of which noise is made.
INSIDE = ("results inside",)
CONVERTED = ("results converted to a wider format",)
INPUTS, SOME = "inputs", "some inputs"  # read as they were before they were rounded
# What is tried of every segment; the others of those that these leave open.
FIRST: tuple[tuple[str, ...], ...] = ((), CONVERTED)
HONEST = {
    (): Realisation(),
    CONVERTED: Realisation("converted"),
    ("functions in one step",): Realisation("converted", expanded=False),
    INSIDE: Realisation("all"),
}
NARROW = {(OWN_SUMS,): Realisation(sums="own"), (OWN_SUMS, *CONVERTED): Realisation("converted", sums="own")}
# What a TPU's vector unit may do to products of narrow results, which the compiled program does not say.
TERMS = "products of rounded terms"
# Its arithmetic is float32 inside fusions, and what they hand on is stored
UNSHARED = ("results that few read",)
DRAWS = (
    Realisation(seed=1, sums="single"),
    Realisation(seed=2, sums="reversed"),
    Realisation("converted", seed=3, sums="single"),
)

Made = dict[str, tuple[Any, Any]]  # what a realisation makes of each tap: rounded, and before
Values = dict[str, Array]


class Tapped:
    """A program's segments and which taps each reads; ``steps``: those of outermost scans that are recorded."""

    def __init__(self, made: Tagged, steps: Sequence[int] | None) -> None:
        self.made, self.steps = made, steps
        self.options, self.small = effort(made), small(made)
        self.names = dict(zip(numbered(made.sites), (s.name for s in made.sites), strict=True))
        self._reads: dict[str, frozenset[str]] | None = None

    def narrow(self, taps: Values) -> list[str]:
        """Return the names of recorded values of less than 32 bits."""
        return [k for k, x in taps.items() if k in self.names and x.dtype.itemsize < 4]

    def read(self, name: str, taps: Values, args: tuple[Any, ...]) -> list[str]:
        """Return the names of narrow recorded values that the segment of a point reads."""
        every = self.narrow(taps)
        if self.steps is not None:  # steps that are not recorded go on with what was made
            return every
        if self._reads is None:
            self._reads = reads(traced(self.made.call, args, {})[0].jaxpr)
        mine = self._reads.get(self.names[name], frozenset())
        return [k for k in every if self.names[k] in mine]


class Remade:
    """Segments under one realisation, compiled when first asked for.

    Of a small program compiling takes most of the time: all of its segments are one compiled program. Of a large one
    single segments are compiled by themselves where they are asked for by name.
    """

    def __init__(self, segments: Tapped, how: Realisation) -> None:
        self.segments = segments
        self.function = emulated(segments.made.call, how, steps=segments.steps)
        self.compiled: dict[str, Any] = {}
        self.all = jax.jit(self._every, compiler_options=segments.options)

    def _every(self, values: Values, *args: Any) -> Any:
        made = self.function(values, *args)
        return made if self.segments.small else {name: x for name, (x, _) in made.items()}

    def rounded(self, taps: Values, args: tuple[Any, ...]) -> Any:
        """Return what every segment makes of recorded values, rounded as its tap is; of narrow ones ``upper``."""
        if not self.segments.small:
            return self.all(taps, *args)
        narrow = self.segments.narrow(taps)
        made = self.all(_wide(taps, narrow), *args)
        return {name: upper(x) if name in narrow else x for name, (x, _) in made.items()}

    def some(self, points: Collection[str], taps: Values, args: tuple[Any, ...]) -> Made:
        """Return what the segments of some points make, rounded and before."""
        if self.segments.small:
            made = self.all(_wide(taps, self.segments.narrow(taps)), *args)
            return {name: made[name] for name in points if name in made}
        return {name: self._one(name, taps, args) for name in points if name in self.segments.names}

    def _one(self, name: str, taps: Values, args: tuple[Any, ...]) -> tuple[Any, Any]:
        read = self.segments.read(name, taps, args)
        if name not in self.compiled:
            self.compiled[name] = jax.jit(partial(self._of, name), compiler_options=self.segments.options)
        return self.compiled[name](_wide(taps, read), *args)

    def _of(self, name: str, values: Values, *args: Any) -> tuple[Any, Any]:
        return self.function(values, *args)[name]


def once(tapped: Tapped, hows: Sequence[Realisation]) -> Callable[..., list[dict[str, Any]]]:
    """Return ``g(values, *args)``: every segment in FP64 and, rounded, under each realisation, equal products once.

    Of what is rounded to less than 32 bits the ``upper`` half is returned.
    """
    interpreters: list[Interpreter] = [lambda names: Planted({}, "read", names)]
    interpreters += [lambda names, how=how: Emulated({}, names, how) for how in hows]  # type: ignore[misc]

    def keep(value: Any, told: tuple[Any, ...]) -> tuple[Any, ...]:
        exact, *rounded = told
        return exact, *(upper(x) if value.dtype.itemsize < 4 else x for x, _ in rounded)

    function = together(tapped.made.call, interpreters, keep, tapped.steps)
    return lambda values, *args: _apart(function(values, *args), len(interpreters))


def upper(x: Any) -> Any:
    """Return the upper 32 bits of FP64 values, to nearest: 21 significant ones, more than any narrow format has."""
    bits = lax.bitcast_convert_type(x, jnp.uint64)
    return ((bits + jnp.uint64(1 << 31)) >> jnp.uint64(32)).astype(jnp.uint32)


def restored(x: Array, dtype: str) -> Array:
    """Return FP64 values of a point of format ``dtype``, of which ``upper`` may have kept the upper half."""
    if x.dtype != np.uint32 or np.dtype(dtype).kind in "biu":
        return x
    return (x.astype(np.uint64) << np.uint64(32)).view(np.float64)


def _apart(told: dict[str, tuple[Any, ...]], n: int) -> list[dict[str, Any]]:
    return [{name: each[i] for name, each in told.items()} for i in range(n)]


def _wide(taps: Values, names: Collection[str]) -> Values:
    """Return values with some in FP64, so that what reads them unrounded is the same compiled program."""
    return {k: widen(x) if k in names and 0 < float_bits(x.dtype) < 64 else x for k, x in taps.items()}

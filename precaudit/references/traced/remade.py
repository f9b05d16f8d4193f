"""A program's segments made again under one realisation of its rounding: all of them, or those of some points (JAX)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.emulate import emulate_segments, exactly
from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.magnitudes import magnitudes
from precaudit.interpreters.jaxpr.narrow import hold_narrow, moved_as_bits
from precaudit.interpreters.jaxpr.plant import Planted, WantedSteps
from precaudit.interpreters.jaxpr.reads import reads
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.shadow import trace_jaxpr
from precaudit.interpreters.jaxpr.sites import Site, sites, unique_names
from precaudit.interpreters.jaxpr.stepped import BEFORE, ScanStep, scan_steps
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.interpreters.jaxpr.together import Interpreter, evaluate_together
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.programs import OWN_SUMS
from precaudit.references.traced.forward import effort, small

# How the equations may round, the best kept; and realisations more, of which noise is made.
INSIDE = ("results inside",)
CONVERTED = ("results converted to a wider format",)
COMPUTED = ("computed results converted to a wider format",)  # and not those that the program itself rounds
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
# As XLA:CPU makes them where the processor has float16 of its own
MULTIPLY_ADD = ("fused multiply-adds",)
CONTRACTED = {
    MULTIPLY_ADD: Realisation("converted", contracted=True),
    (OWN_SUMS, *MULTIPLY_ADD): Realisation("converted", sums="own", contracted=True),
}
# As LLVM makes sums of float16 over two axes and more
IN_LANES = ("several beside each other",)
LANED = {
    (OWN_SUMS, *IN_LANES): Realisation(sums="lanes"),
    (OWN_SUMS, *IN_LANES, *CONVERTED): Realisation("converted", sums="lanes"),
    (OWN_SUMS, *IN_LANES, *MULTIPLY_ADD): Realisation("converted", sums="lanes", contracted=True),
}
TWICE = {COMPUTED: Realisation("computed"), (OWN_SUMS, *COMPUTED): Realisation("computed", sums="own")}
# What a TPU's vector unit may do to products of narrow results, which the compiled program does not say.
TERMS = "products of rounded terms"
# Which no program asks for: XLA:CPU of JAX 0.12 makes some batched products so
NARROW_PRODUCTS = Realisation("converted", narrow_products=True)
# As XLA:CPU makes some small products in float32: of a result that cancels drawn sums may be much nearer to FP64
IN_ORDER, FUSED = ("products term after term",), Realisation("converted", sums="fused")
# A compiler takes such pairs away and stores the rounded value for all else that reads it, as the exponentials of a
# softmax: their sum in float32 reads them unrounded, their product with a gradient rounded
BY_CONVERSIONS = "inputs as a wider format reads them"
# Its arithmetic is float32 inside fusions, and what they hand on is stored
UNSHARED = ("results that few read",)
UNROUNDED_STATISTICS = ("statistics of unrounded results",)
DRAWS = (
    Realisation(seed=1, sums="single"),
    Realisation(seed=2, sums="reversed"),
    Realisation("converted", seed=3, sums="single"),
)

SEEDS = tuple(range(4, 12))  # of more draws, for what the first ones do not close

Made = dict[str, tuple[Any, Any]]  # what a realisation makes of each tap: rounded, and before
Values = dict[str, Array]


class Tapped:
    """A program's segments and which taps each reads; ``steps``: those of outermost scans that are recorded.

    ``opaque``: taps, by their own names, that something without FP64 meaning makes.
    """

    def __init__(self, made: Tagged, steps: Sequence[int] | None, opaque: Collection[str] = ()) -> None:
        self.call, self.steps, self.opaque = made.call, steps, opaque
        self.options, self.small = effort(made), small(made)
        self._of(made.sites)

    def _of(self, found: Sequence[Site]) -> None:
        self.sites = dict(zip(unique_names(found), found, strict=True))
        self.names = {name: s.name for name, s in self.sites.items()}
        self._reads: dict[str, frozenset[str]] | None = None
        self._sizes: dict[frozenset[str], Any] = {}

    def sizes(self, points: frozenset[str], taps: Values, args: tuple[Any, ...]) -> Values:
        """Return (|A|·|B|) of the segments of some points, of recorded values; of a small program all are one."""
        key = frozenset() if self.small else points
        if key not in self._sizes:
            made = magnitudes(self.call, steps=self.steps)
            some = self.names if self.small else points

            def of(*given: Any) -> Values:
                return {name: x for name, x in made(*given).items() if name in some}

            self._sizes[key] = jax.jit(of, compiler_options=self.options)
        return {name: x for name, x in self._sizes[key](taps, *args).items() if name in points}

    def scans_by_step(self, args: tuple[Any, ...]) -> list[tuple[ScanStep, "Tapped"]]:
        """Return the scans of a large program whose steps can be made one by one, and the segments of a step."""
        if self.small or self.steps is not None:
            return []
        return [(step, self._step(step, args)) for step in scan_steps(self.call, args)]

    def _step(self, step: ScanStep, args: tuple[Any, ...]) -> "Tapped":
        other = copy(self)
        other.call, other.opaque = step.call, {*self.opaque, *(BEFORE + name for name in self.opaque)}
        other._of(sites(trace_jaxpr(step.call, (np.int32(0), *args), {})[0].jaxpr))
        return other

    def narrow(self, taps: Values) -> list[str]:
        """Return the names of recorded values of 16 bits, which a compiler may hand on unrounded."""
        return [k for k, x in taps.items() if k in self.names and float_bits(x.dtype) == 16]

    def narrow_reads(self, name: str, taps: Values, args: tuple[Any, ...], bits: int = 16) -> list[str]:
        """Return the names of recorded values of a width, narrow ones, that the segment of a point reads.

        Those that something without FP64 meaning makes are as they are recorded.
        """
        known = [k for k in taps if k in self.names and self.names[k] not in self.opaque]
        every = [k for k in known if float_bits(taps[k].dtype) == bits]
        if self.steps is not None:  # steps that are not recorded go on with what was made
            return every
        if self._reads is None:
            self._reads = reads(trace_jaxpr(self.call, args, {})[0].jaxpr)[0]
        mine = self._reads.get(self.names[name], frozenset())
        return [k for k in every if self.names[k] in mine]

    def steps_of_layers(self, name: str, layers: Sequence[int | None]) -> tuple[int, ...] | None:
        """Return the steps of its outermost scan that a point's layers are in, ascending.

        None where all of its values are made: it is in no scan, in shards, or some steps are recorded and the others
        go on with what was made.
        """
        site = self.sites[name]
        if not site.stacked or site.sharded or self.steps is not None:
            return None
        return tuple(sorted({i // prod(site.stacked[1:]) for i in layers if i is not None}))


class Remade:
    """Segments under one realisation, compiled when first asked for.

    Of a small program compiling takes most of the time: all of its segments are one compiled program. Of a large one
    single segments are compiled by themselves where they are asked for by name.
    """

    def __init__(self, segments: Tapped, how: Realisation) -> None:
        self.segments = segments
        self.how = how
        self.function = emulate_segments(segments.call, how, steps=segments.steps)
        self.compiled: dict[tuple[str, int, int], Any] = {}
        self.all = jax.jit(self._every, compiler_options=segments.options)

    def _every(self, values: Values, *args: Any) -> Any:
        made = self.function(values, *args)
        return made if self.segments.small else {name: x for name, (x, _) in made.items()}

    def evaluate(self, taps: Values, args: tuple[Any, ...]) -> Any:
        """Return what every segment makes of recorded values, rounded as its tap is; of narrow ones ``upper``."""
        if not self.segments.small:
            return self.all(taps, *args)
        narrow = self.segments.narrow(taps)
        made = self.all(widen_some(taps, narrow), *args)
        return {name: upper(np.asarray(x)) if name in narrow else x for name, (x, _) in made.items()}

    def before(self, points: Collection[str], taps: Values, args: tuple[Any, ...]) -> Values:
        """Return what the segments of some points make before it is rounded, on the device."""
        if self.segments.small:
            return {name: before for name, (_, before) in self._small(points, taps, args).items()}
        known = [name for name in points if name in self.segments.names]
        return {name: self._one(name, 1, None, taps, args) for name in known}

    def some(
        self, left: Mapping[str, Sequence[int | None]], taps: Values, args: tuple[Any, ...]
    ) -> Iterator[tuple[str, Array, tuple[int, ...] | None]]:
        """Yield what the segments of some points make, rounded, and the steps that it is of: None of all.

        Of a large program the outermost scan makes the steps that have a layer in ``left``.
        """
        if self.segments.small:
            yield from ((name, np.asarray(x), None) for name, (x, _) in self._small(left, taps, args).items())
            return
        for name in left:
            if name in self.segments.names:
                steps = self.segments.steps_of_layers(name, left[name])
                yield name, np.asarray(self._one(name, 0, steps, taps, args)), steps

    def _small(self, points: Collection[str], taps: Values, args: tuple[Any, ...]) -> Made:
        made = self.all(widen_some(taps, self.segments.narrow(taps)), *args)
        return {name: made[name] for name in points if name in made}

    def _one(self, name: str, part: int, steps: Sequence[int] | None, taps: Values, args: tuple[Any, ...]) -> Any:
        length = self.segments.sites[name].stacked[0] if steps is not None else 0
        count = min(1 << (len(steps or ()) - 1).bit_length(), length)  # so that few numbers of steps are compiled
        key = name, part, count
        if key not in self.compiled:
            self.compiled[key] = jax.jit(partial(self._of, *key), compiler_options=self.segments.options)
        slots = None
        if steps is not None:
            slots = np.full(length, count, np.int32)
            slots[list(steps)] = np.arange(len(steps))
        return self.compiled[key](widen_some(taps, self.segments.narrow_reads(name, taps, args)), slots, *args)

    def _of(self, name: str, part: int, count: int, values: Values, slots: jax.Array | None, *args: Any) -> Any:
        segments = self.segments
        wanted = None if slots is None else WantedSteps(segments.names[name], slots, count)
        return emulate_segments(segments.call, self.how, steps=segments.steps, wanted=wanted)(values, *args)[name][part]


class Several:
    """Segments under several realisations, ``exact`` with FP64 before them: of some points one compiled program.

    Where realisations are asked of few points, each has a program of its own: others are not made beside it.
    """

    def __init__(self, segments: Tapped, ways: Sequence[Remade], exact: bool = False) -> None:
        self.segments, self.ways, self.exact = segments, ways, exact
        self.compiled: dict[frozenset[str], Any] = {}
        self.alone = jax.jit(exactly(segments.call, steps=segments.steps), compiler_options=segments.options)

    def made(self, points: Collection[str], taps: Values, args: tuple[Any, ...]) -> list[Any]:
        """Return what each makes of recorded values, as ``Remade.rounded`` does, of some points at least."""
        if self.segments.small:
            exact = [self.alone(taps, *args)] if self.exact else []
            return exact + [way.evaluate(taps, args) for way in self.ways]
        found: list[Any] = [{} for _ in range(self.exact + len(self.ways))]
        for some in self._apart(frozenset(points)):
            if some not in self.compiled:
                function = segments_at_once(self.segments, [way.how for way in self.ways], some, self.exact)
                self.compiled[some] = jax.jit(moved_as_bits(function), compiler_options=self.segments.options)
            for each, made in zip(found, self.compiled[some](*hold_narrow((taps, *args))), strict=True):
                each.update(made)
        return found

    def _apart(self, points: frozenset[str]) -> list[frozenset[str]]:
        if self.exact:
            return [points]
        own = frozenset(name for name in self.segments.names if not name.startswith(BEFORE))
        return [own] if len(points) > len(own) / 2 else [frozenset({name}) for name in sorted(points)]


class Redrawn:
    """Segments under more draws: one compiled program of a small one, of a large one one of each point asked for."""

    def __init__(self, segments: Tapped, how: Realisation) -> None:
        self.segments, self.how = segments, how
        self.compiled: dict[frozenset[str], Any] = {}

    def made(self, points: frozenset[str], taps: Values, args: tuple[Any, ...]) -> list[Values]:
        """Return what each draw makes of recorded values, rounded, of some points at least."""
        key = frozenset(self.segments.names) if self.segments.small else points
        if key not in self.compiled:

            def of(seed: jax.Array, values: Values, *given: Any) -> Values:
                made = emulate_segments(self.segments.call, self.how, steps=self.segments.steps, seed=seed)(
                    values, *given
                )
                return {name: x for name, (x, _) in made.items() if name in key}

            self.compiled[key] = jax.jit(of, compiler_options=self.segments.options)
        return [self.compiled[key](np.uint64(seed), taps, *args) for seed in SEEDS]


def segments_at_once(
    tapped: Tapped, hows: Sequence[Realisation], names: Collection[str] | None = None, exact: bool = True
) -> Callable[..., list[dict[str, Any]]]:
    """Return ``g(values, *args)``: segments, ``exact`` in FP64 first, and rounded under each realisation.

    ``names``: of some points alone. Equal products are made once. Of what is rounded to less than 32 bits the ``upper``
    half is returned.
    """
    interpreters: list[Interpreter] = [lambda names: Planted({}, "read", names)]
    interpreters += [lambda names, how=how: Emulator({}, names, how) for how in hows]  # type: ignore[misc]

    def keep(value: jax.Array, told: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *rounded = told
        return first, *(upper(x) if 0 < float_bits(value.dtype) < 32 else x for x, _ in rounded)

    function = evaluate_together(tapped.call, interpreters, keep, tapped.steps)

    def evaluate_all(values: Values, *args: Any) -> list[dict[str, Any]]:
        told = function(values, *args)
        return [
            {n: told[n][i] for n in sorted(names or told) if n in told}
            for i in range(0 if exact else 1, len(interpreters))
        ]

    return evaluate_all


def upper(x: ArrayLike) -> Any:
    """Return the upper 32 bits of FP64 values, to nearest: 21 significant ones, more than any narrow format has."""
    bits = x.view(np.uint64) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, jnp.uint64)
    return ((bits + np.uint64(1 << 31)) >> np.uint64(32)).astype(np.uint32)


def restore(x: Array, dtype: str) -> Array:
    """Return FP64 values of a point of format ``dtype``, of which ``upper`` may have kept the upper half."""
    if x.dtype != np.uint32 or np.dtype(dtype).kind in "biu":
        return x
    return (x.astype(np.uint64) << np.uint64(32)).view(np.float64)


def widen_some(taps: Values, names: Collection[str]) -> Values:
    """Return values with some in FP64, so that what reads them unrounded is the same compiled program."""
    return {k: widen(x) if k in names and 0 < float_bits(x.dtype) < 64 else x for k, x in taps.items()}

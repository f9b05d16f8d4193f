"""The compiled programs of a trace: prefill and decode, bare or with taps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.narrow import held, moved_as_bits
from precaudit.interpreters.tpu.target import Target
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.numbers.row_hashes import multipliers
from precaudit.numbers.row_sums import LANES, factors, row_factors
from precaudit.recording.tracing.predicting import program_for
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.coverage import WORDS
from precaudit.schema.graphs.decoder import BETWEEN_LAYERS, POINTS
from precaudit.schema.graphs.point import Point

CACHE = 5  # the argument that a program takes over


@dataclass(frozen=True)
class Capture:
    """What a program collects: point names, layers, the points whose rows are gathered to ``take``, or hashed.

    ``summed``: those of whose rows only words are kept (precaudit/numbers/row_sums.py).
    """

    points: frozenset[str]
    layers: tuple[int, ...]
    gathered: frozenset[str] = frozenset()
    hashed: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OnBits:
    """A jitted program that moves narrow floats as bits, called with floats or with what such a program returned."""

    program: Any

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.program(*held(args))

    def lower(self, *args: Any) -> Any:
        """Lower it, as ``jax.jit``'s."""
        return self.program.lower(*held(args))


def jitted(program: Callable[..., Any], platform: str, **how: Any) -> Callable[..., Any]:
    """Return a program jitted as ``how`` says; on a CPU it moves narrow floats as bits."""
    return OnBits(jax.jit(moved_as_bits(program), **how)) if platform == "cpu" else jax.jit(program, **how)


@dataclass(frozen=True)
class Compiled:
    """A program compiled for arguments of given shapes, and the seconds that took: to trace, to lower, to compile."""

    call: Callable[..., Any]
    on_bits: bool
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes of its arguments, results that are none of them, and temporaries."""
        found = self.call.memory_analysis()  # type: ignore[attr-defined]
        own = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return int(own + found.temp_size_in_bytes)

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.call(*held(args)) if self.on_bits else self.call(*args)


def compiled(program: Any, *args: Any) -> Compiled:
    """Compile what ``jitted`` returned for the shapes of ``args``, or read it from JAX's persistent cache."""
    began = time.perf_counter()
    call = program.lower(*args).compile()
    return Compiled(call, isinstance(program, OnBits), time.perf_counter() - began)


def prefill_program(subject: Subject, capture: Capture | None) -> Callable[..., Any]:
    """Return jitted (params, tables, tokens, starts, logit_rows, cache, take) → (logits, cache, taps)."""
    return _program(subject, capture, "prefill")


def decode_program(subject: Subject, capture: Capture | None) -> Callable[..., Any]:
    """Return jitted (params, tables, tokens, starts, slots, cache, take) → (logits, cache, taps)."""
    return _program(subject, capture, "decode")


@partial(jax.jit, donate_argnums=0)
def without(cache: Any, slots: Any) -> Any:
    """Return a cache, taken over, whose row ``slots[b]`` of every layer and of batch element b is zero."""
    return jax.tree.map(lambda rows: rows.at[:, jnp.arange(len(slots)), slots].set(0), cache)


def row_hashes(x: jax.Array) -> jax.Array:
    """Return the hashes [B, S, LANES] of cache rows x [B, S, G, K], as ``precaudit.numbers.row_hashes`` takes them."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    flat = bits.reshape(*x.shape[:2], -1)
    return jnp.stack([jnp.sum(flat * m, axis=-1, dtype=jnp.uint32) for m in multipliers(flat.shape[-1])], axis=-1)


def row_words(x: jax.Array, point: Point, starts: jax.Array, slots: jax.Array | None) -> jax.Array:
    """Return the words [B, T, WORDS], uint32, of a point's rows x [B, T, …] or [B, H, T, S] (``numbers/row_sums.py``).

    ``starts`` [B]: slots of the sequences' first rows and keys; ``slots`` [B]: of the one row, in decode.
    """
    first = jnp.arange(x.shape[2 if point.keyed else 1])[None] if slots is None else slots[:, None]
    rows = jnp.maximum(first - starts[:, None], 0)
    own = row_factors(rows)
    none = jnp.zeros(rows.shape, jnp.uint32)
    if point.keyed:
        found = lax.bitcast_convert_type(_sum_over_keys(x, own[0], rows, starts), jnp.uint32)
        return jnp.stack([found, *[none] * (WORDS - 1)], axis=-1)
    flat, found = x.reshape(*x.shape[:2], -1), []
    for lane, odd in enumerate([*factors(1, flat.shape[-1])[:, 0], None]):
        # of values as they are stored, and each by itself: XLA:CPU makes sums in one fusion five times as slowly
        flat, _ = lax.optimization_barrier((flat, found[-1:]))
        wide = flat.astype(jnp.float32)
        other = wide * wide if odd is None else jnp.where(own[lane][..., None] * odd >> 31, -wide, wide)
        found.append(jnp.sum(other, axis=-1))
    found[-1], hashes = jnp.sqrt(found[-1]), [none] * LANES
    if point.name in BETWEEN_LAYERS:
        bits = lax.bitcast_convert_type(flat, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        hashes = [jnp.sum(bits * odd, axis=-1, dtype=jnp.uint32) for odd in multipliers(flat.shape[-1])]
    return jnp.stack([*(lax.bitcast_convert_type(y, jnp.uint32) for y in found), *hashes], axis=-1)


def _sum_over_keys(x: jax.Array, own: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """Return the first sum [B, T] of rows [B, H, T, S] over the keys that a row sees; ``own`` [B, T]: their factors.

    Keys first, then heads: in another order XLA:CPU moves all of it, which takes ten times as long.
    """
    keys = jnp.arange(x.shape[-1]) - starts[:, None]
    seen = (keys[:, None] <= rows[..., None]) & (keys[:, None] >= 0)
    odd = jnp.moveaxis(jnp.asarray(factors(x.shape[1], x.shape[-1])[0])[:, jnp.maximum(keys, 0)], 0, 1)
    wide = jnp.where(seen[:, None], x.astype(jnp.float32), 0)
    signed = jnp.where(own[:, None, :, None] * odd[:, :, None] >> 31, -wide, wide)
    return jnp.sum(jnp.sum(signed, axis=-1), axis=1)


def _program(subject: Subject, capture: Capture | None, phase: str) -> Callable[..., Any]:
    options = tuple(compiler_options(subject.policy).items())
    if subject.predicted is not None:
        return _predicted(subject.decoder, capture, phase, options, subject.predicted)
    return _compiled(subject.decoder, capture, phase, options, subject.platform)


@lru_cache(maxsize=32)
def _compiled(
    decoder: Any, capture: Capture | None, phase: str, options: tuple[Any, ...], platform: str
) -> Callable[..., Any]:
    how: dict[str, Any] = {"donate_argnums": (CACHE,), "compiler_options": dict(options) or None}
    return jitted(_collecting(decoder, capture, phase), platform, **how)


@lru_cache(maxsize=32)
def _predicted(
    decoder: Any, capture: Capture | None, phase: str, options: tuple[Any, ...], target: Target
) -> Callable[..., Any]:
    return program_for(target, _collecting(decoder, capture, phase), (CACHE,), dict(options))


def _collecting(decoder: Any, capture: Capture | None, phase: str) -> Callable[..., Any]:
    function = getattr(decoder, phase)

    def program(params: Any, tables: Any, tokens: Any, starts: Any, rows: Any, cache: Any, take: Any) -> Any:
        if capture is None or not capture.points:
            logits, cache = function(params, tables, tokens, starts, rows, cache)
            return logits, cache, {}

        def gather(name: str, x: jax.Array) -> jax.Array:
            if name in capture.summed:
                return row_words(x, POINTS[name], starts, rows if phase == "decode" else None)
            if name in capture.hashed:
                return row_hashes(x)
            if name not in capture.gathered:
                return x
            axis = 1 + POINTS[name].axes.index("T")
            index = take.reshape(take.shape[0], *(take.shape[1] if i == axis else 1 for i in range(1, x.ndim)))
            return jnp.take_along_axis(x, index, axis=axis)

        collecting = reap(function, capture.points, capture.layers, gather, missing="ignore")
        (logits, cache), taps = collecting(params, tables, tokens, starts, rows, cache)
        return logits, cache, taps

    return program

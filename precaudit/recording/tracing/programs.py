"""The compiled programs of a trace: prefill and decode, bare or with taps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.narrow import hold_narrow, moved_as_bits
from precaudit.interpreters.tpu.target import Target
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.models.jax_decoder.sharding import cache_spec, call_specs
from precaudit.numbers.row_hashes import multipliers
from precaudit.numbers.row_sums import LANES, grid_factors, row_factors
from precaudit.recording.tracing.predicting import ChipLayout, program_for
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.coverage import WORDS
from precaudit.schema.graphs.decoder import BETWEEN_LAYERS, POINTS
from precaudit.schema.graphs.point import Point
from precaudit.schema.meshes import MeshShape

CACHE = 5  # the argument that a program takes over
PARTS = 16  # of a row, added before it is summed


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
        return self.program(*hold_narrow(args))

    def lower(self, *args: Any) -> Any:
        """Lower it, as ``jax.jit``'s."""
        return self.program.lower(*hold_narrow(args))


def jit_program(program: Callable[..., Any], platform: str, **how: Any) -> Callable[..., Any]:
    """Return a program jitted as ``how`` says; on a CPU it moves narrow floats as bits."""
    return OnBits(jax.jit(moved_as_bits(program), **how)) if platform == "cpu" else jax.jit(program, **how)


@dataclass(frozen=True)
class Compiled:
    """A program compiled for arguments of given shapes, and the seconds that took: to trace, to lower, to compile.

    ``call``: what runs it.
    """

    compiled: Any
    call: Callable[..., Any]
    on_bits: bool
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes of its arguments, results that are none of them, and temporaries."""
        found = self.compiled.memory_analysis()
        own = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return int(own + found.temp_size_in_bytes)

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.call(*hold_narrow(args)) if self.on_bits else self.call(*args)


def compile_program(program: Any, *args: Any) -> Compiled:
    """Compile what ``jit_program`` returned for the shapes of ``args``, or read it from JAX's persistent cache.

    JAX's compiled programs refuse integers of 4 bits that lie on a device, by the layouts that these arrays say. There
    the jitted function runs, here once on copies of all arguments but the parameters, since it may take them over.
    """
    began, on_bits = time.perf_counter(), isinstance(program, OnBits)
    compiled = program.lower(*args).compile()
    seconds = time.perf_counter() - began
    if any(getattr(x, "dtype", None) in (jnp.int4, jnp.uint4) for x in jax.tree.leaves(args)):
        made = Compiled(compiled, program.program if on_bits else program, on_bits, seconds)
        jax.block_until_ready(made(args[0], *jax.tree.map(jnp.copy, args[1:])))
        return made
    return Compiled(compiled, compiled, on_bits, seconds)


def prefill_program(subject: Subject, capture: Capture | None) -> Callable[..., Any]:
    """Return jitted (params, tables, tokens, starts, logit_rows, cache, take) → (logits, cache, taps)."""
    return _program(subject, capture, "prefill")


def decode_program(subject: Subject, capture: Capture | None) -> Callable[..., Any]:
    """Return jitted (params, tables, tokens, starts, slots, cache, take) → (logits, cache, taps)."""
    return _program(subject, capture, "decode")


@partial(jax.jit, donate_argnums=0)
def without_slots(cache: Any, slots: jax.Array) -> Any:
    """Return a cache, taken over, whose row ``slots[b]`` of every layer and of batch element b is zero."""
    return jax.tree.map(lambda rows: rows.at[:, jnp.arange(len(slots)), slots].set(0), cache)


def hash_cache_rows(x: jax.Array) -> jax.Array:
    """Return the hashes [B, S, LANES], uint32, of rows x [B, S, …], as ``precaudit.numbers.row_hashes`` takes them.

    Summands are added in parts first: XLA:CPU writes every summand of a sum over the last axis to memory.
    """
    bits = _bits(x).reshape(*x.shape[:2], -1)
    n = bits.shape[-1]
    width = n // next(k for k in range(PARTS, 0, -1) if n % k == 0)
    parts = [(i, bits[..., i : i + width].astype(jnp.uint32)) for i in range(0, n, width)]
    sums = [sum(part * m[i : i + width] for i, part in parts) for m in multipliers(n)]
    return jnp.stack([jnp.sum(y, axis=-1, dtype=jnp.uint32) for y in sums], axis=-1)


def row_words(x: jax.Array, point: Point, starts: jax.Array, slots: jax.Array | None, groups: int) -> jax.Array:
    """Return the words [B, T, WORDS], uint32, of a point's rows x [B, T, …] or [B, H, T, S] (``numbers/row_sums.py``).

    ``starts`` [B]: slots of the sequences' first rows and keys; ``slots`` [B]: of the one row, in decode. ``groups``:
    key/value heads, of rows over keys.
    """
    first = jnp.arange(x.shape[2 if point.over_keys else 1])[None] if slots is None else slots[:, None]
    rows = jnp.maximum(first - starts[:, None], 0)
    own = row_factors(rows)
    if point.over_keys:
        found, hashes = [_sum_over_keys(x, own[0], rows, starts, groups)], None
    else:
        flat = lax.optimization_barrier(x.reshape(*x.shape[:2], -1))  # as it is stored
        odd, wide = grid_factors(1, flat.shape[-1])[:, 0], flat.astype(jnp.float32)
        found = [jnp.sum(_turned(flat, own[i][..., None] * odd[i] >> 31 == 1), axis=-1) for i in range(LANES)]
        found.append(jnp.sqrt(jnp.sum(wide * wide, axis=-1)))
        hashes = hash_cache_rows(flat) if point.name in BETWEEN_LAYERS else None
    words = [lax.bitcast_convert_type(jnp.stack(found, axis=-1), jnp.uint32)]
    words += [] if hashes is None else [hashes]
    none = jnp.zeros((*rows.shape, WORDS - sum(w.shape[-1] for w in words)), jnp.uint32)
    return jnp.concatenate([*words, none], axis=-1)


def _sum_over_keys(x: jax.Array, own: jax.Array, rows: jax.Array, starts: jax.Array, groups: int) -> jax.Array:
    """Return the first sum [B, T] of rows [B, H, T, S] over the keys that a row sees; ``own`` [B, T]: their factors.

    In the order [B, G, S, T, H/G] in which XLA:CPU leaves a product of queries and keys: in another it moves all of it.
    """
    b, h, t, s = x.shape
    keys = jnp.arange(s) - starts[:, None]
    seen = (keys[:, :, None] <= rows[:, None]) & (keys[:, :, None] >= 0)
    odd = jnp.asarray(grid_factors(h, s)[0].reshape(groups, -1, s))[..., jnp.maximum(keys, 0)].transpose(2, 0, 3, 1)
    turned = odd[:, :, :, None] * own[:, None, None, :, None] >> 31
    how = jnp.where(seen[:, None, :, :, None], turned.astype(jnp.uint8), np.uint8(2)).reshape(b, groups * s, -1)
    laid = x.reshape(b, groups, -1, t, s).transpose(0, 1, 4, 3, 2).reshape(how.shape)
    return jnp.sum(jnp.sum(_turned(laid, how == 1, how == 2), axis=1).reshape(b, t, -1), axis=-1)


def _turned(x: jax.Array, turned: jax.Array, dropped: jax.Array | None = None) -> jax.Array:
    """Return x in float32, its sign turned where ``turned``, 0 where ``dropped``.

    By the bits that are stored: XLA:CPU writes summands to memory, and these are half of what float32 takes.
    """
    bits = _bits(x)
    found = jnp.where(turned, bits ^ bits.dtype.type(1 << 8 * x.dtype.itemsize - 1), bits)
    found = found if dropped is None else jnp.where(dropped, 0, found)
    return lax.bitcast_convert_type(found, x.dtype).astype(jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _program(subject: Subject, capture: Capture | None, phase: str) -> Callable[..., Any]:
    options = tuple(compiler_options(subject.policy).items())
    if subject.predicted is not None:
        return _predict(subject.decoder, capture, phase, options, subject.predicted, subject.mesh)
    cache = None if subject.layout is None else subject.layout.cache
    return _compile(subject.decoder, capture, phase, options, subject.platform, cache)


@lru_cache(maxsize=32)
def _compile(
    decoder: Any, capture: Capture | None, phase: str, options: tuple[Any, ...], platform: str, cache: Any = None
) -> Callable[..., Any]:
    """Return the jitted program; ``cache``: how its cache is cut over devices, of which the rest follows."""
    how: dict[str, Any] = {"donate_argnums": (CACHE,), "compiler_options": dict(options) or None}
    if cache is not None:
        how["out_shardings"] = (None, cache, None)
    return jit_program(_collecting(decoder, capture, phase), platform, **how)


@lru_cache(maxsize=32)
def _predict(
    decoder: Any, capture: Capture | None, phase: str, options: tuple[Any, ...], target: Target, mesh: MeshShape
) -> Callable[..., Any]:
    specs, cache = call_specs(mesh, decoder.config), cache_spec(mesh, decoder.config)
    cut = ChipLayout(mesh.axes, specs, (None, cache, None)) if mesh.devices > 1 else None
    return program_for(target, _collecting(decoder, capture, phase), (CACHE,), dict(options), cut)


def _collecting(decoder: Any, capture: Capture | None, phase: str) -> Callable[..., Any]:
    function, groups = getattr(decoder, phase), decoder.config.kv_heads

    def program(
        params: Any, tables: Any, tokens: jax.Array, starts: jax.Array, rows: jax.Array, cache: Any, take: Any
    ) -> Any:
        if capture is None or not capture.points:
            logits, cache = function(params, tables, tokens, starts, rows, cache)
            return logits, cache, {}

        def gather(name: str, x: jax.Array) -> jax.Array:
            if name in capture.summed:
                return row_words(x, POINTS[name], starts, rows if phase == "decode" else None, groups)
            if name in capture.hashed:
                return hash_cache_rows(x)
            if name not in capture.gathered:
                return x
            axis = 1 + POINTS[name].axes.index("T")
            index = take.reshape(take.shape[0], *(take.shape[1] if i == axis else 1 for i in range(1, x.ndim)))
            return jnp.take_along_axis(x, index, axis=axis)

        collecting = reap(function, capture.points, capture.layers, gather, missing="ignore")
        (logits, cache), taps = collecting(params, tables, tokens, starts, rows, cache)
        return logits, cache, taps

    return program

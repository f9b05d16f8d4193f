"""Caches: slots, pages, scales, whose rows they are."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from exams.cells.cell import OTHER, TEXT, Cell
from exams.cells.changes import DECODE, PREFILL, after, in_part
from exams.cells.rounded import f32, integers, mantissa, narrow, toward_zero
from precaudit.models.jax_decoder.integers import IntegerRows
from precaudit.models.jax_decoder.parts import cache_read, cache_write

K, V = 0, 1
PAGE = 8


def at_slot(change: Any) -> Any:
    """Write decode's rows at other slots."""
    return lambda cache, layer, rows, slots: cache_write(cache, layer, rows, None if slots is None else change(slots))


def rows_as(change: Any) -> Any:
    """Write other rows."""
    return lambda cache, layer, rows, slots: cache_write(cache, layer, change(rows), slots)


def read_as(change: Any) -> Any:
    """Read a layer's rows [B, S, G, K] otherwise."""
    return after(cache_read, change)


def pages(change: Any) -> Any:
    """Read whole pages of a layer otherwise; what is after the last whole page stays."""

    def read(y: Any) -> Any:
        n = y.shape[1] // PAGE
        whole = y[:, : n * PAGE].reshape(y.shape[0], n, PAGE, *y.shape[2:])
        return y.at[:, : n * PAGE].set(change(whole).reshape(y.shape[0], n * PAGE, *y.shape[2:]))

    return read_as(read)


def scaled(change: Any) -> Any:
    """Read integers under other scales [B, S, G]."""

    def read(cache: Any, layer: Any) -> Any:
        here = IntegerRows(cache.values, change(cache.scales), cache.read)
        return cache_read(here, layer)

    return read


def not_written(cache: Any, layer: Any, rows: Any, slots: Any) -> Any:
    return cache_write(cache, layer, rows, slots) if slots is None else cache


def of_layer(by: int) -> Any:
    return lambda cache, layer: cache_read(cache, layer + by)


def wrapped(slots: Any) -> Any:
    return lax.rem(slots, jnp.int32(16))


KC, VC = ("k_cache",), ("v_cache",)
INT8 = (("kv_cache", "int8"),)
CACHES = (
    Cell("cache: k one slot on", "cache_position off by one", KC, "slot|shift|one (row|position)",
         in_part("cache_write", at_slot(lambda s: s + 1), K)),
    Cell("cache: v one slot back", "cache_position off by one", VC, "slot|shift|overwr|one (row|position)",
         in_part("cache_write", at_slot(lambda s: s - 1), V)),
    Cell("cache: k written at slot 0", "position not passed", KC, "slot|position 0|overwr",
         in_part("cache_write", at_slot(jnp.zeros_like), K)),
    Cell("cache: v wraps at 16", "ring buffer of a window", VC, "slot|wrap|modulo|overwr|ring|rows .* hold",
         in_part("cache_write", at_slot(wrapped), V)),
    Cell("cache: k not written in decode", "update not assigned", KC, "not written|never|missing|stale|zero",
         in_part("cache_write", not_written, K)),
    Cell("cache: v of prefill not written at slot 5", "a block not stored", VC, "not written|slot 5|row 5|missing|zero",
         in_part("cache_write", rows_as(lambda r: r.at[:, 5].set(0)), V, (PREFILL,))),
    Cell("cache: k's heads exchanged", "KV shards in the wrong order", KC, "heads",
         in_part("cache_read", read_as(lambda y: y[:, :, ::-1]), K)),
    Cell("cache: v's rows in halves exchanged", "page layout [2, K/2]", VC, "halves|dimension|channel|order",
         in_part("cache_read", read_as(lambda y: jnp.roll(y, 16, axis=-1)), V)),
    Cell("cache: k's pages exchanged", "block table in the wrong order", KC, "page|exchanged|order|slot|rows",
         in_part("cache_read",
                 pages(lambda p: p.at[:, :2].set(p[:, 1::-1] if p.shape[1] == 2 else p[:, :2][:, ::-1])), K)),
    Cell("cache: v's second page is its first", "stale block table", VC, "page|stale|slot|rows|foreign",
         in_part("cache_read", pages(lambda p: p.at[:, 1].set(p[:, 0])), V)),
    Cell("cache: k of the second page on times 1.25", "a page's scale", KC, "page.*1\\.25|1\\.25.*page|1\\.25",
         in_part("cache_read", pages(lambda p: p.at[:, 1:].multiply(1.25)), K)),
    Cell("cache: v times 1.02", "cache scale a little off", VC, "1\\.02",
         in_part("cache_read", read_as(lambda y: (y.astype(f32) * 1.02).astype(y.dtype)), V)),
    Cell("cache: k of the layer before", "layer index off by one", KC, "layer 1|layer before|another layer",
         in_part("cache_read", of_layer(-1), K)),
    Cell("cache: v of the next layer", "layer index off by one", VC, "layer 3|next layer|another layer",
         in_part("cache_read", of_layer(1), V)),
    Cell("cache: k of the other sequence", "batch index of a beam", KC, "sequence|row|prompt|batch|other",
         in_part("cache_read", read_as(lambda y: y[::-1]), K), prompts=(TEXT, OTHER)),
    Cell("cache: k in float8", "kv_cache_dtype=fp8", KC, "float8|e4m3|3 bits",
         in_part("cache_write", rows_as(lambda r: narrow(r, "e4m3")), K)),
    Cell("cache: v in float8 e5m2", "kv_cache_dtype=fp8_e5m2", VC, "e5m2|float8|2 bits",
         in_part("cache_write", rows_as(lambda r: narrow(r, "e5m2")), V)),
    Cell("cache: v in int8 by row", "quantised cache without being asked", VC, "int8|8 bit|integer",
         in_part("cache_write", rows_as(integers), V)),
    Cell("cache: k in int4 by row", "quantised cache without being asked", KC, "int4|4 bit|integer",
         in_part("cache_write", rows_as(lambda r: integers(r, 7)), K)),
    Cell("cache: v cut to 4 bits of mantissa", "block floating point", VC, "4 bits|bits",
         in_part("cache_write", rows_as(lambda r: mantissa(r, 4)), V)),
    Cell("cache: k toward zero", "store of the upper half of float32", KC, "toward zero|trunc|cut",
         in_part("cache_write", rows_as(lambda r: toward_zero(r.astype(f32)).astype(r.dtype)), K, bits=True),
         policies=("fp32-highest",)),
    Cell("cache: first key zero", "BOS slot cleared", KC, "zero|slot 0|first|position 0",
         in_part("cache_read", read_as(lambda y: y.at[:, 0].set(0)), K)),
    Cell("cache: v written in decode doubled", "accumulated for assigned", VC, "× 2|twice|double",
         in_part("cache_write", rows_as(lambda r: r * 2), V, (DECODE,))),
    Cell("cache: int8, scale of the other head", "scales read in the wrong order", KC, "scale|head",
         in_part("cache_read", scaled(lambda s: s[..., ::-1]), K), settings=INT8),
    Cell("cache: int8, scale of the row before", "scale index off by one", VC, "scale|slot|row",
         in_part("cache_read", scaled(lambda s: jnp.roll(s, 1, axis=2)), V), settings=INT8),
    Cell("cache: int8, scale × 127/128", "128 levels for 127", KC, "0\\.992|127|128|scale",
         in_part("cache_read", scaled(lambda s: s * (127 / 128)), K), settings=INT8),
    Cell("cache: int8, scale in bfloat16", "scales stored narrow", VC, "scale.*bfloat16|bfloat16.*scale|bfloat16",
         in_part("cache_read", scaled(narrow), V), settings=INT8),
    Cell("cache: int8, scale of all rows", "scale by tensor for scale by row", KC, "scale|largest|tensor",
         in_part("cache_read", scaled(lambda s: jnp.broadcast_to(s.max(axis=(2, 3), keepdims=True), s.shape)), K),
         settings=INT8),
)  # fmt: skip

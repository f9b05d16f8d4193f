"""Masks: who sees whom."""

from typing import Any

import jax.numpy as jnp

from exams.cells.cell import OTHER, TEXT, Cell
from exams.cells.changes import DECODE, PREFILL, in_part
from exams.cells.rounded import f32
from precaudit.models.jax_decoder.parts import masked_softmax


def with_mask(change: Any) -> Any:
    """A softmax under another mask [B, 1, T, S]; ``change`` is given the mask and how far keys lie before rows."""
    return lambda s, m, a: masked_softmax(s, change(m, newest(m) - jnp.arange(m.shape[3])), a)


def newest(mask: Any) -> Any:
    """Return which key a row sees last [B, 1, T, 1], its own: of a cache not the last slot; where none, its place."""
    t, s = mask.shape[2:]
    last = s - 1 - jnp.argmax(mask[..., ::-1], axis=-1)
    return jnp.where(jnp.any(mask, axis=-1), last, jnp.arange(t) + s - t)[..., None]


def seen(mask: Any, far: Any, more: Any) -> Any:
    """Return a mask of which no row is empty."""
    return mask & more | (far == 0)


def weak(by: float) -> Any:
    """Masked by adding a finite number."""

    def part(scores: Any, mask: Any, a: Any) -> Any:
        s = scores.astype(f32) - jnp.where(mask, 0, by)
        return masked_softmax(s, jnp.ones_like(mask), a)

    return part


def strictly(mask: Any, far: Any) -> Any:
    """Not itself, but where a row sees nothing else."""
    before = mask & (far > 0)
    return jnp.where(jnp.any(before, -1, keepdims=True), before, mask)


def documents(mask: Any, far: Any) -> Any:
    """Packed documents of eight tokens that do not see each other."""
    keys = jnp.arange(mask.shape[3])
    return mask & ((far + keys) // 8 == keys // 8)


PROBS = ("probs",)
TWO = (TEXT, OTHER)
MASKS = (
    Cell("mask: not itself", "strictly lower triangle", PROBS, "diagonal|itself|strict|own",
         in_part("softmax", with_mask(strictly))),
    Cell("mask: one key of the future", "diagonal=1 in triu", PROBS, "future|next key|one key",
         in_part("softmax", with_mask(lambda m, d: m | (d == -1)), phases=(PREFILL,))),
    Cell("mask: none", "is_causal not passed", PROBS, "mask|causal|future",
         in_part("softmax", with_mask(lambda m, _d: jnp.ones_like(m)), phases=(PREFILL,))),
    Cell("mask: window of 8", "sliding window on in a full layer", PROBS, "window|last 8|nearest",
         in_part("softmax", with_mask(lambda m, d: m & (d < 8)))),
    Cell("mask: window of 16", "sliding window on in a full layer", PROBS, "window|last 16",
         in_part("softmax", with_mask(lambda m, d: m & (d < 16)))),
    Cell("mask: window one too wide", "<= for < in a window", PROBS, "window",
         in_part("softmax", with_mask(lambda m, d: m | (d == 8))), settings=(("mask", "window:8"),)),
    Cell("mask: window one too narrow", "< for <= in a window", PROBS, "window",
         in_part("softmax", with_mask(lambda m, d: m & (d < 7))), settings=(("mask", "window:8"),)),
    Cell("mask: window omitted in decode", "window not applied to a cache", PROBS, "window",
         in_part("softmax", with_mask(lambda _m, d: d >= 0), phases=(DECODE,)), settings=(("mask", "window:8"),)),
    Cell("mask: first key never seen", "BOS slot off by one", PROBS, "key 0|first key|position 0|slot 0",
         in_part("softmax", with_mask(lambda m, d: seen(m, d, jnp.arange(m.shape[3]) > 0)))),
    Cell("mask: first four alone and the window", "attention sinks of StreamingLLM", PROBS, "sink|window|first",
         in_part("softmax", with_mask(lambda m, d: m & ((d < 8) | (jnp.arange(m.shape[3]) < 4))))),
    Cell("mask: every other key", "dilated attention", PROBS, "every (other|second)|stride|dilat|even",
         in_part("softmax", with_mask(lambda m, d: m & (d % 2 == 0)))),
    Cell("mask: last block of keys dropped", "keys not a multiple of the block", PROBS,
         "last|number of keys attended to 24|block",
         in_part("softmax", with_mask(lambda m, d: seen(m, d, jnp.arange(m.shape[3]) < 24)))),
    Cell("mask: packed documents apart", "segment ids of packed training", PROBS, "block|segment|document|window",
         in_part("softmax", with_mask(documents))),
    Cell("mask: newest key not read in decode", "cache length not yet advanced", PROBS,
         "newest|last|itself|own|diagonal", in_part("softmax", with_mask(strictly), phases=(DECODE,))),
    Cell("mask: minus 4 for minus infinity", "mask added in a narrow format", PROBS, "mask|finite|− ?4|-4|future",
         in_part("softmax", weak(4.0), phases=(PREFILL,))),
    Cell("mask: minus 10 for minus infinity", "mask value too small", PROBS, "mask|finite|10|future",
         in_part("softmax", weak(10.0), phases=(PREFILL,))),
    Cell("mask: of row 0 for all rows", "batch's mask broadcast", PROBS, "row|padding|mask",
         in_part("softmax", with_mask(lambda m, d: seen(jnp.broadcast_to(m[:1], m.shape), d, True))), prompts=TWO),
    Cell("mask: padding seen", "attention mask not passed", PROBS, "padding|mask",
         in_part("softmax", with_mask(lambda m, d: jnp.broadcast_to(d >= 0, m.shape)), phases=(PREFILL,)), prompts=TWO),
    Cell("mask: one padded slot seen", "pad count off by one", PROBS, "padding|slot|mask|one key",
         in_part("softmax", with_mask(lambda m, d: m | (jnp.roll(m, -1, axis=3) & (d >= 0))), phases=(PREFILL,)),
         prompts=TWO),
    Cell("mask: earliest real key not seen", "pad count off by one", PROBS, "first key|padding|slot|mask|one key",
         in_part("softmax", with_mask(lambda m, d: seen(m & jnp.roll(m, 1, axis=3), d, True)), phases=(PREFILL,)),
         prompts=TWO),
)  # fmt: skip

"""RoPE: base, pairs, positions, formats."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from exams.cells.cell import OTHER, TEXT, Cell
from exams.cells.changes import DECODE, in_config, in_part, in_step, in_tables, in_weights
from exams.cells.rounded import f32, narrow
from precaudit.models.jax_decoder.parameters import frequencies
from precaudit.models.jax_decoder.parts import project, rope
from precaudit.numbers.arrays import as_format

QUERY, KEY = 0, 1
Q, K, BOTH = ("q",), ("k",), ("q", "k")


def turned_by(change: Any) -> Any:
    """RoPE under other tables; ``change`` of cos and sin [B, T, R/2]."""
    return lambda x, cos, sin, a: rope(x, *change(cos, sin), a)


def shifted(by: int) -> Any:
    """Turn by ``by`` more positions: the angles' sum."""
    speed = 10000.0 ** -(np.arange(0, 32, 2) / 32)
    c, s = (jnp.asarray(f(by * speed), f32) for f in (np.cos, np.sin))
    return turned_by(lambda cos, sin: (cos * c - sin * s, sin * c + cos * s))


def interleaved(x: Any, cos: Any, sin: Any, a: Any) -> Any:
    """Pairs (2i, 2i + 1)."""
    first, second = x[..., ::2].astype(f32), x[..., 1::2].astype(f32)
    c, s = cos[:, :, None], sin[:, :, None]
    return jnp.stack([first * c - second * s, second * c + first * s], -1).reshape(x.shape).astype(a.activations)


def half_turned(x: Any, cos: Any, sin: Any, a: Any) -> Any:
    """The first half of a head alone, by the first half of the frequencies."""
    n = cos.shape[-1] // 2
    return rope(x, cos[..., :n], sin[..., :n], a)


def halves_exchanged(x: Any, cos: Any, sin: Any, a: Any) -> Any:
    y = rope(x, cos, sin, a)
    return jnp.concatenate([y[..., 16:], y[..., :16]], axis=-1)


def of_angles(change: Any, then: Any = lambda c, s: (c, s)) -> Any:
    """Tables of other angles [P, R/2]: ``change`` of (positions, frequencies)."""

    def made(config: Any, positions: int, policy: Any, _lengths: Any) -> Any:
        speed, _ = frequencies(config.rope_theta, config.rotary_size, config.rope_scaling)
        angles = change(np.arange(positions, dtype=np.float64)[:, None], speed)
        cos, sin = then(np.cos(angles), np.sin(angles))
        return [as_format(cos, policy.rope)], [as_format(sin, policy.rope)]

    return in_tables(made)


def single(x: Any, to: str) -> Any:
    """Round to a NumPy format and back."""
    return np.asarray(as_format(np.asarray(x), to), np.float64)


def absolute(honest: Any, tables: Any, rows: Any, starts: Any, keys: int, slots: Any) -> Any:
    """Positions count padding."""
    usual = honest(tables, rows, starts, keys, slots)
    other = honest(tables, rows, jnp.zeros_like(starts), keys, slots)
    return type(usual)(other.cos, other.sin, usual.masks, usual.slots)


def late(by: int) -> Any:
    """Positions of decode are off."""

    def made(honest: Any, tables: Any, rows: Any, starts: Any, keys: int, slots: Any) -> Any:
        usual = honest(tables, rows, starts, keys, slots)
        other = honest(tables, rows + (0 if slots is None else by), starts, keys, slots)
        return type(usual)(other.cos, other.sin, usual.masks, usual.slots)

    return made


def rotated_values(x: Any, w: Any, b: Any, a: Any) -> Any:
    """Values whose halves are turned by a fixed angle, as if they were keys."""
    y = project(x, w, b, a)
    heads = y.reshape(*y.shape[:-1], -1, 32).astype(f32)
    at = jnp.arange(y.shape[1], dtype=f32)[:, None] * jnp.asarray(10000.0 ** -(np.arange(0, 32, 2) / 32), f32)
    c, s = jnp.cos(at)[None, :, None], jnp.sin(at)[None, :, None]
    first, second = heads[..., :16], heads[..., 16:]
    return jnp.concatenate([first * c - second * s, second * c + first * s], -1).reshape(y.shape).astype(y.dtype)


def permuted(w: dict[str, Any]) -> dict[str, Any]:
    """Rows of q and k as an interleaved checkpoint holds them."""
    order = np.arange(32).reshape(2, 16).T.ravel()

    def of(name: str) -> Any:
        rows = w[name][2].reshape(-1, 32, w[name].shape[-1])[:, order].reshape(w[name].shape[1:])
        return w[name].at[2].set(rows)

    return {name: of(name) for name in ("wq", "wk")}


BASE = "base|theta|θ"
ROPE = (
    Cell("rope: base 500,000", "Llama 3's base in a Llama 2", BOTH, BASE, in_config(rope_theta=5e5), layer=0),
    Cell("rope: base 1,000,000", "base of a coder model", BOTH, BASE, in_config(rope_theta=1e6), layer=0),
    Cell("rope: base 10,001", "base misread from a file", BOTH, BASE, in_config(rope_theta=10001.0), layer=0,
         policies=("fp32-highest",)),
    Cell("rope: interleaved q", "GPT-J's pairs for NeoX's", Q, "interleav|pairs", in_part("rope", interleaved, QUERY)),
    Cell("rope: interleaved k", "GPT-J's pairs for NeoX's", K, "interleav|pairs", in_part("rope", interleaved, KEY)),
    Cell("rope: rows permuted as for pairs", "checkpoint converted twice", BOTH, "interleav|pairs|permut|order",
         in_weights(permuted)),
    Cell("rope: half of each head", "partial rotary factor of another family", K, "partial|half|dimension|first 16",
         in_part("rope", half_turned, KEY)),
    Cell("rope: turned back", "sign of sin", Q, "sign|back|negative|other way|sin",
         in_part("rope", turned_by(lambda c, s: (c, -s)), QUERY)),
    Cell("rope: cos and sin exchanged", "unpacked in the wrong order", K, "cos.*sin|exchanged|swapped",
         in_part("rope", turned_by(lambda c, s: (s, c)), KEY)),
    Cell("rope: omitted in q", "RoPE inside the kernel alone", Q, "omitted|no rope|not (turned|rotated)|without",
         in_part("rope", turned_by(lambda c, s: (jnp.ones_like(c), jnp.zeros_like(s))), QUERY), equal="position"),
    Cell("rope: omitted in k", "keys cached before RoPE", K, "omitted|no rope|not (turned|rotated)|without",
         in_part("rope", turned_by(lambda c, s: (jnp.ones_like(c), jnp.zeros_like(s))), KEY), equal="position"),
    Cell("rope: twice", "RoPE in the model and the kernel", Q, "twice|double|two times",
         in_part("rope", turned_by(lambda c, s: (c * c - s * s, 2 * s * c)), QUERY), equal="position"),
    Cell("rope: positions from 1", "1-based positions", Q, "position", in_part("rope", shifted(1), QUERY)),
    Cell("rope: keys one position behind", "cache position before the increment", K, "position",
         in_part("rope", shifted(-1), KEY)),
    Cell("rope: decode one ahead", "position after the increment", BOTH, "position", in_step("step", late(1)), layer=0),
    Cell("rope: decode one behind", "position of the last token", BOTH, "position", in_step("step", late(-1)), layer=0),
    Cell("rope: padding counted", "position ids not passed", BOTH, "position|padding",
         in_step("step", absolute), layer=0, prompts=(TEXT, OTHER)),
    Cell("rope: positions halved", "linear interpolation of a long context", BOTH, "position|factor|linear|scal|0\\.5",
         of_angles(lambda p, f: p / 2 * f), layer=0),
    Cell("rope: exponents halved", "i/K for 2i/K", BOTH, "exponent|frequenc|base|theta",
         of_angles(lambda p, f: p * f**0.5), layer=0),
    Cell("rope: last frequency zero", "linspace with its end", BOTH, "frequenc|exponent|base",
         of_angles(lambda p, _f: p * 10000.0 ** -(np.arange(16) / 15)), layer=0),
    Cell("rope: positions end at 16", "table shorter than the context", BOTH, "position",
         of_angles(lambda p, f: np.minimum(p, 16) * f), layer=0),
    Cell("rope: positions start again at 16", "modulo in a ring", BOTH, "position|modulo|period",
         of_angles(lambda p, f: p % 16 * f), layer=0),
    Cell("rope: angles in float16", "tables made in half precision", BOTH, "float16|angle",
         of_angles(lambda p, f: single(p * single(f, "float16"), "float16")), layer=0),
    Cell("rope: frequencies in bfloat16", "inv_freq cast with the model", BOTH, "frequenc|bfloat16",
         of_angles(lambda p, f: p * single(f, "bfloat16")), layer=0),
    Cell("rope: sin alone in bfloat16", "one buffer cast, the other not", Q, "sin.*bfloat16|bfloat16.*sin",
         in_part("rope", turned_by(lambda c, s: (c, narrow(s))), QUERY), equal="bfloat16"),
    Cell("rope: cos alone in bfloat16", "one buffer cast, the other not", K, "cos.*bfloat16|bfloat16.*cos",
         in_part("rope", turned_by(lambda c, s: (narrow(c), s)), KEY), equal="bfloat16"),
    Cell("rope: tables in bfloat16", "buffers cast with the model", Q, "bfloat16",
         in_part("rope", turned_by(lambda c, s: (narrow(c), narrow(s))), QUERY)),
    Cell("rope: tables in float8", "cache of tables quantised", K, "float8|e4m3|3 bits",
         in_part("rope", turned_by(lambda c, s: (narrow(c, "e4m3"), narrow(s, "e4m3"))), KEY)),
    Cell("rope: attention factor 1.1386", "YaRN's factor without YaRN", BOTH, "1\\.13|1\\.14|factor",
         of_angles(lambda p, f: p * f, lambda c, s: (c * 1.1386, s * 1.1386)), layer=0),
    Cell("rope: halves exchanged", "rotate_half's concatenation", Q, "halves|exchanged|swapped|order",
         in_part("rope", halves_exchanged, QUERY)),
    Cell("rope: values turned", "RoPE on v too", ("v",), "turned|rotat|rope",
         in_part("project", rotated_values, 2, ("prefill",))),
    Cell("rope: q of the next frequency", "frequencies shifted by one", Q, "frequenc|base|exponent",
         in_part("rope", turned_by(lambda c, s: (jnp.roll(c, -1, -1), jnp.roll(s, -1, -1))), QUERY)),
    Cell("rope: frequencies in reverse", "arange from the end", K, "revers|frequenc|order",
         in_part("rope", turned_by(lambda c, s: (c[..., ::-1], s[..., ::-1])), KEY)),
    Cell("rope: decode not turned", "decode kernel without RoPE", Q, "omitted|not turned|position|without|no rope",
         in_part("rope", turned_by(lambda c, s: (jnp.ones_like(c), jnp.zeros_like(s))), QUERY, (DECODE,))),
)  # fmt: skip

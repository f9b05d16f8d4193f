"""The exam's mistakes as they stand in a decoder's own source: lines of an example, each there once, written otherwise.

What cannot stand in such a decoder is the nearest that can, and ``note`` says why. A point is the first in program
order that a map shows of the mistake's: own_decoder.py and nnx_decoder.py show no scores, no keys before the cache and
no stream. Without an announced policy a format is no mistake in itself: where it costs no more than rounding, a note
says it.
"""

from dataclasses import dataclass, field
from pathlib import Path

Edits = tuple[tuple[str, str], ...]
EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Written:
    """A mistake of exams/mistakes.py, by ``name``, as (old, new) lines of an example's source.

    ``honest``: edits of its honest twin, made before. ``entry``: the example's program. ``points``: what the map says
    otherwise of both, ``shows``: of the mistaken source alone (the map is its author's; empty: nothing shows it);
    ``config``: what config.json says otherwise.
    ``point``, ``cause``: where they are not the exam's; ``layer`` None: of none.
    """

    name: str
    edits: Edits
    honest: Edits = ()
    entry: str = "program"
    points: dict[str, str] = field(default_factory=dict)
    shows: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    point: str | None = None
    cause: str | None = None
    layer: int | None = 0
    note: str = ""


def text(example: str, edits: Edits) -> str:
    """Return an example's source with its edits; raises AssertionError where one does not stand there exactly once."""
    found = (EXAMPLES / f"{example}.py").read_text()
    for old, new in edits:
        assert found.count(old) == 1, f"{example}: {found.count(old)} of {old!r}"
        found = found.replace(old, new)
    return found


LARGEST = "no maximum at large scores"
SCALE = "scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)"
MEAN = "jnp.mean(wide * wide, axis=-1, keepdims=True)"
ROOT = "jnp.float32) * HEAD**-0.5"
PROBS = "probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)"
TURNED = (
    "turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]",
    "cos, sin = jnp.cos(angle).astype(jnp.bfloat16), jnp.sin(angle).astype(jnp.bfloat16)\n"
    "    turned = [a * cos - b * sin, b * cos + a * sin]",
)


def _softmax(indent: str, *lines: str) -> Edits:
    """Return a softmax in lines of its own."""
    return ((PROBS, f"\n{indent}".join(lines)),)


def _norms() -> dict[str, Edits]:
    """Return the mistakes of norms, which both examples write alike."""
    return {
        "epsilon outside": ((SCALE, f"scale = 1 / (jnp.sqrt({MEAN}) + 1e-5)"),),
        "mean of sizes": ((SCALE, "scale = 1 / (jnp.mean(jnp.abs(wide), axis=-1, keepdims=True) + 1e-5)"),),
        "mean for mean square": ((MEAN, "jnp.mean(wide, axis=-1, keepdims=True)"),),
        "mean over D − 1": ((MEAN, "jnp.sum(wide * wide, axis=-1, keepdims=True) / (WIDTH - 1)"),),
        "epsilon 1e-6": (("True) + 1e-5)", "True) + 1e-6)"),),
        "epsilon 3e-6": (("True) + 1e-5)", "True) + 3e-6)"),),
        "one channel × 1.5": (
            ("return (wide * scale).astype(x.dtype)", "return (wide * scale).at[..., 5].multiply(1.5).astype(x.dtype)"),
        ),
    }


def _attention(indent: str) -> dict[str, Edits]:
    """Return the mistakes of RoPE, scores and softmax that both examples write alike."""
    top = "top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)"
    over = "probs = (e / e.sum(axis=-1, keepdims=True)).astype(x.dtype)"
    return {
        "scores in bf16": _softmax(
            indent,
            "scores = lax.reduce_precision(scores, 8, 7)",
            PROBS,
        ),
        "softmax in bf16": ((PROBS, "probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf).astype(x.dtype))"),),
        "scale 1/√(d+1)": ((ROOT, "jnp.float32) * (HEAD + 1) ** -0.5"),),
        "scale twice in decode": ((ROOT, "jnp.float32) * HEAD**-1.0"),),
        "scale × 0.98": ((ROOT, "jnp.float32) * (0.98 * HEAD**-0.5)"),),
        "RoPE tables in bf16": (TURNED,),
        "RoPE base 500000": (("10000.0 **", "500000.0 **"),),
        LARGEST: _softmax(indent, "e = jnp.where(seen, jnp.exp(scores), 0)", over),
        "exponentials in bf16": _softmax(
            indent,
            top,
            "e = jnp.where(seen, jnp.exp(scores - top).astype(jnp.bfloat16).astype(jnp.float32), 0)",
            over,
        ),
        "exp by Schraudolph": _softmax(
            indent,
            top,
            "bits = jnp.maximum((scores - top) * (2**23 / 0.6931471805599453) + 127.0 * 2**23, 0)",
            "e = jnp.where(seen, lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32), 0)",
            over,
        ),
    }


SEEN = "seen = jnp.arange(SLOTS) <= position"
KEYS = 'keys = lax.dynamic_update_slice(cache["keys"], key[None], (position, 0, 0))'
VALUES = 'values = lax.dynamic_update_slice(cache["values"], value[None], (position, 0, 0))'
ATTENDED = 'attended = jnp.einsum("hs,shk->hk", probs, values).reshape(-1)'
VALUE = 'value = (normed @ weights["value"]).reshape(HEADS, HEAD)'
ACT = "act = jax.nn.silu(gate) * up"
LOGITS = 'logits = jnp.dot(params["embed"], final, preferred_element_type=jnp.float32)'
LARGE = (('"query": drawn(LAYERS, WIDTH, WIDTH)', '"query": 40 * drawn(LAYERS, WIDTH, WIDTH)'),)
WIDE = (
    ("return jnp.asarray(values, jnp.bfloat16)", "return jnp.asarray(values, jnp.float32)"),
    ("jnp.zeros((LAYERS, SLOTS, HEADS, HEAD), jnp.bfloat16)", "jnp.zeros((LAYERS, SLOTS, HEADS, HEAD), jnp.float32)"),
)
WINDOW = ((SEEN, "seen = (jnp.arange(SLOTS) <= position) & (jnp.arange(SLOTS) > position - 3)"),)
GROUPED = (
    (
        'key = rotate((normed @ weights["key"]).reshape(HEADS, HEAD)',
        'key = rotate((normed @ weights["key"]).reshape(2, HEAD)',
    ),
    (VALUE, VALUE.replace("HEADS, HEAD", "2, HEAD")),
    (
        "    scores = jnp.einsum(",
        "    each, own = jnp.repeat(keys, 2, axis=1), jnp.repeat(values, 2, axis=1)\n    scores = jnp.einsum(",
    ),
    ("query, keys, preferred", "query, each, preferred"),
    ("probs, values)", "probs, own)"),
    ('"key": drawn(LAYERS, WIDTH, WIDTH)', '"key": drawn(LAYERS, WIDTH, 2 * HEAD)'),
    ('"value": drawn(LAYERS, WIDTH, WIDTH)', '"value": drawn(LAYERS, WIDTH, 2 * HEAD)'),
    ("jnp.zeros((LAYERS, SLOTS, HEADS, HEAD), jnp.bfloat16)", "jnp.zeros((LAYERS, SLOTS, 2, HEAD), jnp.bfloat16)"),
)
BATCH = (
    ("call=step,", 'call=jax.vmap(lambda p, t, n, c: step(p, t[0], n, c), (None, 0, None, 0), axis_name="batch"),'),
    ("jnp.argmax(logits).astype(jnp.int32)", "jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)"),
    ("jnp.zeros((LAYERS,", "jnp.zeros((2, LAYERS,"),
    ('"a": (jnp.int32(17), jnp.int32(0), empty)', '"a": (jnp.asarray([[17], [201]], jnp.int32), jnp.int32(0), empty)'),
    (', "b": (jnp.int32(201), jnp.int32(0), empty)', ""),
)
BATCHED = {
    "k_cache": '{ name = "keys", axes = "b s g k -> b s g k" }',
    "v_cache": '{ name = "values", axes = "b s g k -> b s g k" }',
    "probs": '{ name = "probs", axes = "b h s -> b h 1 s" }',
}
QUICK = "act = (wide * jax.nn.sigmoid(1.702 * wide)).astype(x.dtype)"
TO_OUT = {"attn_out": '"attended~1"'}
FIRST_ROW, FIRST_KEY = "mask one short but for the first row", "first key attended to 1"
OF_V = "no product shows k: the cache of v is the first that is held against the rows written"
AFTER_V = "after the product that shows v, so that the cache shows it first"
NONE_OF_A_BATCH = "the example has one sequence; here two by jax.vmap"


def _read(name: str) -> dict[str, str]:
    """Return the entry of a map for keys that attention reads."""
    return {"k_cache": f'{{ name = "{name}", axes = "s g k -> 1 s g k" }}'}


def after(line: str, *more: str) -> tuple[str, str]:
    """Return a line's edit with lines that follow it."""
    return (line, "\n    ".join((line, *more)))


INT8 = """def int8(x):
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True) / 127
    return (jnp.round(x.astype(jnp.float32) / scale) * scale).astype(x.dtype)


"""
SUMMED = """def summed(x, w):
    def term(total, pair):
        return total + pair[0] * pair[1], None

    x, first = lax.optimization_barrier(x), jnp.zeros(w.shape[-1], jnp.float16)
    return lax.scan(term, first, (x.astype(jnp.float16), w.astype(jnp.float16)))[0].astype(x.dtype)


"""
COMMON = _norms() | _attention("    ")
# what only recorded values tell is told of attention's output: FP64 rounds and cuts nothing
WHOLE = dict.fromkeys(
    ("scores in bf16", "softmax in bf16", "exponentials in bf16", "exp by Schraudolph", LARGEST), "attn_out"
)
FUSED = {"softmax in bf16": "softmax in bfloat16, sums of unrounded exponentials"}  # by XLA, of one row
W = Written
OWN = (
    *(
        W(name, edits, point=WHOLE.get(name), cause=FUSED.get(name))
        for name, edits in COMMON.items()
        if name != LARGEST
    ),
    W(LARGEST, COMMON[LARGEST], LARGE, point=WHOLE[LARGEST]),
    W("RoPE off by one in decode", (("position.astype(jnp.float32)", "(position + 1).astype(jnp.float32)"),)),
    W("RoPE off by three", (("position.astype(jnp.float32)", "(position + 3).astype(jnp.float32)"),)),
    W("residual rounded twice", (("x = x + mixed", "x = lax.reduce_precision(x + mixed, 8, 7)"),), WIDE),
    W("mask one short", ((SEEN, "seen = jnp.arange(SLOTS) < jnp.maximum(position, 1)"),), cause=FIRST_ROW),
    W("mask one ahead", ((SEEN, "seen = jnp.arange(SLOTS) <= position + 1"),)),
    W(
        "window one short",
        (("> position - 3)", "> position - 2)"),),
        WINDOW,
        config={"model_type": "mistral", "sliding_window": 3},
    ),
    W(
        "decode does not see key 0",
        ((SEEN, "seen = (jnp.arange(SLOTS) <= position) & ((jnp.arange(SLOTS) > 0) | (position == 0))"),),
        cause=FIRST_KEY,
    ),
    W(
        "KV cache in int8",
        (
            ("def layer(", f"{INT8}def layer("),
            (KEYS, KEYS.replace("key[None]", "int8(key)[None]")),
            (VALUES, VALUES.replace("value[None]", "int8(value)[None]")),
        ),
    ),
    W(
        "KV cache in fp8",
        (
            (KEYS, KEYS.replace("key[None]", "key.astype(jnp.float8_e4m3fn).astype(key.dtype)[None]")),
            (VALUES, VALUES.replace("value[None]", "value.astype(jnp.float8_e4m3fn).astype(value.dtype)[None]")),
        ),
        point="v_cache",
        note=OF_V,
    ),
    W(
        "heads interleaved",
        (
            (
                "jnp.repeat(keys, 2, axis=1), jnp.repeat(values, 2, axis=1)",
                "jnp.tile(keys, (1, 2, 1)), jnp.tile(values, (1, 2, 1))",
            ),
        ),
        GROUPED,
        config={"num_key_value_heads": 2},
        note="the example has a key head for every query head; here two",
    ),
    W("stale KV entry", (after(KEYS, "keys = keys.at[2].set(keys[1])"),), shows=_read("keys~1")),
    W(
        "stale KV entry in steps 1 to 4",
        (
            after(VALUES, "read = jnp.where((position >= 3) & (position <= 4), keys.at[2].set(keys[0]), keys)"),
            ("query, keys, preferred", "query, read, preferred"),
        ),
        shows=_read("read~1"),
        note="in steps 3 and 4",
    ),
    W(
        "prompts' caches exchanged",
        (
            after(VALUES, 'read = lax.ppermute(keys, "batch", ((0, 1), (1, 0)))'),
            ("query, keys, preferred", "query, read, preferred"),
        ),
        BATCH,
        points=BATCHED,
        shows={"k_cache": '"read"'},
        cause="row of prompt a, row 1",
        note=NONE_OF_A_BATCH,
    ),
    W(
        "prompts' rows exchanged",
        (
            (
                ATTENDED,
                ATTENDED.replace(
                    ".reshape", '\n    attended = lax.ppermute(attended, "batch", ((0, 1), (1, 0))).reshape'
                ),
            ),
        ),
        BATCH,
        points=BATCHED,
        shows=TO_OUT,
        cause="row of prompt a, row 1",
        note=NONE_OF_A_BATCH,
    ),
    W(
        "values × 1.02 in batches",
        ((ATTENDED, f"{ATTENDED} * 1.02"),),
        BATCH,
        points=BATCHED,
        shows=TO_OUT,
        cause="× 1.02344",
        note=NONE_OF_A_BATCH,
    ),
    W(
        "cache reads zeros",
        (
            (KEYS, KEYS.replace('cache["keys"]', 'jnp.zeros_like(cache["keys"])')),
            (VALUES, VALUES.replace('cache["values"]', 'jnp.zeros_like(cache["values"])')),
        ),
        note="the rows before the new one are zero",
    ),
    W(
        "sums in fp16",
        (
            ("def layer(", f"{SUMMED}def layer("),
            ('(normed @ weights["value"])', 'summed(normed, weights["value"])'),
        ),
        shows={"v": ""},
        point="v_cache",
        cause="sums in float16, fused",
        note="no product makes v, so that the cache shows it first; XLA keeps its terms",
    ),
    W("logits in bf16", ((LOGITS, f"{LOGITS}\n    logits = lax.reduce_precision(logits, 8, 7)"),), layer=None),
    W(
        "weights swapped",
        (
            (
                "    x, cache = lax.scan(",
                (
                    '    layers = params["layers"] | {"value": params["layers"]["value"][::-1]}\n'
                    "    x, cache = lax.scan("
                ),
            ),
            ('(params["layers"], cache))', "(layers, cache))"),
        ),
        cause="weights of layer 2",
        note="the scan reads the last layer's values in the first",
    ),
    W(
        "columns scaled",
        (
            (
                VALUE,
                VALUE.replace(
                    'weights["value"])',
                    '(weights["value"] * (1 + 0.03 * jnp.sin(1.7 * jnp.arange(WIDTH))).astype(x.dtype)))',
                ),
            ),
        ),
    ),
    W("first token's value dropped", (("probs, values)", "probs, values.at[0].set(0))"),), shows=TO_OUT),
    W("activation clipped", ((ACT, "act = jnp.clip(jax.nn.silu(gate) * up, -0.5, 0.5)"),)),
    W(
        "a token's MLP is zero",
        (('down = act @ weights["down"]', 'down = act @ jnp.where(position == 3, 0, weights["down"])'),),
        shows={"mlp_out": '"down~1"'},
        cause="token 3 zeroed",
    ),
    W("head 3 is zero", ((ATTENDED, ATTENDED.replace(".reshape", ".at[3].set(0).reshape")),), shows=TO_OUT),
    W("values × 1.1 inside", (("probs, values)", "probs, values * 1.1)"),), shows=TO_OUT, cause="× 1.10156"),
    W("norm without weight", (("(wide * scale).astype(x.dtype) * weight", "(wide * scale).astype(x.dtype)"),)),
    W("quick gelu", ((ACT, f"wide = gate.astype(jnp.float32)\n    {QUICK} * up"),)),
    W("logits × 1.01", ((LOGITS, f"{LOGITS} * 1.01"),), layer=None),
    W("values wobble", (after(VALUE, "value = value + 0.05 * jnp.sin(40 * value)"),), point="v_cache", note=AFTER_V),
    W("gates fold over", (after(ACT, "act = act - 0.3 * act * jnp.cos(9 * act)"),)),
)


N_SEEN = "seen = jnp.arange(SLOTS) <= positions[:, None]"
N_KEYS = 'keys = lax.dynamic_update_slice(cache["keys"], key, (0, positions[0], 0, 0))'
N_VALUES = 'values = lax.dynamic_update_slice(cache["values"], value, (0, positions[0], 0, 0))'
N_ATTENDED = 'attended = jnp.einsum("bgrts,bsgk->btgrk", probs, values).reshape(batch, rows, -1)'
N_VALUE = "value = self.value(x).reshape(batch, rows, GROUPS, HEAD)"
N_ACT = "act = nnx.silu(self.gate(second).astype(jnp.float32)).astype(x.dtype) * self.up(second)"
N_DOWN = "return middle + self.down(act), cache"
N_LOGITS = "return self.head(self.norm(x)), written"
N_QUERY = "self.query, self.out = linear(WIDTH, HEADS * HEAD, rngs), linear(HEADS * HEAD, WIDTH, rngs)"
N_LARGE = ((N_QUERY, f"{N_QUERY}\n        self.query.kernel[...] = 64 * self.query.kernel[...]"),)
N_WIDE = (
    ("dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)\n\n\ndef rotate", "rngs=rngs)\n\n\ndef rotate"),
    (
        "param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=rngs)\n        self.blocks",
        "rngs=rngs)\n        self.blocks",
    ),
    ("draw.standard_normal(x.shape), jnp.bfloat16)", "draw.standard_normal(x.shape), jnp.float32)"),
    ("HEAD), jnp.bfloat16) for n in", "HEAD), jnp.float32) for n in"),
)
N_WINDOW = (
    (N_SEEN, "at = positions[:, None]\n        seen = (jnp.arange(SLOTS) <= at) & (jnp.arange(SLOTS) > at - 3)"),
)
N_HEAD = (
    "nnx.Linear(WIDTH, VOCAB, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs, "
    "preferred_element_type=jnp.float32)"
)


N_TO_OUT = {"attn_out": '{ name = "attended~1{#}", axes = "b g k r t -> b t g r k" }'}


def n_after(line: str, *more: str) -> tuple[str, str]:
    """Return a line's edit with lines that follow it, in a method."""
    return (line, "\n        ".join((line, *more)))


N_SUMMED = (
    SUMMED.replace("jnp.zeros(w.shape[-1]", "jnp.zeros((*x.shape[:-1], w.shape[-1])")
    .replace("pair[0] * pair[1]", "pair[0][..., None] * pair[1]")
    .replace("(x.astype(jnp.float16)", "(jnp.moveaxis(x, -1, 0).astype(jnp.float16)")
)
N_COMMON = _norms() | _attention("        ")
NNX = (
    *(
        W(name, edits, point=WHOLE.get(name))
        for name, edits in N_COMMON.items()
        if name not in (LARGEST, "scale twice in decode")
    ),
    W(LARGEST, N_COMMON[LARGEST], N_LARGE, point=WHOLE[LARGEST]),
    W("scale twice in decode", N_COMMON["scale twice in decode"], entry="decode"),
    W(
        "RoPE off by one in decode",
        (("positions.astype(jnp.float32)", "(positions + 1).astype(jnp.float32)"),),
        entry="decode",
    ),
    W("RoPE off by three", (("positions.astype(jnp.float32)", "(positions + 3).astype(jnp.float32)"),)),
    W("residual rounded twice", (("middle = x + mixed", "middle = lax.reduce_precision(x + mixed, 8, 7)"),), N_WIDE),
    W("mask one short", ((N_SEEN, "seen = jnp.arange(SLOTS) < jnp.maximum(positions[:, None], 1)"),), cause=FIRST_ROW),
    W("mask one ahead", ((N_SEEN, "seen = jnp.arange(SLOTS) <= positions[:, None] + 1"),)),
    W(
        "window one short",
        (("> at - 3)", "> at - 2)"),),
        N_WINDOW,
        config={"model_type": "mistral", "sliding_window": 3},
    ),
    W(
        "decode does not see key 0",
        (n_after(N_SEEN, "seen = seen & ((jnp.arange(SLOTS) > 0) | (positions[:, None] == 0))"),),
        entry="decode",
        cause=FIRST_KEY,
    ),
    W(
        "KV cache in int8",
        (
            ("class Attention(", f"{INT8}class Attention("),
            (N_KEYS, N_KEYS.replace(", key,", ", int8(key),")),
            (N_VALUES, N_VALUES.replace(", value,", ", int8(value),")),
        ),
        entry="decode",
    ),
    W(
        "KV cache in fp8",
        (
            (N_KEYS, N_KEYS.replace(", key,", ", key.astype(jnp.float8_e4m3fn).astype(key.dtype),")),
            (N_VALUES, N_VALUES.replace(", value,", ", value.astype(jnp.float8_e4m3fn).astype(value.dtype),")),
        ),
        entry="decode",
        point="v_cache",
        note=OF_V,
    ),
    W(
        "heads interleaved",
        (
            (
                "grouped = queries.reshape(batch, rows, GROUPS, HEADS // GROUPS, HEAD)",
                "grouped = queries.reshape(batch, rows, HEADS // GROUPS, GROUPS, HEAD).swapaxes(2, 3)",
            ),
            (N_ATTENDED, N_ATTENDED.replace(".reshape", ".swapaxes(2, 3).reshape")),
        ),
        shows={
            "probs": '{ name = "probs{#}", axes = "b g r t s -> b (r g) t s" }',
            "attn_out": '{ name = "attended{#}", axes = "b g k r t -> b t r g k" }',
        },
    ),
    W(
        "stale KV entry",
        (n_after(N_KEYS, "keys = keys.at[:, 2].set(keys[:, 1])"),),
        entry="decode",
        shows={"k_cache": '"keys~1{#}"'},
    ),
    W(
        "stale KV entry in steps 1 to 4",
        (
            n_after(
                N_VALUES,
                "late = (positions[0] >= 3) & (positions[0] <= 4)",
                "read = jnp.where(late, keys.at[:, 2].set(keys[:, 0]), keys)",
            ),
            ("grouped, keys, preferred", "grouped, read, preferred"),
        ),
        entry="decode",
        shows={"k_cache": '"read~1{#}"'},
        note="in steps 3 and 4",
    ),
    W(
        "prompts' caches exchanged",
        ((N_KEYS, N_KEYS.replace(", key,", ", key[::-1],")),),
        entry="decode",
        note="where they are written",
        cause="row of prompt a, row 1",
    ),
    W("prompts' rows exchanged", (("probs, values)", "probs[::-1], values[::-1])"),), cause="row of prompt a, row 1"),
    W(
        "values × 1.02 in batches",
        ((N_ATTENDED, f"{N_ATTENDED} * (1.02 if batch > 1 else 1)"),),
        shows={"attn_out": '"attended~1{#}"'},
        cause="× 1.02344",
    ),
    W(
        "cache reads zeros",
        (
            (N_KEYS, N_KEYS.replace('cache["keys"]', 'jnp.zeros_like(cache["keys"])')),
            (N_VALUES, N_VALUES.replace('cache["values"]', 'jnp.zeros_like(cache["values"])')),
        ),
        entry="decode",
        note="the rows before the new one are zero",
    ),
    W(
        "sums in fp16",
        (
            (
                "class Attention(",
                f"{N_SUMMED}class Attention(",
            ),
            ("self.value(x)", "summed(x, self.value.kernel[...])"),
        ),
        shows={"v": ""},
        point="v_cache",
        cause="sums in float16, fused",
        note="no product makes v, so that the cache shows it first; XLA keeps its terms",
    ),
    W(
        "logits in bf16",
        ((N_LOGITS, "return lax.reduce_precision(self.head(self.norm(x)), 8, 7), written"),),
        (("linear(WIDTH, VOCAB, rngs)", N_HEAD),),
        layer=None,
    ),
    W(
        "weights swapped",
        (
            (
                "        for block, held in",
                "        self.blocks[0].attention.value, self.blocks[1].attention.value = (\n"
                "            self.blocks[1].attention.value, self.blocks[0].attention.value\n        )\n"
                "        for block, held in",
            ),
        ),
        cause="weights of layer 1",
        note="the first and the last layer exchange their values' weights",
    ),
    W(
        "columns scaled",
        (
            (
                "self.value(x)",
                "(x @ (self.value.kernel[...] * (1 + 0.03 * jnp.sin(1.7 * jnp.arange(16))).astype(x.dtype)))",
            ),
        ),
    ),
    W("first token's value dropped", (("probs, values)", "probs, values.at[:, 0].set(0))"),), shows=N_TO_OUT),
    W(
        "activation clipped",
        ((N_ACT, N_ACT.replace("act = ", "act = jnp.clip(") + ", -0.125, 0.125)"),),
        cause="clipped at ±0.125",
    ),
    W(
        "a token's MLP is zero",
        ((N_DOWN, "down = self.down(act).at[:, 7].set(0)\n        return middle + down, cache"),),
        shows={"mlp_out": '"down~1{#}"'},
    ),
    W(
        "head 3 is zero",
        ((N_ATTENDED, N_ATTENDED.replace(".reshape", ".at[:, :, 1, 1].set(0).reshape")),),
        shows={"attn_out": '"attended~1{#}"'},
    ),
    W("values × 1.1 inside", (("probs, values)", "probs, values * 1.1)"),), shows=N_TO_OUT, cause="× 1.10156"),
    W("norm without weight", (("(wide * scale).astype(x.dtype) * self.weight", "(wide * scale).astype(x.dtype)"),)),
    W(
        "quick gelu",
        ((N_ACT, f"wide = self.gate(second).astype(jnp.float32)\n        {QUICK} * self.up(second)"),),
        shows={"mlp_act": '"act~1{#}"'},
    ),
    W("logits × 1.01", ((N_LOGITS, "return 1.01 * self.head(self.norm(x)).astype(jnp.float32), written"),), layer=None),
    W(
        "values wobble",
        (n_after(N_VALUE, "value = value + 0.05 * jnp.sin(40 * value)"),),
        point="v_cache",
        note=AFTER_V,
    ),
    W("gates fold over", (n_after(N_ACT, "act = act - 0.3 * act * jnp.cos(9 * act)"),)),
)

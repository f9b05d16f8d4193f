"""Mistakes of converters, each done to a checkpoint's tensors: the kind, the words and the tensor that name it."""

import re

import ml_dtypes
import numpy as np

from tests.references.alignment.layouts import HEAD, HEADS, HIDDEN, KV, LAYERS, VOCAB

Q, K, V, OUT = (f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkvo")
GATE, UP, DOWN = (f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
INPUT, SECOND = (f"model.layers.1.{n}_layernorm.weight" for n in ("input", "post_attention"))
LATER = Q.replace("layers.1", "layers.2")
SHUFFLED = np.random.default_rng(5).permutation(HIDDEN)
BF16 = ml_dtypes.bfloat16
WIDE = 24  # rows of a head that was padded


def interleaved(x, head, stride=2):
    """Rows of heads in turn from their parts: [2, K/2] read as [K/2, 2]."""
    return x.reshape(-1, stride, head // stride, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def on(name, function):
    def change(t):
        t[name] = function(t[name])

    return change


def on_every(name, function):
    def change(t):
        for i in range(LAYERS):
            on(name.replace("layers.1.", f"layers.{i}."), function)(t)

    return change


def both(*changes):
    def change(t):
        for each in changes:
            each(t)

    return change


def exchange(a, b):
    def change(t):
        t[a], t[b] = t[b], t[a]

    return change


def put(name, of):
    return lambda t: t.update({name: t[of]})


def all_rounded(twice=()):
    """All are rounded to bfloat16, some by way of float16."""

    def change(t):
        for name, x in t.items():
            t[name] = (x.astype(np.float16) if name in twice else x).astype(BF16)

    return change


def layers_of(name):
    return [name.replace("layers.1.", f"layers.{i}.") for i in range(LAYERS)]


def turned(x):
    return x.T.copy()


def heads(head):
    return lambda x: interleaved(x, head)


def padded(x, wide=WIDE):
    """Heads padded with zeros to a wider size."""
    apart = x.reshape(-1, HEAD, x.shape[1])
    return np.pad(apart, ((0, 0), (0, wide - HEAD), (0, 0))).reshape(-1, x.shape[1])


def heads_twice(x):
    return interleaved(interleaved(x, HEAD), HEAD)


def heads_exchanged(x):
    """Heads 1 and 3 in each other's place."""
    order = np.arange(len(x)).reshape(-1, HEAD)
    order[[1, 3]] = order[[3, 1]]
    return x[order.reshape(-1)]


def one_row(x):
    x = x.copy()
    x[3] = x[3][::-1] + np.float32(0.25)
    return x


Q_HEADS = on_every(Q, heads(HEAD))
MISTAKES = {
    "transposed where it is square": (on(Q, turned), "transposed", "is transposed", Q),
    "o transposed": (on(OUT, turned), "transposed", "is transposed", OUT),
    "of another layer": (put(Q, LATER), "layer", r"holds .*layers\.2\..*q_proj", Q),
    "two layers exchanged": (exchange(Q, LATER), "layer", r"exchanged with .*layers\.2\..*q_proj", Q),
    "norm of another layer": (put(INPUT, INPUT.replace("1", "3")), "layer", r"layers\.3\.", INPUT),
    "k and v exchanged": (exchange(K, V), "exchanged", "exchanged with .*v_proj", K),
    "q and o exchanged": (exchange(Q, OUT), "exchanged", "exchanged with .*[qo]_proj", "1.self_attn.o_proj"),
    "k and v exchanged in every layer": (
        both(*(exchange(a, b) for a, b in zip(layers_of(K), layers_of(V), strict=True))),
        "exchanged", "exchanged with .*v_proj|by its name it is k, and it holds v", "[kv]_proj",
    ),
    "gate and up exchanged": (exchange(GATE, UP), "exchanged", "exchanged with .*up_proj", GATE),
    "norms exchanged": (exchange(INPUT, SECOND), "exchanged", "exchanged with", INPUT),
    "two heads of q exchanged": (on(Q, heads_exchanged), "rows", "1, 3 are in other places", Q),
    "two heads of o exchanged": (
        on(OUT, lambda x: heads_exchanged(x.T).T), "rows", "1, 3 are in other places|1 holds 3", OUT
    ),
    "RoPE rows of one layer": (on(Q, heads(HEAD)), "rows", f"interleaved in heads of {HEAD}", Q),
    "RoPE rows of q alone": (Q_HEADS, "rows", "interleaved in 4 heads of 16, and those of .* are not", "q_proj"),
    "RoPE rows of k twice": (both(Q_HEADS, on(K, heads_twice)), "rows", "interleaved|in another order", K),
    "RoPE rows permuted twice": (both(on_every(Q, heads_twice)), "rows", "interleaved twice", "q_proj"),
    "RoPE rows of keys by the number of query heads": (
        both(Q_HEADS, on_every(K, heads(KV * HEAD // HEADS))),
        "rows", r"4 heads of 8 \(the number of query heads\)", "k_proj",
    ),
    "RoPE rows backwards": (
        on_every(Q, lambda x: interleaved(x, HEAD, HEAD // 2)), "rows", "interleaved backwards", "q_proj"
    ),
    "RoPE rows permuted after heads were padded": (
        both(*(on_every(n, lambda x: interleaved(padded(x), WIDE)) for n in (Q, K))),
        "rows", "interleaved after heads of 16 were padded to 24", "[qk]_proj",
    ),
    "rows of one expert's or layer's down in another order": (
        on(DOWN, lambda x: x[:, SHUFFLED]), "rows", "in another order", DOWN
    ),
    "vocabulary shifted by one": (on(EMBED, lambda x: np.roll(x, 1, axis=0)), "rows", "shifted by -1", EMBED),
    "vocabulary cut": (
        on(EMBED, lambda x: x[: VOCAB - 8]), "missing", f"rows {VOCAB - 8}:{VOCAB} are nowhere", EMBED
    ),
    "rounded twice": (all_rounded([DOWN]), "rounded", "float16", DOWN),
    "rounded twice in every layer": (
        all_rounded(layers_of(UP)), "rounded", "twice: float32, float16, bfloat16", "up_proj"
    ),
    "rounded, and stored as float32": (
        on_every(UP, lambda x: x.astype(BF16).astype(np.float32)),
        "rounded", "rounded to bfloat16, and are stored as float32", "up_proj",
    ),
    "rows of an MLP in another order": (on(UP, lambda x: x[SHUFFLED]), "rows", "in another order", UP),
    "a shard repeated": (on(GATE, lambda x: np.tile(x[: HIDDEN // 2], (2, 1))), "rows", "a shard repeated", GATE),
    "zeros": (on(V, np.zeros_like), "zeros", "zeros", V),
    "scaled in one layer": (on(V, lambda x: x * np.float32(1.25)), "form", r"times 1\.25", V),
    "sign flipped in one layer": (on(DOWN, np.negative), "form", "times -1", DOWN),
    "shifted by one in one layer": (on(INPUT, lambda x: x + np.float32(1)), "form", "plus 1", INPUT),
    "one row altered": (on(UP, one_row), "values", "1 of its 96", UP),
    "rows reversed": (on(DOWN, lambda x: x[::-1].copy()), "rows", "reverse", DOWN),
}  # fmt: skip


def naming(found, kind, words, tensor):
    """Return the mistakes that name one: its kind, its words, and its tensor, of one layer or of all."""
    exact = re.escape(tensor) if tensor.startswith("model") else tensor
    return [m for m in found if m.kind == kind and re.search(words, m.says) and re.search(exact, m.tensor)]

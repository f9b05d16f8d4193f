"""A small model's tensors, and three layouts of a program that holds them: apart, stacked, fused."""

import numpy as np

WIDTH, HEADS, KV, HEAD, HIDDEN, VOCAB, LAYERS = 64, 4, 2, 16, 96, 120, 4
LAYER = {
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,), "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KV * HEAD, WIDTH), "self_attn.v_proj": (KV * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD), "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}  # fmt: skip


def tensors(seed=0, dtype=np.float32):
    """A checkpoint's tensors, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    drawn = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, WIDTH)), "model.norm.weight": rng.random(WIDTH)}
    for i in range(LAYERS):
        for name, shape in LAYER.items():
            drawn[f"model.layers.{i}.{name}.weight"] = rng.standard_normal(shape)
    return {name: x.astype(dtype) for name, x in drawn.items()}


def apart(t):
    """As the checkpoint has them, under its names."""
    return dict(t)


def stacked(t):
    """Stacked over layers, [in, out], heads together."""

    def every(name):
        return np.stack([t[f"model.layers.{i}.{name}.weight"].T for i in range(LAYERS)])

    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "query": "self_attn.q_proj",
             "key": "self_attn.k_proj", "value": "self_attn.v_proj", "out": "self_attn.o_proj", "gate": "mlp.gate_proj",
             "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
    layers = {own: every(name) for own, name in names.items()}
    return {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"], "layers": layers}


def fused(t):
    """A tree for each layer; q, k and v in one array, gate and up in another, o's heads apart."""

    def layer(i):
        held = {name: t[f"model.layers.{i}.{name}.weight"] for name in LAYER}
        q, k, v = (held[f"self_attn.{n}_proj"] for n in "qkv")
        return {
            "norms": np.stack([held["input_layernorm"], held["post_attention_layernorm"]]),
            "qkv": np.concatenate([q, k, v]).T,
            "o": held["self_attn.o_proj"].T.reshape(HEADS, HEAD, WIDTH),
            "gate_up": np.stack([held["mlp.gate_proj"].T, held["mlp.up_proj"].T], axis=1),
            "down": held["mlp.down_proj"].T,
        }

    embed = t["model.embed_tokens.weight"]
    return {"embed": embed.T, "norm": t["model.norm.weight"], "layers": [layer(i) for i in range(LAYERS)]}


LAYOUTS = {f.__name__: f for f in (apart, stacked, fused)}

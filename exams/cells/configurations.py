"""Fields of a configuration that a port did not read: other families, random weights."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from exams.cells.cell import Cell
from exams.cells.changes import in_config, in_step, in_weights

FIXTURES = Path(__file__).parent.parent.parent / "refs" / "fixtures"
PROMPT = ("The quick brown fox jumps",)


def without(*names: str) -> Any:
    """Load biases as zeros, or norms' weights as what leaves them out."""
    return in_weights(lambda w: {name: jnp.zeros_like(w[name]) for name in names})


def of_layer(kind: int) -> Any:
    """Choose every layer's mask and table as if it were full (0) or windowed (1)."""
    return in_step("of", lambda _honest, _layer, kinds: kinds[kind] if len(kinds) > 1 else kinds[0])


def of_each_head(honest: Any, x: Any, w: Any, name: str) -> Any:
    """Normalise each head of q by itself, under its part of the weight."""
    if name != "q_norm":
        return honest(x, w, name)
    size = honest.__self__.config.head_dim
    heads = [slice(i, i + size) for i in range(0, x.shape[-1], size)]
    return jnp.concatenate([honest(x[..., some], {name: w[name][some]}, name) for some in heads], axis=-1)


CONFIGURATIONS = tuple(
    Cell(f"{model}: {name}", "a field of config.json that is not read", points, names, change, layer=layer,
         model=str(FIXTURES / model), prompts=PROMPT)
    for model, name, points, names, layer, change in (
        ("gemma2-caps", "scores not capped", ("scores",), "cap", 0, in_config(score_cap=None)),
        ("gemma2-caps", "logits not capped", ("logits",), "cap", None, in_config(logit_cap=None)),
        ("gemma2-caps", "scale of the head's size", ("scores",), "scale|√", 0, in_config(query_scale=None)),
        ("gemma2-caps", "window in every layer", ("probs",), "window", 0, of_layer(1)),
        ("gemma2-caps", "window in no layer", ("probs",), "window", 1, of_layer(0)),
        ("gemma2-caps", "offset of norms omitted", ("attn_norm",), "1|offset", 0, in_config(norm_offset=0.0)),
        ("gemma2-caps", "embedding not scaled", ("resid_in",), "scale|factor|√", 0, in_config(embed_scale=1.0)),
        ("gemma2-caps", "window of 9", ("probs",), "window", 1, in_config(window=9)),
        ("gemma3-gqa", "global base and mask in windowed layers", ("q", "k", "probs"), "base|theta|θ|no window", 0,
         of_layer(0)),
        ("gemma3-gqa", "epsilon 1e-5", ("attn_norm",), "epsilon", 0, in_config(norm_eps=1e-5)),
        ("qwen2-gqa", "biases of q, k and v omitted", ("q", "k", "v"), "bias", 0, without("bq", "bk", "bv")),
        ("llama-bias", "bias of o omitted", ("attn_proj",), "bias", 0, without("bo")),
        ("granite-gqa", "residual factor omitted", ("attn_proj", "mlp_out", "resid_mid", "resid_out"),
         "factor|scale", 0, in_config(residual_scale=1.0)),
        ("granite-gqa", "logit factor omitted", ("logits",), "factor|scale", None, in_config(logit_scale=1.0)),
        ("granite-gqa", "scale of the head's size", ("scores",), "scale|√", 0, in_config(query_scale=None)),
        ("granite-gqa", "embedding not scaled", ("resid_in",), "scale|factor", 0, in_config(embed_scale=1.0)),
        ("llama-llama3", "scaling of RoPE omitted", ("q", "k"), "scaling|stretch|frequenc|scaled", 0,
         in_config(rope_scaling=None)),
        ("llama-yarn", "scaling of RoPE omitted", ("q", "k"), "scaling|stretch|frequenc|scaled", 0,
         in_config(rope_scaling=None)),
        ("llama-linear", "scaling of RoPE omitted", ("q", "k"), "scaling|linear|stretch|frequenc|scaled", 0,
         in_config(rope_scaling=None)),
        ("phi3-partial", "every dimension turned", ("q", "k"), "partial|dimension|rotary|turn", 0,
         in_config(rotary=None)),
        ("mistral-window", "no window", ("probs",), "window", 0, in_config(window=64)),
        ("qwen3-moe-plain", "experts' weights made to sum to 1", ("experts",), "renormal|normalis|sum", 0,
         in_config(renormalise=True)),
        ("qwen3-moe-gqa", "experts' weights not made to sum to 1", ("experts",), "renormal|normalis|sum", 0,
         in_config(renormalise=False)),
        ("qwen3-moe-gqa", "one expert for two", ("experts",), "expert|top", 0, in_config(experts_used=1)),
        ("olmo2-gqa", "q's norm of each head", ("q",), "norm|head", 0, in_step("norm", of_each_head)),
    )
)  # fmt: skip

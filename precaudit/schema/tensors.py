"""Which tensors a configuration implies."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from precaudit.schema.configuration import DecoderConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@cache
def model_tensors(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Return every tensor the model consists of, by Hugging Face name, with its shape [out, in].

    Projections that a family stores fused appear as the parts they are read as.
    """
    layer = _layer(config)
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab, config.width)}
    for i in range(config.layers):
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (config.width,)
    if not config.tied:
        tensors[HEAD] = (config.vocab, config.width)
    return MappingProxyType(tensors)


def _layer(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    d, q, kv, f = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.mlp_width
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (d,) for name in c.norm_names if name is not None}
    layer |= {
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
    }
    if c.sparse:
        layer["mlp.gate.weight"] = (c.experts, d)
    for mlp in [f"mlp.experts.{e}" for e in range(c.experts)] or ["mlp"]:
        layer |= {f"{mlp}.{n}_proj.weight": (d, f) if n == "down" else (f, d) for n in ("gate", "up", "down")}
    if c.qk_norm:
        sizes = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
        layer |= {"self_attn.q_norm.weight": (sizes[0],), "self_attn.k_norm.weight": (sizes[1],)}
    if c.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if c.o_bias:
        layer |= {"self_attn.o_proj.bias": (d,)}
    if c.mlp_bias:
        layer |= {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,), "mlp.down_proj.bias": (d,)}
    return layer

"""What a configuration makes of the decoder: its parts, and the names of its tensors."""

from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder.parts import Parts, geglu, rms_norm_once, swiglu

TENSORS = {
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "bgate": "mlp.gate_proj.bias",
    "bup": "mlp.up_proj.bias",
    "bdown": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
}

# What is put together for one product, by the part of ``Policy.fused`` that asks for it: its weights, and its biases.
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "qkv": {"qkv": ("wq", "wk", "wv"), "bqkv": ("bq", "bk", "bv")},
    "gate_up": {
        "gate_up": ("gate", "up"),
        "bgate_up": ("bgate", "bup"),
        "expert_gate_up": ("expert_gate", "expert_up"),
    },
}

EXPERT_TENSORS = {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj"}


def family_parts(config: DecoderConfig) -> Parts:
    """Return the operations that a configuration asks for."""
    activate = {"silu": swiglu, "gelu_tanh": geglu}[config.activation]
    return Parts(norm=rms_norm_once, activate=activate) if config.norm_once else Parts(activate=activate)


def layer_tensors(config: DecoderConfig) -> dict[str, str]:
    """Return this decoder's names of a layer's tensors → checkpoint names without the layer prefix."""
    names = config.norm_names
    norms = {"attn_norm": names.attn, "attn_post": names.attn_post, "mlp_norm": names.mlp, "mlp_post": names.mlp_post}
    return {ours: f"{theirs}.weight" for ours, theirs in norms.items() if theirs is not None} | TENSORS


def fused_tensors(fused: str) -> dict[str, tuple[str, ...]]:
    """Return {name: names of the tensors it is put together of, rows after rows}, as a policy's ``fused`` asks."""
    return {name: parts for key in fused.split("+") for name, parts in FUSED.get(key, {}).items()}


def fused_widths(config: DecoderConfig) -> dict[str, dict[str, int]]:
    """Return {product: {projection: how many of its columns}} of what ``fused_tensors`` puts together."""
    heads, keys = (n * config.head_dim for n in (config.heads, config.kv_heads))
    return {
        "qkv": {"q": heads, "k": keys, "v": keys},
        "gate_up": {"gate": config.mlp_width, "up": config.mlp_width},
    }

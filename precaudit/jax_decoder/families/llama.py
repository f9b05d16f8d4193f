"""Llama: RMSNorm before attention and MLP, RoPE, grouped heads, SwiGLU; biases where the configuration says so."""

from precaudit.jax_decoder.families import Family
from precaudit.jax_decoder.parts import Parts

LAYER_TENSORS = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "bgate": "mlp.gate_proj.bias",
    "bup": "mlp.up_proj.bias",
    "bdown": "mlp.down_proj.bias",
}
FAMILY = Family(Parts(), LAYER_TENSORS)

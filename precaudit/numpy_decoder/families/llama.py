"""Llama, one function per point; each takes the points listed as its inputs in docs/design.md §4."""

from precaudit.formats import Array
from precaudit.numpy_decoder.families import Context, Operation
from precaudit.numpy_decoder.operators import linear, rms_norm, rope, swiglu


def _project(c: Context, x: Array, name: str) -> Array:
    return linear(x, c.tensor(f"{name}.weight"), c.weight(f"{name}.bias"), c.rounding)


def _heads(c: Context, x: Array, name: str) -> Array:
    return _project(c, x, name).reshape(len(x), -1, c.config.head_dim)


def attn_norm(c: Context, resid_in: Array) -> Array:
    """norm(resid_in) [T, D]."""
    return rms_norm(resid_in, c.tensor("input_layernorm.weight"), c.config.norm_eps, c.rounding)


def q(c: Context, attn_norm: Array) -> Array:
    """Queries after RoPE [T, H, K]."""
    x = c.rounding.linear(_heads(c, attn_norm, "self_attn.q_proj"))
    return c.rounding.rows(rope(x, c.positions, c.config.rope_theta, c.rounding))


def k(c: Context, attn_norm: Array) -> Array:
    """Keys after RoPE [T, G, K]."""
    x = c.rounding.linear(_heads(c, attn_norm, "self_attn.k_proj"))
    return c.rounding.rows(rope(x, c.positions, c.config.rope_theta, c.rounding))


def v(c: Context, attn_norm: Array) -> Array:
    """Values [T, G, K]."""
    return c.rounding.rows(_heads(c, attn_norm, "self_attn.v_proj"))


def attn_proj(c: Context, attn_out: Array) -> Array:
    """Output projection [T, D]."""
    return c.rounding.proj(_project(c, attn_out.reshape(len(attn_out), -1), "self_attn.o_proj"))


def resid_mid(c: Context, resid_in: Array, attn_proj: Array) -> Array:
    """Residual after attention [T, D]."""
    return c.rounding.residual(resid_in + attn_proj)


def mlp_norm(c: Context, resid_mid: Array) -> Array:
    """norm(resid_mid) [T, D]."""
    return rms_norm(resid_mid, c.tensor("post_attention_layernorm.weight"), c.config.norm_eps, c.rounding)


def mlp_act(c: Context, mlp_norm: Array) -> Array:
    """silu(gate) · up [T, F]."""
    return swiglu(_project(c, mlp_norm, "mlp.gate_proj"), _project(c, mlp_norm, "mlp.up_proj"), c.rounding)


def mlp_out(c: Context, mlp_act: Array) -> Array:
    """Down projection [T, D]."""
    return c.rounding.proj(_project(c, mlp_act, "mlp.down_proj"))


def resid_out(c: Context, resid_mid: Array, mlp_out: Array) -> Array:
    """Residual leaving the layer [T, D]."""
    return c.rounding.residual(resid_mid + mlp_out)


def final_norm(c: Context, resid_out: Array) -> Array:
    """Norm before the output matrix [T, D]; its weight is outside the layers."""
    return rms_norm(resid_out, c.tensor("model.norm.weight"), c.config.norm_eps, c.rounding)


OPERATIONS: dict[str, Operation] = {
    f.__name__: f for f in (attn_norm, q, k, v, attn_proj, resid_mid, mlp_norm, mlp_act, mlp_out, resid_out, final_norm)
}

"""The decoder's operations, one function per point; each takes the points listed as its inputs in docs/files.md.

What varies between families is the configuration's: norms after, QK norm, caps, factors, partial RoPE, how a norm is
rounded.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.context import Context, Operation
from precaudit.models.numpy_decoder.experts import experts, mix_experts, router
from precaudit.models.numpy_decoder.operators import (
    activate,
    gated_product,
    linear,
    rms_norm,
    rms_norm_once,
    rope,
    rope_frequencies,
)
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array

Norm = Callable[[Array, Array, float, Rounding, Array | None], Array]


def operations(config: DecoderConfig) -> dict[str, Operation]:
    """Return {point: operation(context, *inputs)} of a configuration, attention aside."""
    return _table(rms_norm_once if config.norm_once else rms_norm)


@cache
def _table(norm: Norm) -> dict[str, Operation]:

    def apply_norm(c: Context, x: Array, name: str, out: Array | None = None) -> Array:
        return norm(x, c.tensor(f"{name}.weight") + c.config.norm_offset, c.config.norm_eps, c.rounding, out)

    def attn_norm(c: Context, resid_in: Array) -> Array:
        """norm(resid_in) [T, D]; resid_in itself where the family's norms come after."""
        name = c.config.norm_names.attn
        return c.rounding.norm(resid_in) if name is None else apply_norm(c, resid_in, name, c.out)

    def rotate_rows(c: Context, x: Array, name: str) -> Array:
        y = _round_projection(c, _project(c, x, f"self_attn.{name}_proj"), f"self_attn.{name}_proj")
        heads = (len(x), -1, c.config.head_dim)
        if c.config.qk_norm == "row":
            y = apply_norm(c, y, f"self_attn.{name}_norm").reshape(heads)
        elif c.config.qk_norm == "head":
            y = apply_norm(c, y.reshape(heads), f"self_attn.{name}_norm")
        frequencies = rope_frequencies(c.config, c.layer, c.lengths)
        return c.rounding.rows(rope(y.reshape(heads), c.positions, frequencies, c.rounding, c.out))

    def q(c: Context, attn_norm: Array) -> Array:
        """Queries after QK norm and RoPE [T, H, K]."""
        return rotate_rows(c, attn_norm, "q")

    def k(c: Context, attn_norm: Array) -> Array:
        """Keys after QK norm and RoPE [T, G, K]."""
        return rotate_rows(c, attn_norm, "k")

    def v(c: Context, attn_norm: Array) -> Array:
        """Values [T, G, K]."""
        return c.rounding.rows(
            _project(c, attn_norm, "self_attn.v_proj").reshape(len(attn_norm), -1, c.config.head_dim)
        )

    def to_residual(c: Context, y: Array, post: str | None) -> Array:
        """Return a projection as it is added to the residual: after a norm, times a factor."""
        if post is not None:
            y = apply_norm(c, c.rounding.biased(y), post, c.out)
        if c.config.residual_scale != 1.0:
            y = c.rounding.biased(y) * c.config.residual_scale
        return c.rounding.proj(y)

    def attn_proj(c: Context, attn_out: Array) -> Array:
        """What attention adds to the residual [T, D]."""
        y = _project(c, attn_out.reshape(len(attn_out), -1), "self_attn.o_proj", "attn_proj")
        return to_residual(c, y, c.config.norm_names.attn_post)

    def resid_mid(c: Context, resid_in: Array, attn_proj: Array) -> Array:
        """Residual after attention [T, D]."""
        return c.rounding.residual(np.add(resid_in, c.rounding.added(attn_proj), out=c.out))

    def mlp_norm(c: Context, resid_mid: Array) -> Array:
        """norm(resid_mid) [T, D]; resid_mid itself where the family's norms come after."""
        name = c.config.norm_names.mlp
        return c.rounding.norm(resid_mid) if name is None else apply_norm(c, resid_mid, name, c.out)

    def gate_out(c: Context, mlp_norm: Array) -> Array:
        """act(gate) [T, F]."""
        return activate(_project(c, mlp_norm, "mlp.gate_proj"), c.config.activation, c.rounding, c.out)

    def mlp_act(c: Context, mlp_norm: Array, gate_out: Array | None = None) -> Array:
        """act(gate) · up [T, F]; of ``gate_out`` where that is made already."""
        up = _project(c, mlp_norm, "mlp.up_proj")
        if gate_out is None:
            return gated_product(_project(c, mlp_norm, "mlp.gate_proj"), up, c.config.activation, c.rounding)
        return c.rounding.mlp_act(np.multiply(gate_out, c.rounding.up(up), out=c.out))

    def mlp_out(c: Context, *inputs: Array) -> Array:
        """What the MLP adds to the residual [T, D]; of mlp_act, with experts of mlp_norm and their weights."""
        y = mix_experts(c, *inputs) if c.config.sparse else _project(c, inputs[0], "mlp.down_proj", "mlp_out")
        return to_residual(c, y, c.config.norm_names.mlp_post)

    def resid_out(c: Context, resid_mid: Array, mlp_out: Array) -> Array:
        """Residual leaving the layer [T, D]."""
        return c.rounding.residual(np.add(resid_mid, c.rounding.added(mlp_out), out=c.out))

    def final_norm(c: Context, resid_out: Array) -> Array:
        """Norm before the output matrix [T, D]; its weight is outside the layers."""
        return apply_norm(c, resid_out, "model.norm", c.out)

    found = (attn_norm, q, k, v, attn_proj, resid_mid, mlp_norm, gate_out, mlp_act, mlp_out, resid_out, final_norm)
    return {f.__name__: f for f in (*found, router, experts)}


def _project(c: Context, x: Array, name: str, point: str = "") -> Array:
    return linear(x, c.tensor(f"{name}.weight"), c.weight(f"{name}.bias"), c.rounding, point)


def _round_projection(c: Context, y: Array, name: str) -> Array:
    """Round a projection before what follows it: after the bias, where it has one."""
    return c.rounding.linear(y) if c.weight(f"{name}.bias") is None else c.rounding.biased(y)

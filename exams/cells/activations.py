"""Activations: another function, another branch, another bound."""

from typing import Any

import jax
import jax.numpy as jnp

from exams.cells.cell import Cell
from exams.cells.rounded import f32, narrow
from exams.cells.switched import InActivation


def gated(function: Any, then: Any = None, up_as: Any = None) -> Any:
    """Return ``then(function(gate) · up_as(up))``; what is not given is as usual."""
    act = None if function is jax.nn.silu else lambda gate, _up: function(gate)
    if then is None and up_as is None:
        return InActivation(act)

    def product(act: Any, _gate: Any, up: Any, a: Any) -> Any:
        y = act * (up if up_as is None else up_as(up)).astype(a.mlp)
        return y if then is None else then(y)

    return InActivation(act, product)


def swapped(cut: Any) -> Any:
    """Gate and up are ``cut`` otherwise out of what was made for them; ``cut`` returns both."""
    return InActivation(
        lambda gate, up: jax.nn.silu(cut(gate, up)[0]), lambda act, gate, up, a: act * cut(gate, up)[1].astype(a.mlp)
    )


def pairs(gate: Any, up: Any) -> Any:
    """Even and odd columns of one product."""
    both = jnp.concatenate([gate, up], axis=-1)
    return both[..., ::2], both[..., 1::2]


def halves(gate: Any, up: Any) -> Any:
    """Columns of one product cut at a shard's width."""
    n = gate.shape[-1] // 2
    return jnp.concatenate([gate[..., :n], up[..., :n]], -1), jnp.concatenate([gate[..., n:], up[..., n:]], -1)


def narrow_sigma(x: Any) -> Any:
    return x * narrow(jax.nn.sigmoid(x))


def narrow_silu(x: Any) -> Any:
    """Every step in bfloat16."""
    x = narrow(x)
    return narrow(x / narrow(1 + narrow(jnp.exp(-x))))


GATE, ACT = ("gate_out",), ("mlp_act",)
ACTIVATIONS = (
    Cell("act: gelu by tanh", "hidden_act not read", GATE, "gelu", gated(jax.nn.gelu)),
    Cell("act: gelu by erf", "hidden_act not read", GATE, "gelu",
         gated(lambda x: jax.nn.gelu(x, approximate=False))),
    Cell("act: quick gelu", "CLIP's activation", GATE, "gelu|1\\.702",
         gated(lambda x: x * jax.nn.sigmoid(1.702 * x))),
    Cell("act: relu", "ReGLU for SwiGLU", GATE, "relu", gated(jax.nn.relu)),
    Cell("act: relu squared", "Primer's activation", GATE, "relu",
         gated(lambda x: jnp.square(jax.nn.relu(x)))),
    Cell("act: sigmoid alone", "GLU for SwiGLU", GATE, "sigmoid|σ", gated(jax.nn.sigmoid)),
    Cell("act: tanh", "another GLU", GATE, "tanh", gated(jnp.tanh)),
    Cell("act: hard swish", "mobile approximation", GATE, "hard", gated(jax.nn.hard_swish)),
    Cell("act: mish", "another activation", GATE, "mish|softplus", gated(jax.nn.mish)),
    Cell("act: omitted", "bilinear GLU", GATE, "omitted|no activation|identity|linear",
         gated(lambda x: x)),
    Cell("act: on up for gate", "branches exchanged", (*GATE, *ACT), "up|exchanged|swapped|branch",
         swapped(lambda gate, up: (up, gate))),
    Cell("act: columns in pairs", "interleaved fused projection", (*GATE, *ACT), "interleav|pairs|columns|order",
         swapped(pairs)),
    Cell("act: second halves exchanged", "fused projection cut at a shard's width", (*GATE, *ACT),
         "halves|half|exchanged|order", swapped(halves)),
    Cell("act: up omitted", "gate alone", ACT, "up.*omitted|omitted|alone|not multiplied",
         gated(jax.nn.silu, up_as=jnp.ones_like)),
    Cell("act: up plus 1", "gpt-oss's (up + 1)", ACT, "\\+ 1|1 \\+|plus (1|one)|1 is added",
         gated(jax.nn.silu, up_as=lambda up: up + 1)),
    Cell("act: up clipped at 1", "gpt-oss's limit", ACT, "clip|clamp|limit|at 1|largest of up.* 1\\b",
         gated(jax.nn.silu, up_as=lambda up: jnp.clip(up, -1, 1))),
    Cell("act: clipped at 0.5", "activation clipping of a quantised export", ACT, "clip|clamp|limit|0\\.5",
         gated(jax.nn.silu, lambda y: jnp.clip(y, -0.5, 0.5))),
    Cell("act: times 1.02", "scale folded in and kept", ACT, "1\\.02",
         gated(jax.nn.silu, lambda y: y.astype(f32) * 1.02)),
    Cell("act: negative results zero", "relu after the product", ACT, "negative|relu|zero|below 0 are 0",
         gated(jax.nn.silu, jax.nn.relu)),
    Cell("act: sigmoid in bfloat16", "σ without an upcast", GATE, "sigm.*bfloat16|σ.*bfloat16|bfloat16.*(σ|sigm)",
         gated(narrow_sigma), equal="bfloat16"),
    Cell("act: silu in bfloat16", "silu without an upcast", GATE, "bfloat16", gated(narrow_silu)),
    Cell("act: a tenth of channels zero", "dropout left on", ACT, "dropout|zero|dropped|channels",
         gated(jax.nn.silu, lambda y: y * (jnp.arange(y.shape[-1]) % 10 != 0).astype(y.dtype))),
    Cell("act: in float8", "fp8 activation stored", ACT, "float8|e4m3|3 bits",
         gated(jax.nn.silu, lambda y: narrow(y, "e4m3"))),
    Cell("act: beta 1.1", "swish with a learned beta", GATE, "1\\.1|β|beta",
         gated(lambda x: x * jax.nn.sigmoid(1.1 * x))),
)  # fmt: skip

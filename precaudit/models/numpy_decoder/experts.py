"""A mixture of experts: router, the choice of experts, and their weighted sum (Shazeer et al. 2017, §2)."""

import numpy as np

from precaudit.models.numpy_decoder.context import Context
from precaudit.models.numpy_decoder.operators import gated_product
from precaudit.numbers.arrays import Array


def router(c: Context, mlp_norm: Array) -> Array:
    """Router logits [T, E]."""
    r = c.rounding
    return r.router(r.dot(mlp_norm, c.tensor("mlp.gate.weight").T))


def experts(c: Context, router: Array) -> Array:
    """Weights of the experts with the largest probabilities [T, E], 0 for the others; of equals the first."""
    r, config = c.rounding, c.config
    e = r.exponential(np.exp(r.shifted(router - router.max(axis=1, keepdims=True))))
    chosen = np.argsort(-router, axis=1, kind="stable")[:, : config.experts_used]
    if r.routing is not None and c.layer is not None:
        chosen = r.routing.choose(c.layer, c.first, router, chosen)
    total = e.sum(axis=1, keepdims=True)
    if config.renormalise:
        total = np.take_along_axis(e, chosen, axis=1).sum(axis=1, keepdims=True)
    out = np.zeros_like(router)
    np.put_along_axis(out, chosen, np.take_along_axis(e, chosen, axis=1) / total, axis=1)
    return r.rows(out)


def mix_experts(c: Context, mlp_norm: Array, weights: Array) -> Array:
    """Σ weight · down(act(gate) · up) over the experts a token uses [T, D]; each looks at its own tokens only."""
    r = c.rounding
    out = np.zeros_like(mlp_norm)
    for e in range(weights.shape[1]):
        rows = np.flatnonzero(weights[:, e])
        if len(rows):
            x = r.operand(mlp_norm[rows])
            gate, up, down = (c.tensor(f"mlp.experts.{e}.{n}_proj.weight") for n in ("gate", "up", "down"))
            act = gated_product(r.dot(x, gate.T), r.dot(x, up.T), c.config.activation, r)
            out[rows] += weights[rows, e : e + 1] * r.linear(r.product_of("mlp_out")(r.operand(act), down.T))
    return out

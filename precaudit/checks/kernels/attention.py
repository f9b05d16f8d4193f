"""Plain attention, softmax(scale · q kᵀ) v over the keys a query sees: what kernels of attention are held against."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOWEST = -1e30  # a finite maximum of nothing: −∞ minus −∞ would be NaN
NO_KEY, UNSEEN = "rows that see no key", "an unseen NaN"


def float32_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float = 1.0) -> Any:
    """Return attention [..., T, D] in the format of ``q``, computed in float32.

    ``q`` [..., T, D]; ``k``, ``v`` [..., S, D]; ``seen`` [..., T, S] truth values. What a query does not see adds
    nothing to outputs or gradients, a NaN neither: keys and values are selected before they are multiplied. A query
    that sees no key gives 0, the sum over none.
    """
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    keys, values = (jnp.where(seen[..., None], x[..., None, :, :], 0.0) for x in (k32, v32))
    s = jnp.where(seen, scale * (q32[..., :, None, :] * keys).sum(-1), -jnp.inf)
    most = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), LOWEST))
    p = jnp.exp(s - most)
    total = p.sum(-1, keepdims=True)
    p = p / (total + (total == 0.0).astype(jnp.float32))
    return (p[..., None] * values).sum(-2).astype(q.dtype)


def causal(queries: int, keys: int) -> Any:
    """Return what queries [T] see of keys [S]: those that do not come after them."""
    return np.arange(queries)[:, None] >= np.arange(keys)[None, :]


def same_segment(of_queries: jax.Array, of_keys: jax.Array) -> Any:
    """Return truth values [..., T, S]: whether query and key are of one segment."""
    return of_queries[..., :, None] == of_keys[..., None, :]


def draws(seed: int, dtype: str, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return normal arrays of some shapes in a format."""
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)


def with_interpreter(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Pallas TPU kernel that is run in interpret mode where there is no TPU, in both passes.

    Its products are then a CPU's, float32 where a TPU would make passes in bfloat16.
    """

    def run(*arrays: Any) -> Any:
        return kernel(*arrays) if jax.default_backend() == "tpu" else _run_interpreted(kernel, *arrays)

    return run


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_interpreted(kernel: Callable[..., Any], *arrays: Any) -> Any:
    with _mode():
        return kernel(*arrays)


def _forward(kernel: Callable[..., Any], *arrays: Any) -> Any:
    with _mode():
        return jax.vjp(kernel, *arrays)


def _backward(_kernel: Callable[..., Any], pull: Any, cotangents: Any) -> Any:
    with _mode():
        return pull(cotangents)


_run_interpreted.defvjp(_forward, _backward)


def _mode() -> Any:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())

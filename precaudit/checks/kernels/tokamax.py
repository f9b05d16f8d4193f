"""Tokamax' attention, causal, keys masked: ``tokamax.dot_product_attention``, as it chooses for the device.

Formula: softmax(q kᵀ / √D) v over the keys that a query sees. The kernels are Tokamax' own (Apache-2.0), wrapped. An
optional target: ``pip install tokamax``, of 0.0.17, needs Python 3.12 and JAX 0.11.1.
"""

import importlib.util
from typing import Any

from precaudit.checks.kernels import sdpa

ARGNUMS = (0, 1, 2)


def why_not_here() -> str | None:
    """Return why it does not run here; None where it does."""
    if importlib.util.find_spec("tokamax") is not None:
        return None
    return "Tokamax needs Python 3.12 or newer: pip install tokamax"


def kernel(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Return attention [B, T, H, D] of ``q`` [B, T, H, D] and ``k``, ``v`` [B, S, H, D]; ``mask`` [B, S], of keys."""
    import tokamax

    return tokamax.dot_product_attention(q, k, v, mask=mask[:, None, None, :], is_causal=True)


reference = sdpa.reference
inputs = sdpa.inputs

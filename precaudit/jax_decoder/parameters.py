"""Checkpoint tensors as the decoder's parameters: layers stacked on a leading axis, in the format they are used in."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from precaudit.configs import DecoderConfig, expected_tensors
from precaudit.formats import Array, as_format, wider
from precaudit.jax_decoder.families import family
from precaudit.policies import Policy

Parameters = dict[str, Any]


def parameters(config: DecoderConfig, read: Callable[[str], Array], activations: Any, device: Any) -> Parameters:
    """Return ``{"embed", "layers": {name: [L, …]}, "final_norm", "lm_head"}`` on ``device``.

    ``read`` returns a tensor by checkpoint name. Tensors narrower than the activations are widened, exactly.
    """

    def load(array: Array) -> jax.Array:
        wide = wider(array.dtype, activations)
        return jax.device_put(np.asarray(array).astype(wide, copy=False), device)

    expected = expected_tensors(config)
    layers = {}
    for ours, theirs in family(config.family).layer_tensors.items():
        if f"model.layers.0.{theirs}" in expected:
            layers[ours] = load(np.stack([read(f"model.layers.{i}.{theirs}") for i in range(config.layers)]))
    params: Parameters = {
        "embed": load(read("model.embed_tokens.weight")),
        "layers": layers,
        "final_norm": load(read("model.norm.weight")),
    }
    if not config.tied:
        params["lm_head"] = load(read("lm_head.weight"))
    return params


def rope_tables(config: DecoderConfig, positions: int, policy: Policy) -> tuple[Array, Array]:
    """Return cos and sin [positions, K/2]: angles p · theta^(−2i/K) in FP64, rounded once to the policy's format."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    angles = np.arange(positions, dtype=np.float64)[:, None] * config.rope_theta**-half
    return as_format(np.cos(angles), policy.rope), as_format(np.sin(angles), policy.rope)

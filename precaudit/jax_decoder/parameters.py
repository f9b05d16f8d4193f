"""Checkpoint tensors as the decoder's parameters: layers stacked on a leading axis, in the format they are used in."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from precaudit.arrays import Array, as_format, release, wider
from precaudit.configs import EMBEDDING, HEAD, DecoderConfig, RopeScaling, expected_tensors
from precaudit.jax_decoder.family import EXPERT_TENSORS, layer_tensors
from precaudit.jax_decoder.integers import IntegerMatrix
from precaudit.policies import Policy

Parameters = dict[str, Any]
Integers = Callable[[str], tuple[Array, Array] | None]
ALIGNED = 64  # bytes, for which XLA asks on a CPU


def parameters(
    config: DecoderConfig, read: Callable[[str], Array], integers: Integers, activations: Any, device: Any
) -> Parameters:
    """Return ``{"embed", "layers": {name: [L, …]}, "final_norm", "lm_head"}`` on ``device``.

    ``read`` returns a tensor by checkpoint name, ``integers`` its integers and scales where it is held so. Tensors
    narrower than the activations are widened, exactly.
    """

    def load(names: Any) -> Any:
        flat = [names] if isinstance(names, str) else np.ravel(names).tolist()
        if integers(flat[0]) is not None:
            return _integers(flat, np.shape(names), integers, expected[flat[0]][1], device)
        first = read(flat[0])
        out = aligned((len(flat), *first.shape), wider(first.dtype, activations))
        for i, name in enumerate(flat):
            part = read(name)
            out[i] = part
            release(part)
        shape = np.shape(names) + first.shape
        return jax.device_put(out.reshape(shape), device).block_until_ready()

    expected = expected_tensors(config)
    layers = {}
    for ours, theirs in layer_tensors(config).items():
        if f"model.layers.0.{theirs}" in expected:
            layers[ours] = load([f"model.layers.{i}.{theirs}" for i in range(config.layers)])
    for ours, theirs in EXPERT_TENSORS.items() if config.sparse else ():
        layers[ours] = load(
            [
                [f"model.layers.{i}.mlp.experts.{e}.{theirs}.weight" for e in range(config.experts)]
                for i in range(config.layers)
            ]
        )
    params: Parameters = {
        "embed": load(EMBEDDING),
        "layers": layers,
        "final_norm": load("model.norm.weight"),
    }
    if not config.tied:
        params["lm_head"] = load(HEAD)
    return params


def _integers(names: list[str], shape: tuple[int, ...], integers: Integers, width: int, device: Any) -> IntegerMatrix:
    """Return tensors as one IntegerMatrix with ``shape`` in front."""
    pairs = [found for name in names if (found := integers(name)) is not None]
    values, scales = (np.stack(parts) for parts in zip(*pairs, strict=True))
    held, beside = (jax.device_put(x.reshape(shape + x.shape[1:]), device) for x in (values, scales))
    return IntegerMatrix(held.block_until_ready(), beside.block_until_ready(), width)


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array, its values not set, that begins where a CPU device takes it as it is, without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


def rope_tables(
    config: DecoderConfig, positions: int, policy: Policy, lengths: Array | None = None
) -> tuple[list[Array], list[Array]]:
    """Return cos and sin [positions, R/2] of full layers, and of windowed ones where they have a RoPE of their own.

    Angles in FP64, rounded once to the policy's format. ``lengths`` [B, positions]: how long each sequence was when a
    row of it was turned, where that matters; the tables of scaled RoPE are [B, positions, R/2] then.
    """
    bases = [(config.rope_theta, config.rope_scaling)]
    if config.local_rope_theta is not None:
        bases.append((config.local_rope_theta, None))
    cos, sin = [], []
    for theta, scaling in bases:
        speed, factor = frequencies(theta, config.turned, scaling, lengths)
        angles = np.arange(positions, dtype=np.float64)[:, None] * speed
        cos.append(as_format(np.cos(angles) * factor, policy.rope))
        sin.append(as_format(np.sin(angles) * factor, policy.rope))
    return cos, sin


def frequencies(
    theta: float, turned: int, scaling: RopeScaling | None, lengths: Array | None = None
) -> tuple[Array, float]:
    """Return RoPE's angle per position [turned/2] and the factor on cos and sin, stretched as ``scaling`` says.

    With ``lengths`` [...] the angles are [..., turned/2] where the scaling depends on them.
    """
    exponents = np.arange(0, turned, 2, dtype=np.float64) / turned
    speed = theta**-exponents
    if scaling is None:
        return speed, 1.0
    if scaling.kind == "linear":
        return speed / scaling.factor, 1.0
    if scaling.kind == "longrope":
        short, long = (np.asarray(d, np.float64) for d in (scaling.divisors, scaling.long))
        if lengths is None:
            return speed / short, scaling.attention
        return np.stack([speed / short, speed / long])[(lengths > scaling.original).astype(int)], scaling.attention
    if scaling.kind == "dynamic":
        if lengths is None:
            return speed, 1.0
        ratio = scaling.factor * np.maximum(lengths, scaling.original) / scaling.original
        bases = theta * (ratio - (scaling.factor - 1)) ** (turned / (turned - 2))
        return bases[..., None] ** -exponents, 1.0
    slow = speed / scaling.factor
    if scaling.kind == "llama3":
        length = 2 * np.pi / speed
        smooth = (scaling.original / length - scaling.low) / (scaling.high - scaling.low)
        mixed = (1 - smooth) * slow + smooth * speed
        mixed = np.where(length > scaling.original / scaling.low, slow, mixed)
        return np.where(length < scaling.original / scaling.high, speed, mixed), 1.0

    def dimension(rotations: float) -> float:
        return turned * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    last = last + 0.001 if first == last else last
    stretched = np.clip((np.arange(turned // 2) - first) / (last - first), 0, 1)
    return slow * stretched + speed * (1 - stretched), scaling.attention

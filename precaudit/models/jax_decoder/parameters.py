"""Checkpoint tensors as the decoder's parameters: layers stacked on a leading axis, in the format they are used in."""

import math
from collections.abc import Callable, Collection
from functools import partial, reduce
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from precaudit.models.configs import EMBEDDING, HEAD, DecoderConfig, RopeScaling, model_tensors
from precaudit.models.jax_decoder.family import EXPERT_TENSORS, fused_tensors, layer_tensors
from precaudit.models.jax_decoder.integers import IntegerMatrix
from precaudit.numbers.arrays import Array, as_format, common_dtype, release
from precaudit.schema.policies import Policy

Parameters = dict[str, Any]
Integers = Callable[[str], tuple[Array, Array] | None]
Place = Callable[[str, str, tuple[int, ...]], Any]  # of a name, its field and its shape
ALIGNED = 64  # bytes, for which XLA asks on a CPU


def parameters(
    config: DecoderConfig,
    read: Callable[[str, slice], Array],
    integers: Integers,
    activations: DTypeLike,
    place: Place,
    fused: str = "none",
) -> Parameters:
    """Return ``{"embed", "layers": {name: [L, …]}, "final_norm", "lm_head"}`` where ``place`` says.

    ``read`` returns rows of a tensor by checkpoint name, ``integers`` its integers and scales where it is held so.
    Tensors narrower than the activations are widened, exactly. ``fused``: the policy's, which tensors are put together.
    ``place`` returns a device, or how an array of a name and a shape is cut over several: each part is read by itself.
    """
    expected = model_tensors(config)

    def load(ours: str, names: Array) -> Any:
        """Return tensors [..., rows, …] by names [..., P]; the rows of P tensors are one after another."""
        each = names.reshape(-1, names.shape[-1]).tolist()
        if integers(each[0][0]) is not None:
            width = expected[each[0][0]][1]
            return _integers(each, names.shape[:-1], integers, width, partial(place, ours))
        first = [read(name, slice(0, 0)) for name in each[0]]
        dtype = reduce(common_dtype, [part.dtype for part in first], activations)
        edges = [0, *np.cumsum([expected[name][0] for name in each[0]]).tolist()]
        leading, inner = names.shape[:-1], first[0].shape[1:]

        def read_part(rows: slice, columns: tuple[slice, ...]) -> Array:
            """Return some rows and columns of every layer."""
            low, high, _ = rows.indices(edges[-1])
            sizes = (len(range(n)[some]) for n, some in zip(inner, columns, strict=True))
            out = aligned_empty((len(each), high - low, *sizes), dtype)
            for i, parts in enumerate(each):
                for start, end, name in zip(edges, edges[1:], parts, strict=False):
                    a, b = max(start, low), min(end, high)
                    if a < b:
                        part = read(name, slice(a - start, b - start))
                        out[i, a - low : b - low] = part[(slice(None), *columns)]
                        release(part)
            return out.reshape(leading + out.shape[1:])

        shape = (*leading, edges[-1], *inner)
        where, whole = place(ours, "", shape), (slice(None),) * len(inner)
        if not isinstance(where, jax.sharding.NamedSharding):
            return jax.device_put(read_part(slice(None), whole), where).block_until_ready()
        at = len(leading)  # no layer is apart from others
        made = jax.make_array_from_callback(shape, where, lambda index: read_part(index[at], index[at + 1 :]))
        return made.block_until_ready()

    params: Parameters = {
        "embed": load("embed", np.array([EMBEDDING])),
        "layers": {ours: load(ours, names) for ours, names in _names(config, expected, fused).items()},
        "final_norm": load("final_norm", np.array(["model.norm.weight"])),
    }
    if not config.tied:
        params["lm_head"] = load("lm_head", np.array([HEAD]))
    return params


def _names(config: DecoderConfig, expected: Collection[str], fused: str) -> dict[str, Array]:
    """Return checkpoint names [L, P] of a layer's tensors, [L, E, P] of its experts', by this decoder's names."""
    found, layers = {}, range(config.layers)
    for ours, theirs in layer_tensors(config).items():
        if f"model.layers.0.{theirs}" in expected:
            found[ours] = np.array([[f"model.layers.{i}.{theirs}"] for i in layers])
    for ours, theirs in EXPERT_TENSORS.items() if config.sparse else ():
        name, experts = f"model.layers.{{}}.mlp.experts.{{}}.{theirs}.weight", range(config.experts)
        found[ours] = np.array([[[name.format(i, e)] for e in experts] for i in layers])
    for name, parts in fused_tensors(fused).items():
        if found.keys() >= set(parts):
            found[name] = np.concatenate([found.pop(part) for part in parts], axis=-1)
    return found


def _integers(
    names: list[list[str]], shape: tuple[int, ...], integers: Integers, width: int, place: Callable[..., Any]
) -> IntegerMatrix:
    """Return tensors as one IntegerMatrix with ``shape`` in front; the rows of each list's are one after another."""
    made = []
    for parts in names:
        pairs = [found for name in parts if (found := integers(name)) is not None]
        made.append([np.concatenate(x, axis=1) for x in zip(*pairs, strict=True)])
    values, scales = (np.stack(x) for x in zip(*made, strict=True))
    whole = {"values": values.reshape(shape + values.shape[1:]), "scales": scales.reshape(shape + scales.shape[1:])}
    held, beside = (jax.device_put(x, place(field, x.shape)) for field, x in whole.items())
    return IntegerMatrix(held.block_until_ready(), beside.block_until_ready(), width)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
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
        speed, factor = frequencies(theta, config.rotary_size, scaling, lengths)
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

"""Operations that move elements: layouts, slices, gathers."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.tpu.calls import InstructionCall, alike, dtype_of
from precaudit.interpreters.tpu.hlo import ArrayType


def broadcast(call: InstructionCall) -> Any:
    """Broadcast; the operand's dimensions may come in any order."""
    axes = call.ints("dimensions")
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    return lax.broadcast_in_dim(lax.transpose(call.inputs[0], order), call.shape.dims, sorted(axes))


def reshape(call: InstructionCall) -> Any:
    """Reshape. Raises ValueError for another number of elements."""
    return _reshape(call.inputs[0], call.shape.dims)


def _reshape(x: jax.Array, dims: Sequence[int]) -> Any:
    if x.size != math.prod(dims):
        raise ValueError(f"{list(x.shape)} made {list(dims)}")
    return lax.reshape(x, dims)


SUMMED = "all-reduce"


def transpose(call: InstructionCall) -> Any:
    """Transpose."""
    return permute(call.inputs[0], call.ints("dimensions"))


def permute(x: jax.Array, order: Sequence[int]) -> Any:
    """Return x with its dimensions in an order; those of size 1 and those that stay side by side are not told apart.

    Of a matrix that a product reads that is one transposition, which XLA:CPU makes none of: the product reads it so.
    """
    real = [i for i in range(x.ndim) if x.shape[i] != 1]
    groups: list[list[int]] = []
    for i in order:
        if x.shape[i] == 1:
            continue
        if groups and real.index(i) == real.index(groups[-1][-1]) + 1:
            groups[-1].append(i)
        else:
            groups.append([i])
    before = sorted(groups)
    merged = lax.reshape(x, [math.prod(x.shape[i] for i in group) for group in before])
    moved = lax.transpose(merged, [before.index(group) for group in groups])
    return lax.reshape(moved, [x.shape[i] for i in order])


def bitcast(call: InstructionCall) -> Any:
    """Read the same elements in the order of another layout, or the same bits as another format of their width.

    Arrays of other sizes in the same tiles are the same storage: what the sizes leave out of a tile is padding.
    """
    x, source = call.inputs[0], call.declared_types[0]
    if not isinstance(source, ArrayType):
        raise ValueError("a bitcast of a tuple")
    dims = call.shape.dims
    slowest = call.shape.layout[::-1]
    physical, asked = permute(x, source.layout[::-1]), tuple(dims[i] for i in slowest)
    line = lax.reshape(physical, (x.size,))
    if dtype_of(source).itemsize != call.dtype.itemsize:
        line = _packed_for_sum(call, line.astype(dtype_of(source)))
    elif source.dtype != call.shape.dtype:
        line = _same_bits(line.astype(dtype_of(source)), call.dtype)
    elif x.size != math.prod(dims) and source.tile and source.tile == call.shape.tile:
        line = _of_tiles(_tiles(physical, source.tile), asked, source.tile)
    return permute(_reshape(line, asked), sorted(range(len(slowest)), key=lambda i: slowest[i]))


def _tiles(x: jax.Array, tile: Sequence[int]) -> Any:
    """Return x's elements as they are stored, in tiles of the last dimensions, with zeros as padding."""
    lead = x.ndim - len(tile)
    padded = jnp.pad(x, [(0, 0)] * lead + [(0, -n % t) for n, t in zip(x.shape[lead:], tile, strict=True)])
    counts = [m for n, t in zip(padded.shape[lead:], tile, strict=True) for m in (n // t, t)]
    order = [*range(lead), *range(lead, lead + len(counts), 2), *range(lead + 1, lead + len(counts), 2)]
    return lax.reshape(lax.transpose(lax.reshape(padded, (*x.shape[:lead], *counts)), order), (padded.size,))


def _of_tiles(line: jax.Array, dims: Sequence[int], tile: Sequence[int]) -> Any:
    """Return the array of these sizes that is stored as ``line``. Raises ValueError where it takes other tiles."""
    lead = len(dims) - len(tile)
    counts = [-(-n // t) for n, t in zip(dims[lead:], tile, strict=True)]
    stored = _reshape(line, (*dims[:lead], *counts, *tile))
    order = [*range(lead), *(i for k in range(len(tile)) for i in (lead + k, lead + len(tile) + k))]
    whole = [n * t for n, t in zip(counts, tile, strict=True)]
    return lax.slice(lax.reshape(lax.transpose(stored, order), (*dims[:lead], *whole)), [0] * len(dims), dims)


def _same_bits(x: jax.Array, dtype: np.dtype[Any]) -> Any:
    """Return x's bits as another format of its width."""
    if bool in (x.dtype, dtype):
        return x.astype(dtype)
    return lax.bitcast_convert_type(x, dtype)


def _packed_for_sum(call: InstructionCall, line: jax.Array) -> Any:
    """Return elements two in a word, or such words' elements: what chips sum that have no words so narrow.

    Which two are in a word is the tiles' choice; a sum over chips, element by element, does not depend on it. Raises
    ValueError where something else reads the words, or a sum's are read as another array than it was made of.
    """
    known, mine = call.within.instructions, call.instruction
    count, narrows = math.prod(call.shape.dims), call.dtype.itemsize < line.dtype.itemsize
    before = known[mine.operands[0]]
    others = [before] if narrows else [x for x in known.values() if mine.name in x.operands]
    if not others or not all(x.opcode.startswith(SUMMED) for x in others):
        raise ValueError(f"a bitcast from {line.dtype} to {call.dtype}, of another width")
    if not narrows:
        padding = count * (call.dtype.itemsize // line.dtype.itemsize) - line.size
        return lax.bitcast_convert_type(jnp.pad(line, (0, padding)).reshape(count, -1), call.dtype)
    packed = known[before.operands[0]]
    whole = known[packed.operands[0]].type if packed.opcode == "bitcast" else None
    if not isinstance(whole, ArrayType) or _physical(whole) != _physical(call.shape):
        raise ValueError(f"a sum in {line.dtype} is read as another array than it was made of")
    return lax.bitcast_convert_type(line, call.dtype).reshape(-1)[:count]


def _physical(kind: ArrayType) -> list[int]:
    """Return the dimensions of an array from the slowest to the fastest, without those of size 1."""
    return [kind.dims[i] for i in kind.layout[::-1] if kind.dims[i] != 1]


def strided_slice(call: InstructionCall) -> Any:
    """Slice, by steps."""
    found = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", call.instruction.attributes.get("slice", ""))
    starts, limits, steps = ([int(x[i] or 1) for x in found] for i in range(3))
    return lax.slice(call.inputs[0], starts, limits, steps)


def _starts(indices: Sequence[Any]) -> list[Any]:
    return [i.astype(np.int32) for i in indices]


def dynamic_slice(call: InstructionCall) -> Any:
    """Slice from where indices say; what reaches outside is moved in."""
    starts = _starts(call.inputs[1:])
    return lax.dynamic_slice(call.inputs[0], starts, call.ints("dynamic_slice_sizes"), allow_negative_indices=False)


def dynamic_update_slice(call: InstructionCall) -> Any:
    """Replace a slice; what reaches outside is moved in."""
    x, update = alike(*call.inputs[:2])
    return lax.dynamic_update_slice(x, update, _starts(call.inputs[2:]), allow_negative_indices=False)


def pad(call: InstructionCall) -> Any:
    """Pad, cut and spread with a value."""
    written = call.instruction.attributes.get("padding", "")
    pads = [(*map(int, x.split("_")), 0)[:3] for x in written.split("x") if x]
    return lax.pad(*alike(*call.inputs), pads)


def concatenate(call: InstructionCall) -> Any:
    """Concatenate."""
    return lax.concatenate(alike(*call.inputs), call.ints("dimensions")[0])


def reverse(call: InstructionCall) -> Any:
    """Reverse."""
    return lax.rev(call.inputs[0], call.ints("dimensions"))


def vectors(call: InstructionCall) -> Any:
    """Return indices with the vectors they are made of along the last axis."""
    indices, axis = call.inputs[1], call.ints("index_vector_dim")[0]
    return lax.expand_dims(indices, [axis]) if axis == indices.ndim else jnp.moveaxis(indices, axis, -1)


def gather(call: InstructionCall) -> Any:
    """Gather; what lies outside is clamped into the operand."""
    names = (
        "offset_dims",
        "collapsed_slice_dims",
        "start_index_map",
        "operand_batching_dims",
        "start_indices_batching_dims",
    )
    dims = lax.GatherDimensionNumbers(*map(call.ints, names))
    return lax.gather(call.inputs[0], vectors(call), dims, call.ints("slice_sizes"), mode="clip")

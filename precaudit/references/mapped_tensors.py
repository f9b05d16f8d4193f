"""A family's tensors by a names map: parts of a program's parameters, their axes as the tensors have them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.models.checkpoints.names import Layout, arrange_entry, entry_of, entry_values, layer_axis
from precaudit.numbers.arrays import Array

BLOCK = re.compile(r"(?P<array>.+)\[(?P<block>[\d:, ]+)\]")
STEP = re.compile(r"(?P<first>\d*):(?P<end>\d*)(:(?P<step>[1-9]\d*))?|(?P<one>\d+)")


class Paths(dict[str, str]):
    """Paths of arrays; blocks of them, ``w[1]`` or ``w[:, 0:64]``, are there, too."""

    def __contains__(self, path: object) -> bool:
        """Whether a path's array is there."""
        return super().__contains__(split_path(str(path))[0])


def split_path(path: str) -> tuple[str, tuple[int | slice, ...]]:
    """Return an array's path, and which block of it is meant; raises UserError for what is no block."""
    found = BLOCK.fullmatch(path)
    if found is None:
        return path, ()
    steps = [STEP.fullmatch(text.strip()) for text in found["block"].split(",")]
    if not all(steps):
        raise UserError(f"names map: {path!r}: a block is of numbers and ranges: w[0], w[:, 0:64], w[0::2]")
    block = (
        int(m["one"]) if m["one"] else slice(*(int(m[k]) if m[k] else None for k in ("first", "end", "step")))
        for m in steps
        if m
    )
    return found["array"], tuple(block)


def mapped_tensors(
    leaves: Mapping[str, Any], names: Layout, expected: Mapping[str, tuple[int, ...]], where: str
) -> Callable[[str], Array]:
    """Return what reads a tensor by its Hugging Face name, each of the shape that is expected.

    Raises UserError where one does not fit, and for an array that is no tensor's and not passed over by name.
    """
    paths = Paths((path, path) for path in leaves)
    entries = {name: entry_of(name, names, paths, where) for name in expected}
    used = {split_path(path)[0] for entry, _ in entries.values() for path in entry.paths}
    below = f"{names.prefix}/" if names.prefix else ""
    passed = tuple(below + path for path in names.ignore)
    for path in leaves:
        if path not in used and not (passed and path.startswith(passed)):
            raise UserError(
                f"{where}: parameter {path!r} is not in the map, so the program may not be that model; if it is, "
                f"ignore = [{path.removeprefix(below)!r}]"
            )

    def stored(name: str) -> list[Array]:
        entry, layer = entries[name]
        return [_block(leaves, path, layer, layer_axis(entry) if entry.axes else None, where) for path in entry.paths]

    for name, shape in expected.items():
        if (found := arrange_entry(entries[name][0], stored(name), name).shape) != shape:
            given = entries[name][0].paths
            raise UserError(
                f"{where}: {name!r} comes out as {list(found)}, expected {list(shape)}; give its axes: "
                f"{{ path = {(given[0] if len(given) == 1 else list(given))!r}, axes = 'd h k -> (h k) d' }}"
            )
    return lambda name: entry_values(entries[name][0], stored(name), name)


def _block(leaves: Mapping[str, Any], given: str, layer: int, axis: int | None, where: str) -> Array:
    """Return the block that a path means, of its layer where an axis is the layers'; raises UserError."""
    path, block = split_path(given)
    x = np.asarray(leaves[path])
    try:
        x = x[block]
    except IndexError:
        raise UserError(f"{where}: {given!r}: {path!r} is {list(x.shape)}") from None
    if axis is not None and axis < x.ndim and layer >= x.shape[axis]:
        raise UserError(f"{where}: {given!r} {list(x.shape)} has no layer {layer}")
    return x if axis is None else x.take(layer, axis=axis)


def parameter_leaves(params: object) -> dict[str, Any]:
    """Return a tree's arrays by their paths; what a variable of NNX calls its value is left out of them."""
    import jax

    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
        if len(path) > 1 and getattr(path[-1], "name", None) == "value":
            parts.pop()
        found["/".join(parts)] = x
    return found

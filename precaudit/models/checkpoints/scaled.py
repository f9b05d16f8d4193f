"""float8 tensors with scales beside them, read as their product rounded once to bfloat16.

``X.weight_scale_inv`` or ``X.weight_scale`` is multiplied by: one number, one a row [out, 1], or one a block of the
size config.json names (quantization_config.weight_block_size) [⌈out/b₀⌉, ⌈in/b₁⌉].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from precaudit.errors import UserError
from precaudit.models.checkpoints.tensors import ALL, Tensors, read_rows, row_blocks
from precaudit.numbers.arrays import Array, as_format, widen
from precaudit.numbers.formats import FORMATS

SUFFIXES = ("_scale_inv", "_scale")
MODEL_FORMAT = "bfloat16"


@dataclass(frozen=True)
class ScaledTensors:
    """Tensors underneath; ``scales`` maps a tensor to the name of its scale; ``block``: rows and columns of a block."""

    inner: Tensors
    scales: Mapping[str, str]
    block: tuple[int, ...] | None

    @classmethod
    def of(cls, inner: Tensors, block: tuple[int, ...] | None, where: str) -> "ScaledTensors | Tensors":
        """Return the tensors with scales taken in; as they are where there are none.

        Raises UserError for a scale whose shape does not fit its tensor.
        """
        shapes, scales = inner.shapes(), {}
        for name in shapes:
            suffix = next((s for s in SUFFIXES if name.endswith(f".weight{s}")), None)
            if suffix is not None and name.removesuffix(suffix) in shapes:
                scales[name.removesuffix(suffix)] = name
        for name, scale in scales.items():
            if _blocks(shapes[name], shapes[scale], block) is None:
                raise UserError(
                    f"{where}: tensor {scale!r} {list(shapes[scale])} is no scale of {name!r} {list(shapes[name])}"
                )
        return cls(inner, scales, block) if scales else inner

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape; scales are left out, those of activations too: weights alone are quantised here."""
        hidden = set(self.scales.values())
        shapes = self.inner.shapes().items()
        return {name: shape for name, shape in shapes if name not in hidden and not name.endswith(".input_scale")}

    def read_tensor(self, name: str) -> Array:
        """Return the tensor, times its scale and rounded to bfloat16 where it has one."""
        if name not in self.scales:
            return self.inner.read_tensor(name)
        out = np.empty(self.inner.shapes()[name], FORMATS[MODEL_FORMAT].dtype)
        for rows in row_blocks(out.shape):
            out[rows] = self._product(name, rows).astype(np.float32).astype(out.dtype)
        return out

    def read_rows(self, name: str, rows: slice) -> Array:
        """Return some rows of a tensor; one that has a scale is read whole."""
        return self.read_tensor(name)[rows] if name in self.scales else read_rows(self.inner, name, rows)

    def original(self, name: str, rows: slice = ALL) -> Array | None:
        """Return the product in FP64 where rounding it changed any element."""
        if name not in self.scales:
            return self.inner.original(name, rows)
        x = self._product(name, rows)
        return x if (widen(as_format(x, MODEL_FORMAT)) != x).any() else None

    def _product(self, name: str, rows: slice) -> Array:
        stored, scale = self.inner.read_tensor(name), widen(self.inner.read_tensor(self.scales[name]))
        if prod(scale.shape) == 1:
            return np.asarray(widen(stored[rows]) * scale.reshape(()))
        blocks = _blocks(stored.shape, scale.shape, self.block)
        assert blocks is not None
        for axis, (block, n) in enumerate(zip(blocks, stored.shape, strict=True)):
            at = np.arange(n)[rows if axis == 0 else ALL]
            scale = np.take(scale, at // block, axis=axis)
        return np.asarray(widen(stored[rows]) * scale)


def _blocks(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return how many elements share a scale along each axis; None where the scale's shape fits nothing known."""
    if prod(scale) == 1:
        return shape
    if len(shape) != len(scale):
        return None
    if block is not None and len(block) == len(shape) and _counts(shape, block) == scale:
        return block
    if all(s in (1, n) for n, s in zip(shape, scale, strict=True)):
        return tuple(n // s for n, s in zip(shape, scale, strict=True))
    return None


def _counts(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))

"""Projections as integers with scales: the model a policy's ``weights`` makes of a checkpoint's, once."""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from precaudit.models.checkpoints.tensors import ALL, Tensors, row_blocks
from precaudit.models.configs import EMBEDDING, HEAD
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import Integers
from precaudit.numbers.integers import dequantise, quantise

PROJECTIONS = "_proj.weight"  # of attention, MLP and experts; routers, norms and biases stay as they are


@dataclass(frozen=True)
class Quantised:
    """Tensors whose projections are integers; ``embeddings``: embedding and head are, too."""

    inner: Tensors
    to: Integers
    embeddings: bool

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors underneath."""
        return self.inner.shapes()

    def read_tensor(self, name: str) -> Array:
        """Return a tensor; of integers scale · integer in FP64, which no narrower format holds."""
        if not self.holds(name):
            return self.inner.read_tensor(name)
        rows, width = self.inner.shapes()[name]
        out = np.empty((rows, width))
        for some in row_blocks(out.shape):
            out[some] = dequantise(*self._scaled_rows(name, some), width)
        return out

    def original(self, name: str, rows: slice = ALL) -> Array | None:
        """Return FP64 values of ``rows`` before they were integers."""
        return self._before(name, rows) if self.holds(name) else self.inner.original(name, rows)

    def integers(self, name: str) -> tuple[Array, Array] | None:
        """Return a tensor's integers [G, N, n], int8 or int4, and scales float32 [G, N]; None where it has none."""
        if not self.holds(name):
            return None
        parts = [self._scaled_rows(name, some) for some in row_blocks(self.inner.shapes()[name])]
        values, scales = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        return values.astype(np.int8 if self.to.bits > 4 else ml_dtypes.int4), scales

    def holds(self, name: str) -> bool:
        """Whether a tensor is held as integers."""
        return name.endswith(PROJECTIONS) or (self.embeddings and name in (EMBEDDING, HEAD))

    def _scaled_rows(self, name: str, rows: slice) -> tuple[Array, Array]:
        return quantise(self._before(name, rows), self.to)

    def _before(self, name: str, rows: slice) -> Array:
        before = self.inner.original(name, rows)
        return widen(self.inner.read_tensor(name)[rows]) if before is None else before

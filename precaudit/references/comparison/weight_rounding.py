"""Kind ``weights``: what rounding the weights to the model's format did, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from precaudit.models.checkpoints import Checkpoint
from precaudit.models.checkpoints.tensors import row_blocks
from precaudit.models.configs import model_tensors
from precaudit.numbers.arrays import Array, widen
from precaudit.schema.metrics.sizes import ratio
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import ErrorRecord, WeightError


@dataclass
class _Sums:
    """Sums over blocks of a tensor's rows: sizes and squares of what rounding did, squares of what was before."""

    n: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    error: float = 0.0
    before: float = 0.0
    rounded: bool = False

    def add(self, used: Array, before: Array | None) -> None:
        self.rounded |= before is not None
        before = used if before is None else before
        size = np.abs(used - before)
        self.n += size.size
        self.absolute += float(size.sum())
        self.largest = float(np.maximum(self.largest, size.max(initial=0.0)))
        self.error += float((size * size).sum())
        self.before += float((before * before).sum())


def weight_errors(checkpoint: Checkpoint, layers: tuple[int, ...]) -> Iterator[ErrorRecord]:
    """Yield a record for every tensor that was rounded (of the chosen layers, and those outside layers)."""
    for name, shape in model_tensors(checkpoint.config).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if layer is not None and layer not in layers:
            continue
        total, used = _Sums(), checkpoint.tensors.read_tensor(name)
        for rows in row_blocks(shape):
            total.add(widen(used[rows]), checkpoint.tensors.original(name, rows))
        if not total.rounded:
            continue
        numbers: dict[str, Any] = {
            "n": total.n,
            "mae": json_number(total.absolute / total.n),
            "max_diff": json_number(total.largest),
            "rel_l2": json_number(ratio(sqrt(total.error), sqrt(total.before))),
        }
        yield WeightError(
            prompt="",
            phase="",
            step=0,
            layer=layer,
            point=name,
            candidate="model",
            reference="original",
            **numbers,
        )

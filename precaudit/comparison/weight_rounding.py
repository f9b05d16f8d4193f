"""Kind ``weights``: what rounding the weights to the model's format did, tensor by tensor."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from precaudit.checkpoints import Checkpoint
from precaudit.configs import expected_tensors
from precaudit.formats import widen
from precaudit.metrics.sizes import norm, ratio
from precaudit.records import ErrorRecord, number


def weight_errors(checkpoint: Checkpoint, layers: tuple[int, ...]) -> Iterator[ErrorRecord]:
    """Yield a record for every tensor that was rounded (of the chosen layers, and those outside layers)."""
    for name in expected_tensors(checkpoint.config):
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if layer is not None and layer not in layers:
            continue
        before = checkpoint.tensors.original(name)
        if before is None:
            continue
        used = widen(checkpoint.tensors.read(name))
        size = np.abs(used - before)
        numbers: dict[str, Any] = {
            "n": size.size,
            "mae": number(size.mean()),
            "max_diff": number(size.max()),
            "rel_l2": number(ratio(norm(used - before), norm(before))),
        }
        yield ErrorRecord(
            prompt="", phase="", step=0, layer=layer, point=name, kind="weights", candidate="model",
            reference="original", **numbers,
        )  # fmt: skip

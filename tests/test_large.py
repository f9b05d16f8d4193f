"""Models larger than memory: what was read of a file is let go of, layer by layer."""

import mmap
from pathlib import Path

import numpy as np

from precaudit.checkpoints import open_checkpoint
from precaudit.numpy_decoder.forward import Wanted, forward, seconds_for
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import FP64


def resident(data):
    """Return the bytes of a map that are in this process's memory, from /proc/self/smaps."""
    start = f"{np.frombuffer(data, np.uint8).ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(start):
            return 1024 * int(next(x for x in lines if x.startswith("Rss:")).split()[1])
    raise AssertionError("the map is not there")


def test_a_layer_s_pages_are_let_go_of():
    checkpoint = open_checkpoint("tiny")
    x = checkpoint.tensors.read("model.layers.0.mlp.down_proj.weight")
    base = x
    while not isinstance(base, mmap.mmap):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    np.add.reduce(np.frombuffer(base, np.uint8), dtype=np.int64)
    whole = resident(base)
    seen = []
    wanted = Wanted({"q", "logits"}, None, [np.asarray([2])])
    forward(Model(checkpoint.config, checkpoint.tensors.read), [np.asarray([1, 2, 3])], [FP64], wanted,
            lambda *place: None, lambda layer: seen.append(resident(base)))  # fmt: skip
    assert whole > len(base) / 2
    assert max(seen) < whole / 2
    assert resident(base) < whole / 2


def test_the_time_of_more_tokens_is_more():
    config = open_checkpoint("tiny").config
    assert 0 < seconds_for(config, 10) < seconds_for(config, 100_000)

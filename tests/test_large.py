"""Models larger than memory: what was read of a file is let go of, layer by layer."""

import mmap
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from precaudit.checkpoints import open_checkpoint
from precaudit.numpy_decoder import forward as forward_module
from precaudit.numpy_decoder.forward import Wanted, forward, seconds_for
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import FP64
from precaudit.numpy_decoder.threads import WORKERS, each


def resident(data):
    """Return the bytes of a map that are in this process's memory, from /proc/self/smaps."""
    start = f"{np.frombuffer(data, np.uint8).ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(start):
            return 1024 * int(next(x for x in lines if x.startswith("Rss:")).split()[1])
    raise AssertionError("the map is not there")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")
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
    assert resident(base) == 0


def test_the_time_said_is_that_of_the_products(monkeypatch):
    """A clock of one second a reading: every worker multiplies two square matrices of 1024 in one, 2 · 1024³ flops.

    A layer of tiny has 4 projections and 3 matrices of its MLP; SHARE of that rate is taken to be reached.
    """
    c = open_checkpoint("tiny").config
    clock = count()
    monkeypatch.setattr(forward_module.time, "perf_counter", lambda: float(next(clock)))
    row = 2 * c.width * c.heads * c.head_dim + 2 * c.width * c.kv_heads * c.head_dim + 3 * c.width * c.mlp_width
    layer = row + 2 * c.width
    wanted = 2 * c.layers * layer * 1000 / (forward_module.SHARE * WORKERS * 2 * 1024**3)
    assert seconds_for(c, 1000) == pytest.approx(wanted)


def test_many_small_jobs_keep_their_order_and_raise_what_they_raise():
    jobs = [(i,) for i in range(50 * WORKERS + 3)]
    assert each(lambda i: 2 * i, jobs) == [2 * i for (i,) in jobs]
    with pytest.raises(ZeroDivisionError):
        each(lambda i: 1 // (i - 60), jobs)


def test_what_stepwise_sums_remember_is_bounded():
    from precaudit.numpy_decoder import accumulation

    dot = accumulation.accumulating("float32")
    accumulation._KEPT.clear()
    for m in [np.ones((2**16, 64)) for _ in range(3)]:  # 32 MiB each
        dot(np.ones((1, 64)), m.T)
    assert sum(x.nbytes for x, _ in accumulation._KEPT.values()) <= accumulation.KEEP
    assert 0 < len(accumulation._KEPT) < 3
    accumulation._KEPT.clear()

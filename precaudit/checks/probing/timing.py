"""Seconds a call takes, in rounds that every way takes part in: what slows the machine slows them all."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from precaudit.numbers.arrays import Array

ROUNDS, FEWEST = 9, 3
SAMPLE = 2e-3  # seconds a sample takes at least: as many calls as that needs
MOST = 200  # calls a sample
LONGEST = 20.0  # seconds all rounds may take, where FEWEST fit


def time_in_rounds(calls: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> Array:
    """Return seconds a call [rounds, calls]; each round begins with the next of them. All have to be compiled."""
    once = [_seconds(call, 1) for call in calls]
    repeats = [int(np.clip(np.ceil(SAMPLE / max(s, 1e-9)), 1, MOST)) for s in once]
    whole = sum(s * n for s, n in zip(once, repeats, strict=True))
    rounds = int(np.clip(LONGEST / max(whole, 1e-9), FEWEST, rounds))
    found = np.empty((rounds, len(calls)))
    for i in range(rounds):
        for j in ((i + n) % len(calls) for n in range(len(calls))):
            found[i, j] = _seconds(calls[j], repeats[j]) / repeats[j]
    return found


def quartiles(x: Array) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = (float(v) for v in np.percentile(x, (25, 50, 75)))
    return low, middle, high


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        last = call()
    jax.block_until_ready(last)
    return time.perf_counter() - began

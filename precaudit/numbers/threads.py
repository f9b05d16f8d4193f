"""Two-level parallelism: Python threads over rows or blocks, one BLAS thread each (faster here than threaded BLAS)."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from precaudit.numbers.allocation import keep_freed_memory
from precaudit.numbers.arrays import Array

WORKERS = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
SMALL = 1 << 14  # elements below which splitting rows costs more than it saves
INLINE = 1 << 15  # elements of a result below which handing its parts to threads does
_here = threading.local()  # of a thread that makes a piece for another process: as if it had how many cores


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, "precaudit")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside; the callers' threads share the cores instead."""
    keep_freed_memory()
    with _blas().limit(limits=1, user_api="blas"):
        yield


@cache
def _blas() -> Any:
    """Return what limits the threads of NumPy's BLAS, looked for once among the libraries that are loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@cache
def keep_one_blas_thread() -> None:
    """Limit BLAS to one thread as long as this process lives: pieces are made in several threads of it at once."""
    _blas().limit(limits=1, user_api="blas")


@contextmanager
def alone(split_for: int) -> Iterator[None]:
    """Have this thread use no others: what runs beside it has the other cores.

    Rows are split as by a process of ``split_for`` cores, so that bits are that process's.
    """
    before = getattr(_here, "cores", None)
    _here.cores = split_for
    try:
        yield
    finally:
        _here.cores = before


def cores() -> int:
    """Return for how many cores work is split here."""
    return getattr(_here, "cores", None) or WORKERS


def each(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], elements: int = INLINE) -> list[Any]:
    """Call ``function(*job)`` for every job, the caller and others at once; the first exception is raised here.

    No job begins after it, and none still runs. NumPy's error state is the caller's. ``elements``: of what all jobs
    make together; few are made by the caller alone.
    """
    todo = list(jobs)
    if len(todo) <= 1 or elements < INLINE or getattr(_here, "cores", None):
        return [function(*job) for job in todo]
    state, left = np.geterr(), deque(range(len(todo)))
    made: list[Any] = [None] * len(todo)

    def work() -> None:
        try:
            with np.errstate(**state):
                while True:
                    try:
                        i = left.popleft()
                    except IndexError:
                        return
                    made[i] = function(*todo[i])
        finally:
            left.clear()

    others = [_pool().submit(work) for _ in range(min(WORKERS, len(todo)) - 1)]
    try:
        work()
    finally:
        wait(other for other in others if not other.cancel())
    for other in others:
        if not other.cancelled():
            other.result()
    return made


def row_ranges(n: int, width: int) -> list[tuple[int, int]]:
    """Split n rows of ``width`` elements into one range per worker, or a single one when there are few."""
    count = cores()
    if n * width < SMALL or count == 1:
        return [(0, n)]
    return list(pairwise(n * i // count for i in range(count + 1)))


def to_float64(*arrays: Array) -> list[Array]:
    """Return arrays in FP64, of each worker a share of every one; those in FP64 as they are."""
    found = [x if x.dtype.itemsize == 8 else np.empty(x.shape) for x in arrays]
    pairs = [(x, out) for x, out in zip(arrays, found, strict=True) if out is not x]

    def part(share: int) -> None:
        with np.errstate(invalid="ignore"):  # signalling NaNs warn
            for x, out in pairs:
                a, b = (len(x) * i // WORKERS for i in (share, share + 1))
                out[a:b] = x[a:b]

    each(part, [(i,) for i in range(WORKERS)], sum(out.size for _, out in pairs))
    return found

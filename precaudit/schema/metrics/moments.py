"""Sums, largest values and distances of two tensors in one pass: what sizes of an error are computed from."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import numpy as np

from precaudit.numbers.arrays import Array, as_format, ordinals, to_single, widen
from precaudit.numbers.formats import FORMATS

SPLIT = 1 << 16  # fewest elements a block of rows is given: handing it to a thread costs as much as some 10^4 elements
BLOCKS = 32  # blocks of rows at most, by the shape alone: channels' sums are added in one order whatever runs them
ROWS = 4  # rows a block has at least: each block has sums of its own for every channel
COPIED = 1 << 16  # elements converted or copied at a time where a kernel cannot read them in place
CELLS = ("ee", "rr", "cc", "er", "cr", "e", "abs_e", "top")  # in the kernels' order, as are
CHANNELS = ("channel_ee", "channel_rr", "channel_top")
IN_KERNEL = ("float64", "float32", "bfloat16")  # formats whose distances the kernels count
BFLOAT16 = FORMATS["bfloat16"].dtype


@dataclass(frozen=True)
class Moments:
    """Sums over finite pairs. cells are [T, H]; channels [H * K]; e = candidate − reference.

    All are FP64, over the elements where e is finite; the others count 0 everywhere, as in ``Difference.of``.
    ``nonfinite`` counts the elements where either is NaN or infinite, equal infinities aside: a NaN agrees with
    nothing, not even with a NaN. ``worst`` is the t, h, k of the largest |e|, the first in C order among equals.
    ``max_ulp`` is the largest distance in units in the last place of the candidate's format after rounding the
    reference to it once, over the elements where the candidate is finite.
    """

    n: int
    nonfinite: int
    ee: Array  # [T, H] Σ e²
    rr: Array  # [T, H] Σ r²
    cc: Array  # [T, H] Σ c²
    er: Array  # [T, H] Σ e r
    cr: Array  # [T, H] Σ c r
    e: Array  # [T, H] Σ e
    abs_e: Array  # [T, H] Σ |e|
    top: Array  # [T, H] max |e|
    channel_ee: Array  # [H * K] Σ e²
    channel_rr: Array  # [H * K] Σ r²
    channel_top: Array  # [H * K] max |e|
    worst: tuple[int, int, int]
    max_ulp: int


def moments(candidate: Array, reference: Array, threads: int | None = None) -> Moments:
    """Return the moments of ``candidate`` [T, H, K] in its own format against ``reference`` [T, H, K] in FP64 or FP32.

    Any strides; nothing is widened as a whole. ``threads``: None for one a core. They change no bit of the result.
    """
    if candidate.ndim != 3 or candidate.shape != reference.shape:
        raise ValueError(f"moments of shapes {candidate.shape} and {reference.shape}: both must be the same [T, H, K]")
    length, heads, width = candidate.shape
    cells = (np.empty if candidate.size else np.zeros)((len(CELLS), length, heads))
    channels = np.zeros((len(CHANNELS), heads * width))
    bad, far = 0, 0
    if candidate.size:
        for part, some_bad, some_far in _parts(partial(_block, candidate, reference, cells), candidate.shape, threads):
            with np.errstate(over="ignore"):
                channels[:2] += part[:2]
            np.maximum(channels[2], part[2], out=channels[2])
            bad, far = bad + some_bad, max(far, some_far)
    sums = dict(zip((*CELLS, *CHANNELS), (*cells, *channels), strict=True))
    place = _worst(candidate, reference, sums["top"])
    return Moments(n=candidate.size, nonfinite=bad, worst=place, max_ulp=far, **sums)


Part = tuple[Array, int, int]


def _parts(job: Callable[[int, int], Part], shape: tuple[int, ...], threads: int | None) -> Iterator[Part]:
    """Yield job(a, b) of every block of rows in order, on ``threads`` threads where there is more than one block."""
    blocks = _blocks(shape)
    workers = min(len(blocks), threads or _cores())
    if workers == 1:
        return (job(a, b) for a, b in blocks)
    return _pool(workers).map(job, *zip(*blocks, strict=True))


def _blocks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranges of rows, by the shape alone."""
    length = shape[0]
    n = max(1, min(BLOCKS, length // ROWS, int(np.prod(shape)) // SPLIT))
    return list(pairwise(length * i // n for i in range(n + 1)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "moments")


def _block(candidate: Array, reference: Array, cells: Array, a: int, b: int) -> Part:
    """Fill rows a to b of ``cells`` [8, T, H]; return channels [3, H * K], how many are not finite, the distance."""
    from precaudit.schema.metrics._moments_kernel import KERNELS  # numba takes a third of a second to import

    name = candidate.dtype.name
    kernel = KERNELS[name if name in IN_KERNEL else "float32"]
    step = b - a
    if not (_in_place(candidate) and _in_place(reference)):
        step = max(1, COPIED // candidate[0].size)
    channels = np.zeros((len(CHANNELS), candidate[0].size))
    bad, far = 0, 0
    for first in range(a, b, step):
        c, r = (x[first : min(first + step, b)] for x in (candidate, reference))
        some_bad, some_far = kernel(_readable(c, bits=True), _readable(r), cells, channels, first)
        bad, far = bad + some_bad, max(far, some_far if name in IN_KERNEL else _max_ulp(c, r))
    return channels, bad, far


def _in_place(x: Array) -> bool:
    return x.dtype.name in IN_KERNEL and x.flags.c_contiguous and x.flags.aligned


def _readable(x: Array, bits: bool = False) -> Array:
    """Return ``x`` as a kernel takes it: FP64, FP32 or with ``bits`` bfloat16's words, contiguous, read-only.

    Read-only although nothing would write: a mapped file is, and numba compiles for either kind anew.
    """
    if x.dtype == BFLOAT16 and bits:
        x = x.view(np.uint16)
    elif x.dtype not in (np.float64, np.float32):
        with np.errstate(invalid="ignore"):  # signalling NaNs warn
            x = to_single(x)
    y = np.require(x, requirements=("C", "A")).view(np.ndarray)
    y.flags.writeable = False
    return y


def _max_ulp(candidate: Array, reference: Array) -> int:
    """Return ``sizes.max_ulp`` of two blocks: a reference that cannot be subtracted counts as 0."""
    c, r = widen(candidate), widen(reference)
    with np.errstate(invalid="ignore"):
        clean = np.where(np.isfinite(c - r), r, 0.0)
    distance = np.abs(ordinals(candidate) - ordinals(as_format(clean, candidate.dtype.name)))
    return int(distance.max(initial=0, where=np.isfinite(c)))


def _worst(candidate: Array, reference: Array, top: Array) -> tuple[int, int, int]:
    """Return where |e| is largest, first in C order; ``top`` [T, H] is its maximum over K."""
    if candidate.size == 0:
        return (0, 0, 0)
    t, h = (int(i) for i in np.unravel_index(int(top.argmax()), top.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(widen(candidate[t, h]) - widen(reference[t, h]))
    return t, h, int(np.where(np.isfinite(size), size, 0.0).argmax())

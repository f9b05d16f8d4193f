"""What an emulation leaves, sums over it, and over an ensemble's deviations, in one pass over memory, by numba."""

from typing import Any

import numba
import numpy as np

from precaudit.compiling import compiled
from precaudit.metrics._moments_kernel import ORDER, PIECE
from precaudit.metrics.sizes import EXPONENT

CELLS = 9  # [T, H]: Σ left², Σ noise², Σ r², Σ left·r, Σ left, Σ noise²·r², Σ r⁴, Σ |r|, Σ r
CHANNELS = 3  # [H, K]: Σ left², Σ noise², Σ r²


@numba.njit(inline="always")
def _half_ulp(y, smallest, unit):  # type: ignore[no-untyped-def]
    power = np.int64(np.float64(y).view(np.int64) & np.int64(EXPONENT)).view(np.float64)
    return smallest if abs(y) < smallest else unit * min(power, 2.0**1023)


@compiled()
def half_ulps(y, smallest, unit, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with ``metrics.sizes.half_ulp`` of flat FP64 values, of a format's smallest normal number and u."""
    for i in range(y.size):
        out[i] = _half_ulp(y[i], smallest, unit)


@compiled()
def left_over(candidate, emulated, reference, sums, smallest, unit, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with candidate − emulated, flat FP64: 0 where both are next to each other about a tie.

    That is where the reference is no farther from their middle than ``sums``, and they no more than an ulp apart.
    """
    for i in range(out.size):
        c, e, r = candidate[i], emulated[i], reference[i]
        left = c - e
        near = abs((c + e) / 2 - r) <= sums[i]
        out[i] = 0.0 if near and abs(left) <= 2.02 * _half_ulp(r, smallest, unit) else left


@compiled(fastmath=ORDER)
def pool(made, around, reference, root, power, gains, means):  # type: ignore[no-untyped-def]
    """Add a realisation's deviations d = (made − around) · root to power Σ d² [T, H, K]; fill gains Σ d·r, means Σ d.

    Where d is not finite it is 0. All FP64 and contiguous [T, H, K]; gains and means [T, H].
    """
    length, heads, width = made.shape
    for t in range(length):
        for h in range(heads):
            gain = mean = 0.0
            for k in range(width):
                d = made[t, h, k] - around[t, h, k]
                d = d * root if abs(d) < np.inf else 0.0
                power[t, h, k] += d * d
                gain += d * reference[t, h, k]
                mean += d
            gains[t, h], means[t, h] = gain, mean


@compiled(fastmath=ORDER)
def summed(left, power, reference, cells, channels):  # type: ignore[no-untyped-def]
    """Fill cells [9, T, H] and add to channels [3, H, K] what the names above say of FP64 [T, H, K], contiguous."""
    length, heads, width = left.shape
    for t in range(length):
        for h in range(heads):
            ll = pp = rr = lr = l1 = pr = r4 = ar = r1 = 0.0
            for start in range(0, width, PIECE):
                stop = min(start + PIECE, width)
                e, p, r = left[t, h, start:stop], power[t, h, start:stop], reference[t, h, start:stop]
                of_left, of_noise, of_reference = (
                    channels[0, h, start:stop], channels[1, h, start:stop], channels[2, h, start:stop],
                )  # fmt: skip
                for k in range(stop - start):
                    a, b, c = e[k], p[k], r[k]
                    square, size = a * a, c * c
                    ll += square
                    pp += b
                    rr += size
                    lr += a * c
                    l1 += a
                    pr += b * size
                    r4 += size * size
                    ar += abs(c)
                    r1 += c
                    of_left[k] += square
                    of_noise[k] += b
                    of_reference[k] += size
            cells[0, t, h], cells[1, t, h], cells[2, t, h] = ll, pp, rr
            cells[3, t, h], cells[4, t, h], cells[5, t, h] = lr, l1, pr
            cells[6, t, h], cells[7, t, h], cells[8, t, h] = r4, ar, r1


@compiled()
def farthest(error, left, allowed):  # type: ignore[no-untyped-def]
    """Return the largest min(|error|, |left|) / allowed, flat FP64, and the first place of it; NaN is the largest.

    0 / 0 is 0.
    """
    worst, place = -1.0, 0
    for i in range(error.size):
        nearest = min(abs(error[i]), abs(left[i]))
        if nearest == 0.0:
            size = 0.0
        elif allowed[i] == 0.0:
            size = np.inf
        else:
            size = nearest / allowed[i]
        if size > worst or size != size:
            worst, place = size, i
            if size != size:
                break
    return worst, place


def plain(x: Any) -> Any:
    """Return FP64 values as the kernels take them: contiguous and, since what is mapped is, read-only."""
    y = np.require(x, np.float64, requirements=("C", "A")).view(np.ndarray)
    y.flags.writeable = False
    return y

"""What an emulation leaves, sums over it, and over an ensemble's deviations, in one pass over memory, by numba."""

from typing import Any, NamedTuple

import numba
import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.numbers.compiling import nogil_njit
from precaudit.schema.metrics._moments_kernel import ORDER, PIECE, Totals, _difference, _wide, _wide_bfloat16
from precaudit.schema.metrics.sizes import EXPONENT

CELLS = 9  # [T, H]: Σ left², Σ noise², Σ r², Σ left·r, Σ left, Σ noise²·r², Σ r⁴, Σ |r|, Σ r
CHANNELS = 3  # [H, K]: Σ left², Σ noise², Σ r²


class EmulatedRows(NamedTuple):
    """Values [T, K] that were recorded, that an emulation makes, and that FP64 does."""

    candidate: Array
    emulated: Array
    reference: Array


class LeastNoise(NamedTuple):
    """``relative``: noise over the rms of a row; ``tie`` · |r|: what sums are off by, below 0 where ties are no matter.

    ``smallest``, ``unit``: the format's smallest normal number and unit roundoff.
    """

    relative: float
    tie: float
    smallest: float
    unit: float


@numba.njit(inline="always")
def _half_ulp(y, smallest, unit):  # type: ignore[no-untyped-def]
    power = np.int64(np.float64(y).view(np.int64) & np.int64(EXPONENT)).view(np.float64)
    return smallest if abs(y) < smallest else unit * min(power, 2.0**1023)


@nogil_njit()
def half_ulps(y, smallest, unit, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with ``metrics.sizes.half_ulp`` of flat FP64 values, of a format's smallest normal number and u."""
    for i in range(y.size):
        out[i] = _half_ulp(y[i], smallest, unit)


@numba.njit(inline="always")
def _finite(x):  # type: ignore[no-untyped-def]
    return x if abs(x) < np.inf else 0.0


@numba.njit
def _left_over(c, e, r, sums, half):  # type: ignore[no-untyped-def]
    """C − ê; c − r where ê is not finite, and 0 where both are next to each other about a tie.

    That is where r is no farther from their middle than ``sums``, and they no more than an ulp apart.
    """
    left = c - (e if abs(e) < np.inf else r)
    near = (abs((c + e) / 2 - r) <= sums) & (abs(left) <= 2.02 * half)
    return 0.0 if near else left


@nogil_njit()
def left_over(candidate, emulated, reference, sums, smallest, unit, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with what an emulation leaves of flat FP64 values, as ``_left_over`` says of one."""
    for i in range(out.size):
        r = reference[i]
        out[i] = _left_over(candidate[i], emulated[i], r, sums[i], _half_ulp(r, smallest, unit))


@nogil_njit(fastmath=ORDER)
def pool(made, around, reference, root, power, sums):  # type: ignore[no-untyped-def]
    """Add a realisation's deviations d = (made − around) · root to power Σ d² [T, H, K]; fill sums Σ d·r, Σ d.

    Where d is not finite it is 0. All FP64 and contiguous [T, H, K]; sums [2, T, H].
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
            sums[0, t, h], sums[1, t, h] = gain, mean


@nogil_njit(fastmath=ORDER)
def add_sums(left, power, reference, cells, channels):  # type: ignore[no-untyped-def]
    """Fill cells [9, T, H] and add to channels [3, H, K] what the names above say of FP64 [T, H, K], contiguous."""
    length, heads, width = left.shape
    for t in range(length):
        for h in range(heads):
            ll = pp = rr = lr = l1 = pr = r4 = ar = r1 = 0.0
            for start in range(0, width, PIECE):
                stop = min(start + PIECE, width)
                e, p, r = left[t, h, start:stop], power[t, h, start:stop], reference[t, h, start:stop]
                of_left, of_noise, of_reference = (
                    channels[0, h, start:stop],
                    channels[1, h, start:stop],
                    channels[2, h, start:stop],
                )
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


@nogil_njit()
def farthest_excess(error, left, allowed):  # type: ignore[no-untyped-def]
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


@numba.njit(inline="always")
def _wide_upper(x):  # type: ignore[no-untyped-def]
    """The value of the upper half of an FP64 word."""
    return np.int64(np.int64(x) << np.int64(32)).view(np.float64)


@numba.njit(inline="always")
def _undrawn(values, noise, totals, wide, made):  # type: ignore[no-untyped-def]
    candidate, emulated, reference = values.candidate, values.emulated, values.reference
    relative, tie, smallest, unit = noise.relative, noise.tie, noise.smallest, noise.unit
    cells, channels = totals.cells, totals.channels
    length, width = candidate.shape
    apart = known_error = error_size = change = 0.0
    farthest, row, allowance = np.int64(0), 0, 0.0
    for t in range(length):
        size = 0.0
        for k in range(width):
            r = _finite(reference[t, k])
            size += r * r
        floor = relative * (size / width) ** 0.5
        ll = rr = lr = l1 = r4 = ar = r1 = 0.0
        top = np.int64(0)
        for start in range(0, width, PIECE):
            stop = min(start + PIECE, width)
            x, y, z = candidate[t, start:stop], emulated[t, start:stop], reference[t, start:stop]
            of_left, of_reference = channels[0, start:stop], channels[2, start:stop]
            some = 0.0
            for k in range(stop - start):
                c, e, r = wide(x[k]), made(y[k]), z[k]
                left = _finite(_left_over(c, e, r, tie * abs(r), _half_ulp(r, smallest, unit)))
                error, known, shown, emulation = _finite(_difference(c, r)), _finite(c), _finite(r), _finite(e)
                a, b, d = _difference(known, emulation), _difference(known, shown), _difference(emulation, shown)
                apart += a * a
                known_error += b * b
                error_size += error * error
                change += d * d
                square, power = left * left, shown * shown
                some += square
                rr += power
                lr += left * shown
                l1 += left
                r4 += power * power
                ar += abs(shown)
                r1 += shown
                of_left[k] += square
                of_reference[k] += power
            ll += some
            for k in range(stop - start if some > 0.0 else 0):
                c, e, r = wide(x[k]), made(y[k]), z[k]
                half = _half_ulp(r, smallest, unit)
                left = _finite(_left_over(c, e, r, tie * abs(r), half))
                nearest = min(abs(_finite(_difference(c, r))), abs(left)) / (half + floor)
                top = max(top, np.float64(nearest).view(np.int64))
        if top > farthest:
            farthest, row, allowance = top, t, floor
        cells[0, t, 0], cells[2, t, 0], cells[3, t, 0], cells[4, t, 0] = ll, rr, lr, l1
        cells[6, t, 0], cells[7, t, 0], cells[8, t, 0] = r4, ar, r1
    place = 0
    for k in range(width if farthest > 0 else 0):
        c, e, r = wide(candidate[row, k]), made(emulated[row, k]), reference[row, k]
        half = _half_ulp(r, smallest, unit)
        left = _finite(_left_over(c, e, r, tie * abs(r), half))
        nearest = min(abs(_finite(_difference(c, r))), abs(left)) / (half + allowance)
        if np.float64(nearest).view(np.int64) == farthest:
            place = row * width + k
            break
    return apart, known_error, error_size, change, np.int64(farthest).view(np.float64), place


@nogil_njit(fastmath=ORDER)
def undrawn_bfloat16(candidate, emulated, reference, relative, tie, smallest, unit, cells, channels):  # type: ignore[no-untyped-def]
    """``add_undrawn_sums`` of bfloat16's words and the upper halves of FP64 words."""
    noise, totals = LeastNoise(relative, tie, smallest, unit), Totals(cells, channels)
    return _undrawn(EmulatedRows(candidate, emulated, reference), noise, totals, _wide_bfloat16, _wide_upper)


@nogil_njit(fastmath=ORDER)
def add_undrawn_sums(candidate, emulated, reference, relative, tie, smallest, unit, cells, channels):  # type: ignore[no-untyped-def]
    """Fill cells and channels as ``add_sums`` does of what ``left_over`` leaves of [T, K], under the least noise.

    ``relative``: of that noise, over the rms of a row; ``tie`` · |r|: what sums are off by, below 0 where ties are not
    looked for. Return sums of squares: c − ê, c − r and ê − r with 0 for each value that is not finite, and after the
    second c − r with 0 where that is not; and what ``farthest_excess`` does with half an ulp and a row's noise allowed.
    """
    noise, totals = LeastNoise(relative, tie, smallest, unit), Totals(cells, channels)
    return _undrawn(EmulatedRows(candidate, emulated, reference), noise, totals, _wide, _wide)


def as_kernel_input(x: object) -> Any:
    """Return FP64 values as the kernels take them."""
    return as_is(np.asarray(x, np.float64))


def as_is(x: object) -> Any:
    """Return an array as the kernels take it: contiguous and, since what is mapped is, read-only."""
    y = np.require(x, requirements=("C", "A")).view(np.ndarray)
    y.flags.writeable = False
    return y

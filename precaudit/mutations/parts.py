"""Parts of a result that are zero or scaled: heads, channels, tokens, or all of it; and results that are clipped."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from precaudit.arrays import Array
from precaudit.mutations.forms import Inputs, finished
from precaudit.mutations.variants import Variant
from precaudit.places import spans

HIT = 3.0  # times the usual relative size of what is left, from which a slice counts as hit
ROWS = 16  # rows from which each channel may have a factor of its own, elements for tokens
MANY = 8  # slices above which they are counted, unless they stand together
ALIKE = 0.05  # relative spread of factors that are one
AXES = {"head": (0, 2), "channel": (0,), "token": (1, 2)}  # summed over, of [T, H, K]


@dataclass(frozen=True)
class Scaled:
    """A slice's factors [broadcast to T, H, K] on what it should be, and how it is told.

    ``many``: each slice has one of its own.
    """

    name: str
    says: str
    factors: Array
    many: bool = False


def scaled_parts(at: Array, axes: str, candidate: Array, emulated: Array, roundoff: float) -> Iterator[Variant]:
    """Yield the operation with parts of its result times the factor that fits: simplest first."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for part in _parts(at, axes, candidate, emulated, roundoff):
            for twice in (True, False):
                form = finished(partial(_times, part.factors, axes), twice)
                yield Variant(
                    part.name, "semantics", part.says, form, fitted=True, carries="token" not in part.name,
                    describes=part.many,
                )  # fmt: skip
    yield from _clipped(axes, candidate, emulated)
    yield from _shifted(candidate, emulated, roundoff)


def _times(factors: Array, axes: str, o: Inputs, out: Array) -> Array:
    """Return a result in its own axes times factors [T, H, K]; of fewer rows the last."""
    own = factors.transpose(1, 0, 2) if axes == "HTS" else factors if out.ndim == 3 else factors[:, 0]
    rows = 1 if axes == "HTS" else 0
    if own.shape[rows] > out.shape[rows]:
        own = np.take(own, range(own.shape[rows] - out.shape[rows], own.shape[rows]), axis=rows)
    return np.asarray(out * own)


def _parts(at: Array, axes: str, c: Array, y: Array, roundoff: float) -> Iterator[Scaled]:
    whole = _factor(c, y, roundoff)
    if np.isfinite(whole):
        yield Scaled(f"× {whole:g}", f"the result is multiplied by {whole:g}", np.full((1, 1, 1), whole))
    for scope, over in AXES.items():
        if (scope == "head" and c.shape[1] == 1) or (scope == "channel" and axes[-1] in "SV"):
            continue
        power = (y * y).sum(axis=over, keepdims=True)
        factors = np.where(power > 0, (c * y).sum(axis=over, keepdims=True) / power, 1.0)
        left = np.sqrt(((c - y) ** 2).sum(axis=over, keepdims=True) / power)
        hit = np.nan_to_num(left) > max(HIT * roundoff, HIT * float(np.median(np.nan_to_num(left))))
        if 0 < hit.sum() < hit.size:
            yield from _some(scope, at, hit, factors, _factor(np.where(hit, c, 0.0), np.where(hit, y, 0.0), roundoff))
        if hit.size > 1 and c.size // hit.size >= ROWS:
            low, high = float(factors.min()), float(factors.max())
            says = f"every {scope} has a factor of its own, {low:.4g} to {high:.4g}"
            if np.isfinite(whole) and high - low <= ALIKE * abs(whole - 1):
                says = f"{scope}s differ by {low:.4g} to {high:.4g}, all alike: × {whole:.5g}"
            yield Scaled(f"{scope}s scaled", says, factors, many=True)


def _factor(c: Array, y: Array, roundoff: float) -> float:
    """Return the factor on y that comes nearest to c, of the fewest digits within three standard errors.

    Or one rounding: a factor on a weight is rounded with it, and roundings inside an operation are not independent. A
    factor of 1 is none.
    """
    power = float((y * y).sum())
    x = float((c * y).sum()) / power if power else float("nan")
    error = float(((c - x * y) ** 2).sum()) / max(int((y != 0).sum()) - 1, 1)
    near = max(3 * (error / power) ** 0.5 if power else 0.0, roundoff * abs(x))
    return next((s for d in range(6) if abs((s := float(f"{x:.{d}e}")) - x) <= near and s != 1), x)


def _some(scope: str, at: Array, hit: Array, factors: Array, one: float) -> Iterator[Scaled]:
    """Yield the slices that are hit, under one factor if theirs agree."""
    which = np.flatnonzero(hit.reshape(-1))
    found = factors.reshape(-1)[which]
    index = [int(at[i]) for i in which] if scope == "token" else [int(i) for i in which]
    few = len(index) <= MANY or np.ptp(index) + 1 == len(index)
    named = f"{scope}{'s' if len(index) > 1 else ''} {spans(tuple(index))}" if few else f"{len(index)} {scope}s"
    middle = float(np.median(found))
    if np.ptp(found) <= ALIKE * max(abs(middle), ALIKE):
        one = one if abs(middle) > 1e-6 else 0.0
        told = "zeroed" if one == 0 else f"× {one:g}"
        says = f"{named} {'is' if len(index) == 1 else 'are'} {'zero' if one == 0 else f'multiplied by {one:g}'}"
        yield Scaled(f"{named} {told}", says, np.where(hit, one, 1.0))
    low, high = float(found.min()), float(found.max())
    says = f"{named}: each is multiplied by a factor of its own, {low:.4g} to {high:.4g}"
    yield Scaled(f"{named} scaled", says, np.where(hit, factors, 1.0), many=len(index) > 1)


def _clipped(axes: str, c: Array, y: Array) -> Iterator[Variant]:
    top = float(np.abs(c).max(initial=0.0))
    if not 0 < top < 0.98 * float(np.abs(y).max(initial=0.0)):
        return
    says = f"results are clipped to ±{top:g}"
    yield Variant(
        f"clipped at ±{top:g}", "semantics", says, finished(lambda o, out: np.clip(out, -top, top)), fitted=True
    )  # fmt: skip


def _shifted(c: Array, y: Array, roundoff: float) -> Iterator[Variant]:
    """Yield the operation with one number added to every element: of the fewest digits within three standard errors."""
    left = c - y
    x = float(left.mean()) if left.size else 0.0
    if not x or not np.isfinite(x):
        return
    near = max(3 * float(left.std()) / left.size**0.5, roundoff * abs(x))
    x = next((s for d in range(6) if abs((s := float(f"{x:.{d}e}")) - x) <= near and s), x)
    says = f"{x:g} is added to every element"
    for twice in (True, False):
        form = finished(lambda o, out: out + x, twice)
        yield Variant(f"{x:+g} everywhere", "semantics", says, form, fitted=True)

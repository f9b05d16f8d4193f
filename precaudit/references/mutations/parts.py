"""Parts of a result with one number: scaled, shifted or held at it are heads, channels, tokens, small values, all."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.references.mutations.forms import on_result
from precaudit.references.mutations.variants import Variant
from precaudit.schema.digits import digits
from precaudit.schema.places import spans

HIT = 3.0  # times the usual relative size of what is left, from which a slice counts as hit
ROWS = 16  # rows from which each channel may have a factor of its own, elements for tokens
MANY = 8  # slices above which they are counted, unless they stand together
ALIKE = 0.05  # relative spread of factors that are one
FEWEST = 4  # elements that one number has to make
GAP = 8.0  # times what is left of the slices that are not hit, from which others are
AXES = {"head": (0, 2), "channel": (0,), "token": (1, 2)}  # summed over, of [T, H, K]


@dataclass(frozen=True)
class SliceFactors:
    """A slice's factors [broadcast to T, H, K] on what it should be, and how it is told.

    ``many``: each slice has one of its own.
    """

    name: str
    says: str
    factors: Array
    many: bool = False

    @property
    def lacks(self) -> bool:
        """Whether it makes a slice smaller that it does not take away."""
        return self.factors.size > 1 and bool(((self.factors > 0) & (self.factors < 1)).any())


def scaled_parts(
    at: Array,
    axes: str,
    candidate: Array,
    emulated: Array,
    roundoff: float,
    shares: bool = False,
) -> Iterator[Variant]:
    """Yield the operation with parts of its result times the factor that fits, and what else one number makes.

    Simplest first. ``shares``: rows are shares of one, so that what a
    part lacks is at keys that are not recorded, such as padding: a factor below 1 describes it and is no cause.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        yield from _constant_slices(at, axes, candidate, emulated, roundoff)
        for part in _parts(at, axes, candidate, emulated, roundoff):
            for twice in (True, False):
                form = on_result(partial(_times, part.factors, axes), twice)
                yield Variant(
                    part.name,
                    "semantics",
                    part.says,
                    form,
                    fitted=True,
                    carries="token" not in part.name,
                    describes=part.many or (shares and part.lacks),
                )
        yield from _shifted_slices(at, axes, candidate, emulated, roundoff)
    yield from _clip(candidate, emulated)
    yield from _smallest(candidate)
    yield from _dropout(axes, candidate, emulated)


def _own(values: Array, axes: str, out: Array) -> Array:
    """Return values [T, H, K] in a result's own axes; of fewer rows the last."""
    own = values.transpose(1, 0, 2) if axes == "HTS" else values if out.ndim == 3 else values[:, 0]
    rows = 1 if axes == "HTS" else 0
    if own.shape[rows] > out.shape[rows]:
        own = np.take(own, range(own.shape[rows] - out.shape[rows], own.shape[rows]), axis=rows)
    return own


def _times(factors: Array, axes: str, out: Array) -> Array:
    return np.asarray(out * _own(factors, axes, out))


def _plus(summands: Array, axes: str, out: Array) -> Array:
    return np.asarray(out + _own(summands, axes, out))


def _at(where: Array, value: float, axes: str, out: Array) -> Array:
    return np.where(_own(where, axes, out), value, out)


def _parts(at: Array, axes: str, c: Array, y: Array, roundoff: float) -> Iterator[SliceFactors]:
    for x in _factors(c, y, roundoff):
        yield SliceFactors(f"× {digits(x, 6)}", f"the result is multiplied by {digits(x, 6)}", np.full((1, 1, 1), x))
    whole = next(iter(_factors(c, y, roundoff)), float("nan"))
    for scope, over in _scopes(c, axes):
        power = (y * y).sum(axis=over, keepdims=True)
        factors = np.where(power > 0, (c * y).sum(axis=over, keepdims=True) / power, 1.0)
        for hit in _hits(c, y, over, roundoff):
            ones = _factors(np.where(hit, c, 0.0), np.where(hit, y, 0.0), roundoff)
            yield from _some(scope, at, hit, factors, ones, c.size // factors.size)
        size = factors.size
        if size > 1 and c.size // size >= ROWS and axes[-1] != "V":
            low, high = float(factors.min()), float(factors.max())
            says = f"every {scope} has a factor of its own, {digits(low, 4)} to {digits(high, 4)}"
            if np.isfinite(whole) and high - low <= ALIKE * abs(whole - 1):
                says = f"{scope}s differ by {digits(low, 4)} to {digits(high, 4)}, all alike: × {digits(whole, 5)}"
            yield SliceFactors(f"{scope}s scaled", says, factors, many=True)


def _scopes(c: Array, axes: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what slices are there, and the axes of [T, H, K] that they are over."""
    for scope, over in AXES.items():
        if not ((scope == "head" and c.shape[1] == 1) or (scope == "channel" and axes[-1] == "S")):
            yield scope, over


def _hits(c: Array, y: Array, over: tuple[int, ...], roundoff: float) -> Iterator[Array]:
    """Yield which slices are hit: those far above the median, and those above the widest gap, where they are others."""
    power = (y * y).sum(axis=over, keepdims=True)
    left = np.nan_to_num(np.sqrt(((c - y) ** 2).sum(axis=over, keepdims=True) / power))
    most = np.sort(left.reshape(-1))
    gaps = most[1:] / np.maximum(most[:-1], HIT * roundoff)
    limits = [max(HIT * roundoff, HIT * float(np.median(left)))]
    if len(gaps) and gaps.max() > GAP:
        limits.append(float(most[int(np.argmax(gaps))]))
    seen: list[bytes] = []
    for limit in limits:
        hit = left > limit
        if 0 < hit.sum() < hit.size and hit.tobytes() not in seen:
            seen.append(hit.tobytes())
            yield hit


def _factors(c: Array, y: Array, roundoff: float) -> Iterator[float]:
    """Yield the factor on y that comes nearest to c: of the fewest digits within one rounding or three standard errors.

    A factor on a weight is rounded with it, and roundings inside an operation are not independent. Then of the fewest
    digits within three standard errors alone. A factor of 1 is none.
    """
    power = float((y * y).sum())
    x = float((c * y).sum()) / power if power else float("nan")
    if not np.isfinite(x):
        return
    error = float(((c - x * y) ** 2).sum()) / max(int((y != 0).sum()) - 1, 1)
    within = 3 * (error / power) ** 0.5
    yield from dict.fromkeys(_shortest(x, near) for near in (max(within, roundoff * abs(x)), within))


def _shortest(x: float, near: float) -> float:
    """Return the number of fewest digits within ``near`` of x; 1 is none."""
    return next((s for d in range(6) if abs((s := float(f"{x:.{d}e}")) - x) <= near and s != 1), x)


def _slices_text(scope: str, at: Array, hit: Array) -> str:
    """Return which slices these are, in words: by number where they are few or stand together."""
    which = np.flatnonzero(hit.reshape(-1))
    index = [int(at[i]) for i in which] if scope == "token" else [int(i) for i in which]
    few = len(index) <= MANY or np.ptp(index) + 1 == len(index)
    return f"{scope}{'s' if len(index) > 1 else ''} {spans(tuple(index))}" if few else f"{len(index)} {scope}s"


def _some(
    scope: str, at: Array, hit: Array, factors: Array, ones: Iterator[float], each: int
) -> Iterator[SliceFactors]:
    """Yield the slices that are hit, under one factor if theirs agree; ``each``: elements of one."""
    found = factors[hit]
    count, named = len(found), _slices_text(scope, at, hit)
    if count * each < FEWEST:
        return
    middle = float(np.median(found))
    if np.ptp(found) <= ALIKE * max(abs(middle), ALIKE):
        for x in (0.0,) if abs(middle) <= 1e-6 else ones:
            told = "zeroed" if x == 0 else f"× {digits(x, 6)}"
            says = f"{named} {'is' if count == 1 else 'are'} {'zero' if x == 0 else f'multiplied by {digits(x, 6)}'}"
            yield SliceFactors(f"{named} {told}", says, np.where(hit, x, 1.0))
    if count > 1:
        low, high = float(found.min()), float(found.max())
        says = f"{named}: each is multiplied by a factor of its own, {digits(low, 4)} to {digits(high, 4)}"
        yield SliceFactors(f"{named} scaled", says, np.where(hit, factors, 1.0), many=True)


def _shifted_slices(at: Array, axes: str, c: Array, y: Array, roundoff: float) -> Iterator[Variant]:
    """Yield the operation with one number added to the slices that are hit, where theirs agree."""
    for scope, over in _scopes(c, axes):
        for hit in _hits(c, y, over, roundoff):
            found = (c - y).mean(axis=over, keepdims=True)[hit]
            x = float(found.mean())
            enough = len(found) * (c.size // hit.size) >= FEWEST
            if enough and np.isfinite(x) and x and np.ptp(found) <= ALIKE * abs(x):
                x = next(s for d in range(17) if abs((s := float(f"{x:.{d}e}")) - x) <= roundoff * abs(x))
                told = _slices_text(scope, at, hit)
                form = on_result(partial(_plus, np.where(hit, x, 0.0), axes))
                yield Variant(
                    f"{'+' * (x > 0)}{digits(x, 6)} in {told}",
                    "semantics",
                    f"{digits(x, 6)} is added in {told}",
                    form,
                    fitted=True,
                    carries=scope != "token",
                )


def _constant_slices(at: Array, axes: str, c: Array, y: Array, roundoff: float) -> Iterator[Variant]:
    """Yield the operation with the slices that hold one number everywhere, and should not, at that number.

    A slice of one element holds one always: it is told where it is the only one that is hit.
    """
    for scope, over in _scopes(c, axes):
        low, high = (f(axis=over, keepdims=True) for f in (c.min, c.max))
        single = c.size == low.size
        hits = _hits(c, y, over, roundoff) if single else [(low == high) & (abs(y - low).max(over, keepdims=True) > 0)]
        for hit in hits:
            values = np.unique(low[hit])
            if len(values) == 1 and (hit.sum() == 1 if single else hit.sum() < hit.size):
                x, told = float(values[0]), _slices_text(scope, at, hit)
                is_ = f"{told} {'is' if hit.sum() == 1 else 'are'} {'zero' if x == 0 else f'{digits(x, 6)}'}"
                name = f"{told} zeroed" if x == 0 else f"{told} at {digits(x, 6)}"
                form = on_result(partial(_at, np.broadcast_to(hit, c.shape), x, axes))
                yield Variant(name, "semantics", is_, form, fitted=True, carries=scope != "token")


def _clip(c: Array, y: Array) -> Iterator[Variant]:
    """Yield results that are clipped: to a largest size, or on one side."""
    if not c.size:
        return
    top, low, high = float(np.abs(c).max()), float(c.min()), float(c.max())
    if 0 < top < 0.98 * float(np.abs(y).max()):
        says = f"results are clipped to ±{digits(top, 6)}"
        yield Variant(
            f"clipped at ±{digits(top, 6)}", "semantics", says, on_result(partial(_between, -top, top)), fitted=True
        )
    far = float(np.abs(y).max())
    for name, edge, is_, ends in (
        ("least", low, float(y.min()) < low - 0.02 * far, (low, np.inf)),
        ("largest", high, float(y.max()) > high + 0.02 * far, (-np.inf, high)),
    ):
        if is_:
            at = digits(edge, 6)
            says = f"results {'below' if name == 'least' else 'above'} {at} are {at}: clipped on one side"
            yield Variant(
                f"clipped, {name} {digits(edge, 6)}",
                "semantics",
                says,
                on_result(partial(_between, *ends)),
                fitted=True,
            )


def _between(low: float, high: float, out: Array) -> Array:
    return np.clip(out, low, high)


def _smallest(c: Array) -> Iterator[Variant]:
    """Yield results of which all but the n largest of a row hold one number, as a filter leaves them."""
    values, counts = np.unique(c, return_counts=True)
    if not len(values) or counts.max() == c.size:
        return
    x = float(values[int(np.argmax(counts))])
    kept = (c != x).sum(axis=-1)
    n = int(kept.max(initial=0))
    if 0 < n < c.shape[-1] // 2:
        says = f"all but the {n} largest of a row are {digits(x, 6)}"
        yield Variant(f"{n} largest alone", "semantics", says, on_result(partial(_largest, n, x)), fitted=True)


def _dropout(axes: str, c: Array, y: Array) -> Iterator[Variant]:
    """Yield results of which a share p is zero and the others are times 1 / (1 − p), as dropout leaves them.

    Which ones are zero is taken from the values; that factor and share belong together is what shows it.
    """
    there = y != 0
    gone = there & (c == 0)
    n, kept = int(there.sum()), there & ~gone
    power = float((y[kept] ** 2).sum())
    if n < MANY**2 or not gone.any() or not power:
        return
    p, x = float(gone.sum() / n), float((c[kept] * y[kept]).sum()) / power
    error = HIT * np.sqrt(p * (1 - p) / n) / (1 - p) ** 2
    share = float(f"{1 - 1 / x:.2g}") if x else 0.0
    if 0 < share < 1 and abs(x - 1 / (1 - p)) <= error:
        rate = digits(share, 6)
        says = f"a share of {rate} of the elements is zero, the others are times 1 / (1 − {rate}): dropout"
        form = on_result(partial(_times, np.where(gone, 0.0, 1 / (1 - share)), axes))
        yield Variant(f"dropout {digits(share, 6)}", "semantics", says, form, fitted=True, carries=False)


def _largest(n: int, x: float, out: Array) -> Array:
    """Return the n largest of every row, and those as large as the last of them; x for the others."""
    if out.shape[-1] <= n:
        return out
    edge = np.sort(out, axis=-1)[..., -n, None]
    return np.where(out >= edge, out, x)


def added_number(c: Array, y: Array, roundoff: float) -> Iterator[Variant]:
    """Yield the operation with one number added to every element: of the fewest digits within three standard errors."""
    left = c - y
    x = float(left.mean()) if left.size else 0.0
    if not x or not np.isfinite(x):
        return
    near = max(3 * float(left.std()) / left.size**0.5, roundoff * abs(x))
    x = next((s for d in range(6) if abs((s := float(f"{x:.{d}e}")) - x) <= near and s), x)
    says = f"{digits(x, 6)} is added to every element"
    for twice in (True, False):
        form = on_result(lambda out: out + x, twice)
        yield Variant(f"{'+' * (x > 0)}{digits(x, 6)} everywhere", "semantics", says, form, fitted=True)

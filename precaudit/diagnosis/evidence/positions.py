"""How an error depends on where a token stands, as those of mistakes in RoPE, windows and caches do."""

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.digits import digits
from precaudit.schema.places import spans

FEW = 8  # rows below which nothing is said
HIT = 0.1  # a row counts as hit when it has this share of the worst row's error
GROWS = 3.0  # last quarter's median over the first's
MOSTLY = 0.9  # share of the power that is told
MANY = 8  # slices above which none is told by its number
SAMPLE = 1 << 16  # elements that ranks are taken of
MONOTONE = 0.7  # Spearman's rank correlation of error and position


def by_position(left: Array, made: Array, at: Array) -> str:
    """Say how ``left`` of ``made`` [T, H, K] depends on the rows' positions; nothing of few rows."""
    if len(at) < FEW:
        return ""
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.where(np.isfinite(left), left, np.inf)
        sizes = np.sqrt((found**2).sum(axis=(1, 2)) / np.maximum((made**2).sum(axis=(1, 2)), 1e-300))
    return shape(sizes, at)


def shape(sizes: Array, at: Array) -> str:
    """Say how sizes [T] of errors depend on positions [T]."""
    if not np.isfinite(sizes).all():
        bad = at[~np.isfinite(sizes)]
        return f"not finite at {len(bad)} of {len(at)} positions, first {bad[0]}"
    if not sizes.any():
        return ""
    hit = sizes > HIT * sizes.max()
    if hit.sum() <= max(1, len(at) // 16):
        return f"only at position{'s' if hit.sum() > 1 else ''} {', '.join(str(p) for p in at[hit])}"
    first = int(np.argmax(hit))
    if first and hit[first:].mean() > 0.9 and sizes[:first].max() < 0.01 * sizes.max():
        return f"from position {at[first]} on, and nowhere before"
    quarter = len(at) // 4
    early, late = np.median(sizes[:quarter]), np.median(sizes[-quarter:])
    ranks = np.argsort(np.argsort(sizes))
    if late > GROWS * early and np.corrcoef(ranks, np.arange(len(at)))[0, 1] > MONOTONE:
        return f"grows with position: {digits(early, 2)} in the first quarter, {digits(late, 2)} in the last"
    return "at every position alike" if hit.mean() > 0.9 else ""


def describe_positions(left: Array, made: Array, axes: str, at: Array) -> str:
    """Say where ``left`` of ``made`` [T, H, K] is, of which sign, and how it depends on the value; nothing of none."""
    with np.errstate(invalid="ignore", over="ignore"):
        power = np.where(np.isfinite(left), left, 0.0) ** 2
    if not power.any():
        return ""
    found = [_slices_text(scope, power.sum(axis=over), at) for scope, over in _scopes(axes).items()]
    hit = power > 0
    share = float((power * (left * made > 0)).sum() / power.sum())
    if share > MOSTLY or share < 1 - MOSTLY:
        found.append(f"values come out too {'large' if share > MOSTLY else 'small'} in size")
    sizes = [np.argsort(np.argsort(np.abs(x[hit]).reshape(-1)[:SAMPLE])) for x in (left, made)]
    if len(sizes[0]) > FEW:
        grows = float(np.corrcoef(sizes[0], sizes[1])[0, 1])
        found.append("it grows with the value" if grows > MONOTONE else "it does not depend on the value's size")
        if abs(grows) >= 0.2 and grows <= MONOTONE:
            found.pop()
    return "; ".join(f for f in found if f)


def _scopes(axes: str) -> dict[str, tuple[int, ...]]:
    heads: dict[str, tuple[int, ...]] = {"head": (0, 2)} if axes in ("THK", "TGK", "HTS") else {}
    channels: dict[str, tuple[int, ...]] = {"key": (0, 1)} if axes == "HTS" else {"channel": (0,)}
    return heads | {"token": (1, 2)} | channels


def _slices_text(scope: str, power: Array, at: Array) -> str:
    """Say which few slices hold most of the power; nothing where it is spread."""
    flat = power.reshape(-1)
    order = np.argsort(-flat)
    n = int(np.searchsorted(np.cumsum(flat[order]), MOSTLY * flat.sum())) + 1
    if n > min(MANY, max(1, len(flat) // 8)) or len(flat) == 1:
        return ""
    index = sorted(int(at[i]) if scope == "token" else int(i) for i in order[:n])
    return (
        f"{100 * MOSTLY:.0f} % of it {'is' if n == 1 else 'are'} in {scope}{'s' if n > 1 else ''} {spans(tuple(index))}"
    )

"""What the best honest emulation leaves of an error, against the noise of honest programs (docs/numerics.md, excess).

All arrays are FP64 in the canonical layout [T, H, K]. ``left`` = c − ê. Noise is an ensemble: the deviations ê − r of
several honest ways to compute the same operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.metrics.sizes import MIN_CHANNEL_ROWS, norm
from precaudit.schema.records.base import Number, json_number
from precaudit.schema.records.errors import Scope, Signed

CONSTANT = 2.0**-24


def finite(x: Array) -> Array:
    """Return FP64 values with 0 for what is not finite; the same array where all is."""
    known = np.isfinite(x)
    return x if known.all() else np.where(known, x, 0.0)


def farthest(error: Array, left: Array, allowed: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest distance of an element of FP64 arrays [T, H, K] in bounds, and its index.

    Distance: from the reference (``error``) or from the emulation (``left``), whichever is nearer. Raises ValueError
    where there are no elements.
    """
    from precaudit.schema.metrics import _residue_kernel as kernel

    if not error.size:
        raise ValueError("nothing is farthest of no elements")
    flat = (kernel.as_kernel_input(x).reshape(-1) for x in (error, left, np.broadcast_to(allowed, error.shape)))
    worst, place = kernel.farthest_excess(*flat)
    return float(worst), tuple(int(i) for i in np.unravel_index(place, error.shape))


@dataclass(frozen=True)
class Noise:
    """An ensemble of M honest deviations from the reference r, pooled.

    ``power`` [T, H, K]: weighted mean square of the deviations; ``gains``, ``means`` [M, T, H]: Σₖ deviation · r and
    Σₖ deviation, times √weight; ``relative``: their rms size in the whole tensor over ‖r‖, at least u/√3 of the
    output's format; ``common``: a relative error that all elements may share, as that of a reciprocal or a constant;
    ``smallest``: what any element may be off by, where its format ends below. ``others``: gains and means [M, lines] of
    lines along other axes, whose elements may depend on each other as those of a row may.
    """

    power: Array
    gains: Array
    means: Array
    relative: float
    common: float = 0.0
    smallest: float = 0.0
    others: tuple[tuple[Array, Array], ...] = ()

    @classmethod
    def least(cls, rows: int, unit_roundoff: float, common: float = 0.0, smallest: float = 0.0) -> "Noise":
        """Return what any noise of [rows, 1, K] is at least, one rounding of the format; ``power`` is empty, 0."""
        nothing = np.zeros((0, rows, 1))
        return cls(nothing, nothing, nothing, unit_roundoff / 3**0.5, common, smallest)

    @classmethod
    def pool(
        cls,
        deviations: Sequence[Array],
        reference: Array,
        unit_roundoff: float,
        common: float = 0.0,
        weights: Sequence[float] | None = None,
        around: Array | None = None,
    ) -> "Noise":
        """Pool deviations [T, H, K] of honest realisations; what is not finite in one is no noise.

        ``weights`` add up to 1; None: all alike. ``around``: what realisations deviate from, where these are given.

        Rounding a value uniform over one binade makes relative errors of rms u/√3 at most.
        """
        from precaudit.schema.metrics._residue_kernel import (  # numba takes a third of a second to import
            as_kernel_input,
            pool,
        )

        power, n = np.zeros(reference.shape), len(deviations)
        sums = np.empty((2, n, *reference.shape[:2]))
        shown = as_kernel_input(finite(reference))
        middle = as_kernel_input(np.broadcast_to(0.0, reference.shape) if around is None else around)
        for i, (d, weight) in enumerate(zip(deviations, weights or [1 / n] * n, strict=True)):
            pool(as_kernel_input(d), middle, shown, weight**0.5, power, sums[:, i])
        size = norm(shown)
        relative = float(np.sqrt(power.sum())) / size if size else 0.0
        return cls(power, sums[0], sums[1], max(unit_roundoff / 3**0.5, relative), common)

    def doubting(self, deviation: Array, reference: Array) -> "Noise":
        """Return the noise with one more deviation [T, H, K] that may be there in full."""
        gain, mean = np.einsum("thk,thk->th", deviation, reference), deviation.sum(axis=2)
        return replace(
            self,
            power=self.power + deviation**2,
            gains=np.concatenate([self.gains, gain[None]]),
            means=np.concatenate([self.means, mean[None]]),
        )

    def rows(self, some: slice) -> "Noise":
        """Return the noise of some rows."""
        return replace(self, power=self.power[some], gains=self.gains[:, some], means=self.means[:, some])


@dataclass(frozen=True)
class SliceSums:
    """Σ left², Σ noise², Σ reference² of every token, head or channel."""

    left: Array
    noise: Array
    reference: Array

    def excess(self, noise: Noise, size: int) -> Array:
        """‖left‖ / √(‖noise‖² + (relative · ‖reference‖)² + n · smallest²) of every slice of n elements; 0/0 is 0.

        The second term stands for slices whose few realisations of noise happen to be small, the third for those below
        the smallest number of their format.
        """
        relative = np.hypot(noise.relative, noise.common)
        scale = np.sqrt(self.noise + relative**2 * self.reference + size * noise.smallest**2)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.left == 0, 0.0, np.sqrt(self.left) / scale)


@dataclass(frozen=True)
class Sums:
    """Sums of what is left, of noise and of the reference: ``cells`` and ``channels`` as the kernel names them."""

    cells: Array  # [9, T, H]
    channels: Array  # [3, H, K]

    @classmethod
    def of(cls, left: Array, noise: Noise, reference: Array) -> "Sums":
        """Add up FP64 arrays [T, H, K] in one pass."""
        from precaudit.schema.metrics._residue_kernel import CELLS, CHANNELS, add_sums, as_kernel_input

        cells, channels = np.zeros((CELLS, *left.shape[:2])), np.zeros((CHANNELS, *left.shape[1:]))
        add_sums(as_kernel_input(left), as_kernel_input(noise.power), as_kernel_input(reference), cells, channels)
        return cls(cells, channels)


def excesses(
    sums: Sums, noise: Noise, positions: Sequence[int] | Array, axes: str
) -> tuple[float, dict[str, tuple[Number, int]], dict[str, int]]:
    """Return the excess of the tensor, of the worst token, head and channel with its index, and how many of each.

    Tokens are named by position. Channels need 8 positions; points over keys or the vocabulary have none.
    """
    cells = sums.cells[:3]
    rows, heads, width = cells.shape[1], cells.shape[2], sums.channels.shape[2]
    whole = float(SliceSums(*(x.sum() for x in cells)).excess(noise, rows * heads * width))
    found = {"token": SliceSums(*(x.sum(axis=1) for x in cells)).excess(noise, heads * width)}
    if axes[-1] == "K" or axes == "HTS":
        found["head"] = SliceSums(*(x.sum(axis=0) for x in cells)).excess(noise, rows * width)
    if axes[-1] in "KDF" and rows >= MIN_CHANNEL_ROWS:
        found["channel"] = SliceSums(*(x.reshape(-1) for x in sums.channels)).excess(noise, rows)
    worst: dict[str, tuple[Number, int]] = {}
    for name, values in found.items():
        if values.size:
            i = int(np.argmax(values))
            worst[name] = (json_number(values[i]), int(positions[i]) if name == "token" else i)
    return whole, worst, {name: values.size for name, values in found.items()}


def gain_and_mean(sums: Sums, noise: Noise, heads: bool) -> tuple[dict[str, Signed], Scope]:
    """Return the signed gain ⟨left, r⟩ / ⟨r, r⟩ and mean of ``left``, each with its noise, and the worst heads'.

    The variance of a sum over a head is the largest of three that the ensemble gives: its elements independent, Σ(noise
    · w)²; its tokens independent (rows share a softmax or a norm), the mean over the ensemble of Σₜ(Σₖ noise · w)²
    (cluster-robust: Liang & Zeger 1986); or all alike (equal tokens round alike), the mean of (Σₜₖ noise · w)². To it
    come the term ``relative`` as if every
    element were independent, √Σ(relative · r · w)², with w = r for the gain and w = 1 for the mean, and what does not
    average out: a constant that was rounded to float32, such as 1/√K, may move every element by u, and an error
    ``common`` to all elements is a factor.
    """
    _, power, squares, gains, means, weighted, fourth, sizes, plain = sums.cells.sum(axis=1)
    n = float(sums.cells.shape[1] * sums.channels[0].size)
    each = np.full(len(sizes), n / len(sizes))
    parts = {
        # Σ left·w, the ensemble's sums, Σ noise²·w², Σ(r·w)², Σ w², Σ|r·w|, Σ r·w, scale
        "gain": (
            gains,
            (noise.gains, [x for x, _ in noise.others]),
            weighted,
            fourth,
            squares,
            squares,
            squares,
            float(squares.sum()),
        ),
        "mean": (means, (noise.means, [x for _, x in noise.others]), power, squares, each, sizes, plain, n),
    }
    whole: dict[str, Signed] = {}
    worst: Scope = {}
    for name, (total, (clusters, others), found, independent, weights, absolute, together, scale) in parts.items():
        variances = _variances(clusters, found, others) + noise.relative**2 * independent
        variances = variances + noise.smallest**2 * weights
        variances = variances + (CONSTANT * absolute) ** 2 + (noise.common * together) ** 2
        whole[name] = _signed_value(total, variances, _together(clusters), scale)
        if heads and len(total) > 1:
            with np.errstate(divide="ignore", invalid="ignore"):
                z = np.where(total == 0, 0.0, np.abs(total) / np.sqrt(variances))
            i = int(np.argmax(z))
            worst[name] = (json_number(z[i]), i)
    return whole, worst


def _variances(clusters: Array, found: Array, others: Sequence[Array] = ()) -> Array:
    """Return the variance of Σ noise · w of every head; ``found``: as if all elements were independent.

    ``others``: clusters along other axes, of an array that has no heads.
    """
    for lines in others:
        found = np.maximum(found, np.sum(lines**2))
    if len(clusters):
        apart = np.einsum("mth,mth->h", clusters, clusters)
        alike = (clusters.sum(axis=1) ** 2).sum(axis=0)
        found = np.maximum(found, np.maximum(apart, alike))
    return np.asarray(found)


def _together(clusters: Array) -> float:
    """Return the mean square over the ensemble of the sum over all tokens and heads."""
    return float((clusters.sum(axis=(1, 2)) ** 2).sum()) if len(clusters) else 0.0


def _signed_value(sums: Array, variances: Array, together: float, scale: float) -> Signed:
    if not scale:
        return Signed(value=0.0, noise=0.0)
    # a rounded constant moves all heads together: their standard deviations add at worst
    spread = max(variances.sum(), np.sqrt(variances).sum() ** 2 / len(variances), together) ** 0.5
    return Signed(value=json_number(sums.sum() / scale), noise=json_number(spread / scale))

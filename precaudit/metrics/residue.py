"""What the best honest emulation leaves of an error, against the noise of honest programs (docs/design.md §1, excess).

All arrays are FP64 in the canonical layout [T, H, K]. ``left`` = c − ê. Noise is an ensemble: the deviations ê − r of
several honest ways to compute the same operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from precaudit.arrays import Array
from precaudit.metrics.sizes import MIN_CHANNEL_ROWS, norm
from precaudit.records import Number, Scope, Signed, number

CONSTANT = 2.0**-24


@dataclass(frozen=True)
class Noise:
    """An ensemble of M honest deviations from the reference r, pooled.

    ``power`` [T, H, K]: weighted mean square of the deviations; ``gains``, ``means`` [M, T, H]: Σₖ deviation · r and
    Σₖ deviation, times √weight; ``relative``: their rms size in the whole tensor over ‖r‖, at least u/√3 of the
    output's format; ``common``: a relative error that all elements may share, as that of a reciprocal or a constant.
    """

    power: Array
    gains: Array
    means: Array
    relative: float
    common: float = 0.0

    @classmethod
    def pooled(
        cls,
        deviations: Sequence[Array],
        reference: Array,
        unit_roundoff: float,
        common: float = 0.0,
        weights: Sequence[float] | None = None,
    ) -> "Noise":
        """Pool deviations [T, H, K] of honest realisations; what is not finite in one is no noise.

        ``weights`` add up to 1; None: all alike.

        Rounding a value uniform over one binade makes relative errors of rms u/√3 at most.
        """
        power = np.zeros_like(reference)
        gains, means = [], []
        for d, weight in zip(deviations, weights or [1 / len(deviations)] * len(deviations), strict=True):
            clean = np.where(np.isfinite(d), d, 0.0) * weight**0.5
            power += clean * clean
            gains.append(np.einsum("thk,thk->th", clean, reference))
            means.append(clean.sum(axis=2))
        size = norm(reference)
        relative = float(np.sqrt(power.sum())) / size if size else 0.0
        return cls(power, np.array(gains), np.array(means), max(unit_roundoff / 3**0.5, relative), common)

    def doubting(self, deviation: Array, reference: Array) -> "Noise":
        """Return the noise with one more deviation [T, H, K] that may be there in full."""
        gain, mean = np.einsum("thk,thk->th", deviation, reference), deviation.sum(axis=2)
        return replace(
            self, power=self.power + deviation**2, gains=np.concatenate([self.gains, gain[None]]),
            means=np.concatenate([self.means, mean[None]]),
        )  # fmt: skip

    def rows(self, some: slice) -> "Noise":
        """Return the noise of some rows."""
        return replace(self, power=self.power[some], gains=self.gains[:, some], means=self.means[:, some])


@dataclass(frozen=True)
class Slices:
    """Σ left², Σ noise², Σ reference² of every token, head or channel."""

    left: Array
    noise: Array
    reference: Array

    def excess(self, relative: float) -> Array:
        """‖left‖ / √(‖noise‖² + (relative · ‖reference‖)²) of every slice; 0/0 is 0.

        The second term stands for slices whose few realisations of noise happen to be small.
        """
        scale = np.sqrt(self.noise + relative**2 * self.reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.left == 0, 0.0, np.sqrt(self.left) / scale)


def excesses(
    left: Array, noise: Noise, reference: Array, positions: Sequence[int] | Array, axes: str
) -> tuple[float, dict[str, tuple[Number, int]], dict[str, int]]:
    """Return the excess of the tensor, of the worst token, head and channel with its index, and how many of each.

    Tokens are named by position. Channels need 8 positions; points over keys or the vocabulary have none.
    """
    relative = float(np.hypot(noise.relative, noise.common))
    full = (left * left, noise.power, reference * reference)
    cells = [x.sum(axis=2) for x in full]
    whole = float(Slices(*(x.sum() for x in cells)).excess(relative))
    found = {"token": Slices(*(x.sum(axis=1) for x in cells)).excess(relative)}
    if axes[-1] == "K" or axes == "HTS":
        found["head"] = Slices(*(x.sum(axis=0) for x in cells)).excess(relative)
    if axes[-1] in "KDF" and len(left) >= MIN_CHANNEL_ROWS:
        found["channel"] = Slices(*(x.sum(axis=0).reshape(-1) for x in full)).excess(relative)
    worst: dict[str, tuple[Number, int]] = {}
    for name, values in found.items():
        if values.size:
            i = int(np.argmax(values))
            worst[name] = (number(values[i]), int(positions[i]) if name == "token" else i)
    return whole, worst, {name: values.size for name, values in found.items()}


def signed(left: Array, noise: Noise, reference: Array, heads: bool) -> tuple[dict[str, Signed], Scope]:
    """Return the signed gain ⟨left, r⟩ / ⟨r, r⟩ and mean of ``left``, each with its noise, and the worst heads'.

    The variance of a sum over a head is the largest of three that the ensemble gives: its elements independent, Σ(noise
    · w)²; its tokens independent (rows share a softmax or a norm), the mean over the ensemble of Σₜ(Σₖ noise · w)²
    (cluster-robust: Liang & Zeger 1986); or all alike (equal tokens round alike), the mean of (Σₜₖ noise · w)². To it
    come the term ``relative`` as if every
    element were independent, √Σ(relative · r · w)², with w = r for the gain and w = 1 for the mean, and what does not
    average out: a constant that was rounded to float32, such as 1/√K, may move every element by u, and an error
    ``common`` to all elements is a factor.
    """
    ones = np.ones_like(reference)
    n = float(left.size)
    parts = {
        "gain": (noise.gains, reference, float(np.einsum("thk,thk->", reference, reference))),
        "mean": (noise.means, ones, n),
    }
    whole: dict[str, Signed] = {}
    worst: Scope = {}
    for name, (clusters, w, scale) in parts.items():
        sums = np.einsum("thk,thk->h", left, w)
        variances = _variances(clusters, noise, reference, w)
        whole[name] = _signed(sums, variances, _together(clusters), scale)
        if heads and left.shape[1] > 1:
            with np.errstate(divide="ignore", invalid="ignore"):
                z = np.where(sums == 0, 0.0, np.abs(sums) / np.sqrt(variances))
            i = int(np.argmax(z))
            worst[name] = (number(z[i]), i)
    return whole, worst


def _variances(clusters: Array, noise: Noise, reference: Array, w: Array) -> Array:
    """Return the variance of Σ noise · w of every head."""
    found = np.einsum("thk,thk->h", noise.power, w * w)
    if len(clusters):
        apart = np.einsum("mth,mth->h", clusters, clusters)
        alike = (clusters.sum(axis=1) ** 2).sum(axis=0)
        found = np.maximum(found, np.maximum(apart, alike))
    sizes = np.abs(reference * w)
    independent = noise.relative**2 * np.einsum("thk,thk->h", sizes, sizes)
    constant = (CONSTANT * sizes.sum(axis=(0, 2))) ** 2
    common = (noise.common * (reference * w).sum(axis=(0, 2))) ** 2
    return np.asarray(found + independent + constant + common)


def _together(clusters: Array) -> float:
    """Return the mean square over the ensemble of the sum over all tokens and heads."""
    return float((clusters.sum(axis=(1, 2)) ** 2).sum()) if len(clusters) else 0.0


def _signed(sums: Array, variances: Array, together: float, scale: float) -> Signed:
    if not scale:
        return Signed(value=0.0, noise=0.0)
    # a rounded constant moves all heads together: their standard deviations add at worst
    spread = max(variances.sum(), np.sqrt(variances).sum() ** 2 / len(variances), together) ** 0.5
    return Signed(value=number(sums.sum() / scale), noise=number(spread / scale))

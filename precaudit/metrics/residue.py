"""What the best honest emulation leaves of an error, against the noise of honest programs (docs/design.md §1, excess).

All arrays are FP64 in the canonical layout [T, H, K]. ``left`` = c − ê. ``noise`` = the emulated policy's own error
with sums in another order: a realisation of what an honest program may do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precaudit.formats import Array
from precaudit.metrics.sizes import MIN_CHANNEL_ROWS, norm
from precaudit.records import Number, Scope, Signed, number

CONSTANT = 2.0**-24


@dataclass(frozen=True)
class Slices:
    """Σ left², Σ noise², Σ reference² of every token, head or channel."""

    left: Array
    noise: Array
    reference: Array

    def excess(self, relative: float) -> Array:
        """‖left‖ / √(‖noise‖² + (relative · ‖reference‖)²) of every slice; 0/0 is 0.

        The second term stands for slices whose one realisation of noise happens to be small.
        """
        scale = np.sqrt(self.noise + relative**2 * self.reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.left == 0, 0.0, np.sqrt(self.left) / scale)


def relative_noise(noise: Array, reference: Array, unit_roundoff: float) -> float:
    """Return ‖noise‖ / ‖reference‖ of the tensor, at least u/√3: the rms of rounding once to the output's format.

    Rounding a value uniform over one binade makes relative errors of rms u/√3 at most.
    """
    size = norm(reference)
    return max(unit_roundoff / 3**0.5, norm(noise) / size if size else 0.0)


def excesses(
    left: Array, noise: Array, reference: Array, relative: float, positions: Sequence[int] | Array, axes: str
) -> tuple[float, dict[str, tuple[Number, int]]]:
    """Return the excess of the tensor, and of the worst token, head and channel with its index.

    Tokens are named by position. Channels need 8 positions; points over keys or the vocabulary have none.
    """
    cells = [np.einsum("thk,thk->th", x, x) for x in (left, noise, reference)]
    whole = float(Slices(*(x.sum() for x in cells)).excess(relative))
    found = {"token": Slices(*(x.sum(axis=1) for x in cells)).excess(relative)}
    if axes[-1] == "K" or axes == "HTS":
        found["head"] = Slices(*(x.sum(axis=0) for x in cells)).excess(relative)
    if axes[-1] in "KDF" and len(left) >= MIN_CHANNEL_ROWS:
        sums = [np.einsum("thk,thk->hk", x, x).reshape(-1) for x in (left, noise, reference)]
        found["channel"] = Slices(*sums).excess(relative)
    worst: dict[str, tuple[Number, int]] = {}
    for name, values in found.items():
        if values.size:
            i = int(np.argmax(values))
            worst[name] = (number(values[i]), int(positions[i]) if name == "token" else i)
    return whole, worst


def signed(
    left: Array, noise: Array, reference: Array, relative: float, heads: bool
) -> tuple[dict[str, Signed], Scope]:
    """Return the signed gain ⟨left, r⟩ / ⟨r, r⟩ and mean of ``left``, each with its noise, and the worst heads'.

    The noise of a sum is that of the honest realisation, its tokens independent (rows share a softmax or a norm):
    √Σₜ(Σ noise · w)², and the term ``relative`` as if every element were independent, √Σ(relative · r · w)², with
    w = r for the gain and w = 1 for the mean (cluster-robust variance: Liang & Zeger 1986). To it comes what does not
    average out: a constant that was rounded to float32, such as 1/√K, scales every element by up to 1 ± u.
    """
    power = np.einsum("thk,thk->h", reference, reference)
    count = float(left.shape[0] * left.shape[2])
    gain = _sums(left, noise, reference, reference, relative)
    mean = _sums(left, noise, reference, np.ones_like(reference), relative)
    n = count * left.shape[1]
    whole = {"gain": _signed(gain, float(power.sum())), "mean": _signed(mean, n)}
    worst: Scope = {}
    if heads and left.shape[1] > 1:
        for name, (sums, variances) in (("gain", gain), ("mean", mean)):
            with np.errstate(divide="ignore", invalid="ignore"):
                z = np.where(sums == 0, 0.0, np.abs(sums) / np.sqrt(variances))
            i = int(np.argmax(z))
            worst[name] = (number(z[i]), i)
    return whole, worst


def _sums(left: Array, noise: Array, reference: Array, w: Array, relative: float) -> tuple[Array, Array]:
    """Return Σ left · w and the variance of such a sum, of every head."""
    clusters = np.einsum("thk,thk->th", noise, w)
    sizes = np.abs(reference * w)
    independent = relative**2 * np.einsum("thk,thk->h", sizes, sizes)
    constant = (CONSTANT * sizes.sum(axis=(0, 2))) ** 2
    return np.einsum("thk,thk->h", left, w), np.einsum("th,th->h", clusters, clusters) + independent + constant


def _signed(parts: tuple[Array, Array], scale: float) -> Signed:
    sums, variances = parts
    if not scale:
        return Signed(value=0.0, noise=0.0)
    # a rounded constant moves all heads together: their standard deviations add at worst
    spread = max(np.sqrt(variances.sum()), np.sqrt(variances).sum() / np.sqrt(len(variances)))
    return Signed(value=number(sums.sum() / scale), noise=number(spread / scale))

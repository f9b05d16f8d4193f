"""Whether an emulation closes: what it leaves of an operation passes the gate's own limits."""

from dataclasses import dataclass, replace

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import local_checks
from precaudit.schema.metrics.axes import WorstSlice, as_scopes, worst_slices
from precaudit.schema.metrics.residue import Noise, Sums, excesses, farthest, finite, gain_and_mean
from precaudit.schema.metrics.sizes import norm, own_index, ratio, smallest_normal
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import EmulatedError, LocalError, Scope, Unexplained

SINGLE = FORMATS["float32"].unit_roundoff
UNROUNDED = 0.9  # share of an error that an input read unrounded must explain
SOME = 0.5  # of what rounding an input moves a result by, that ties where it was made may
TIES = 2.0  # times u·|A||B|, that FP64 may be off a tie of a format below float32 for its rounding to go either way


@dataclass(frozen=True)
class Residue:
    """What an emulation leaves: of the tensor, of the worst of every scope, and how many slices there are."""

    unexplained: Unexplained
    scopes: dict[str, Scope]
    slices: dict[str, int]


@dataclass(frozen=True)
class Remainder:
    """What an emulation leaves: its sums, its norm over the reference's, and where it is farthest, as of ``farthest``.

    ``slices``: the worst slices of an array whose axes nobody has named.
    """

    sums: Sums
    share: float
    far: tuple[float, tuple[int, ...]]
    slices: dict[str, WorstSlice] | None = None


@dataclass(frozen=True)
class Yardstick:
    """A recorded operation and what honest programs leave of it, all canonical [T, H, K] in FP64.

    ``allowed``: the componentwise bound; ``fused``: that of an emulation whose inputs were not rounded as recorded;
    ``hidden``: what is masked [T, 1, S]. ``sums``: by how much float32 sums may be off where nothing else is rounded
    before a result below float32 is; None elsewhere. ``shape``: the point's own, where nobody has named its axes.
    """

    axes: str
    dtype: str
    positions: Array
    candidate: Array
    reference: Array
    noise: Noise
    allowed: Array
    fused: Array | None = None
    hidden: Array | None = None
    sums: Array | None = None
    shape: tuple[int, ...] | None = None

    def rows(self, some: slice) -> "Yardstick":
        """Return the yardstick of some rows."""
        cut = {name: getattr(self, name)[some] for name in ("positions", "candidate", "reference", "allowed")}
        fused, hidden, sums = (None if x is None else x[some] for x in (self.fused, self.hidden, self.sums))
        return replace(self, **cut, noise=self.noise.rows(some), fused=fused, hidden=hidden, sums=sums)

    def reading_unrounded(self, made: Array, rounded: Array) -> "Yardstick":
        """Return the yardstick of an emulation that reads an input as it was before it was rounded.

        ``made``, ``rounded``: what it makes of the input unrounded and rounded [T, H, K]. What made the input rounds
        itself, and a rounding that falls the other way there moves it by some of what rounding it would: that is noise,
        if nearly all of the error is explained so, or of two rows and most: one program made them all, and a rounding
        that fell the other way is in few. Where it is not, nothing says that the input was read unrounded.
        """
        error, left = self._visible(self.candidate - self.reference), self._visible(self.candidate - made)
        sizes = np.sum(error**2, axis=(1, 2))
        rows = (sizes > 0) & (np.sum(left**2, axis=(1, 2)) <= (1 - UNROUNDED) * sizes)
        most = rows.sum() > max(1, len(rows) / 2)
        if self.fused is None or not (most or norm(left) ** 2 <= (1 - UNROUNDED) * norm(error) ** 2):
            return self
        shift = np.clip(SOME * self._visible(made - rounded), -self.fused, self.fused)
        noise = self.noise.doubting(shift, self._visible(self.reference))
        return replace(self, allowed=self.fused, noise=noise)

    def doubting(self, emulated: Array, doubt: float, without: Array | None = None) -> "Yardstick":
        """Return the yardstick where a part of an emulation's error is not known.

        ``without``: what it makes without what is not known of it (None: the reference).
        """
        if not doubt:
            return self
        unknown = self._visible(doubt * (emulated - (self.reference if without is None else without)))
        noise = self.noise.doubting(unknown, self._visible(self.reference))
        return replace(self, noise=noise, allowed=self.allowed + np.abs(unknown))

    def residue(self, emulated: Array) -> Residue:
        """Return what ``emulated`` [T, H, K] leaves; what is not finite, or masked, is in no number."""
        error, left = self._visible(self.candidate - self.reference), self._visible(self._remainder(emulated))
        reference = self._visible(self.reference)
        share = ratio(norm(left), norm(reference))
        far = farthest(error, left, self.allowed)
        sums = Sums.of(left, self.noise, reference)
        found = None
        if self.shape is not None:
            mine, power, its = (x.reshape(self.shape) for x in (left, self.noise.power, reference))
            found = worst_slices(mine, power, its, self.noise)
        return residue_of(Remainder(sums, share, far, found), self.noise, self.positions, self.axes, self.dtype)

    def _remainder(self, emulated: Array) -> Array:
        """Return candidate − emulation, 0 where FP64 lies so near the tie between both that float32 sums cross it.

        Where an emulation is not finite, candidate − reference: what is finite nonetheless is none of its making.
        """
        return left_of(self.candidate, emulated, self.reference, self.sums, self.dtype)

    def _visible(self, x: Array) -> Array:
        with np.errstate(invalid="ignore"):
            clean = finite(x)
        return clean if self.hidden is None else np.where(self.hidden, 0.0, clean)

    def badness(self, emulated: Array, found: Residue | None = None) -> float:
        """Return the largest of the gate's numbers over its limit when this emulation is the best; ≤ 1: it closes.

        ``found``: what it leaves, where that is known. Infinite where the emulation and the candidate are not finite at
        the same places.
        """
        if not np.array_equal(np.isfinite(emulated), np.isfinite(self.candidate)):
            return float("inf")
        found = found or self.residue(emulated)
        e = LocalError(
            prompt="",
            phase="",
            step=0,
            layer=None,
            point="",
            candidate="",
            reference="",
            dtype=self.dtype,
            n=self.candidate.size,
            unexplained=found.unexplained,
            scopes=found.scopes,
            slices=found.slices,
        )
        return badness(e)


def left_of(candidate: Array, emulated: Array, reference: Array, sums: Array | None, dtype: str) -> Array:
    """Return candidate − emulation of FP64 arrays; ``sums``: how far off a tie float32 sums may be, as a yardstick has.

    0 where FP64 lies so near the tie between both; candidate − reference where the emulation is not finite.
    """
    if sums is None:
        known = np.isfinite(emulated)
        with np.errstate(invalid="ignore"):  # equal infinities of a mask
            difference: Array = candidate - (emulated if known.all() else np.where(known, emulated, reference))
        return difference
    from precaudit.schema.metrics._residue_kernel import (  # numba takes a third of a second to import
        as_kernel_input,
        left_over,
    )

    out = np.empty(np.broadcast_shapes(candidate.shape, emulated.shape))
    flat = (as_kernel_input(np.broadcast_to(x, out.shape)).reshape(-1) for x in (candidate, emulated, reference, sums))
    left_over(*flat, smallest_normal(dtype), FORMATS[dtype].unit_roundoff, out.reshape(-1))
    return out


def residue_of(left: Remainder, noise: Noise, positions: Array, axes: str, dtype: str) -> Residue:
    """Return a remainder beside the noise of honest programs."""
    whole, worst, slices = excesses(left.sums, noise, positions, axes)
    if left.slices is not None:
        worst, slices = as_scopes(left.slices)
    tensor, by_head = gain_and_mean(left.sums, noise, axes[-1] == "K" or axes == "HTS")
    scopes: dict[str, Scope] = {name: {"excess": found} for name, found in worst.items()}
    if by_head:
        scopes["head"] |= by_head
    found = Unexplained(
        rel_l2=json_number(left.share),
        u=json_number(left.share / FORMATS[dtype].unit_roundoff),
        excess=json_number(whole),
        gain=tensor["gain"],
        mean=tensor["mean"],
        componentwise=(json_number(left.far[0]), own_index(left.far[1], axes)),
    )
    return Residue(found, scopes, slices)


def badness(e: EmulatedError) -> float:
    """Return the largest of a local record's numbers over its default limit; NaN counts as infinite."""
    sizes = [found / limit for _, _, found, limit, _ in local_checks(e, default_limits().local(e.dtype))]
    return max((x if x == x else float("inf") for x in sizes), default=float("inf"))

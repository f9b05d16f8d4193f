"""A recorded operation to try variants on, and what one of them answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from precaudit.models.numpy_decoder.rounding import FP64, Rounding
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.references.closing import Yardstick
from precaudit.references.mutations.forms import Form, Inputs, evaluate_form
from precaudit.references.mutations.variants import Variant
from precaudit.schema.metrics.residue import Noise
from precaudit.schema.metrics.sizes import canonical, half_ulp, norm, ratio

ENOUGH = 0.9  # share of the error from which single roundings that fell otherwise are allowed for
DRAWS = 8  # of inputs moved by MOVED, relative: as far as float32 arithmetic moves what is rounded next
MOVED = 2.0**-21
LESS = 0.5  # share of what is left of the error, squared, up to which far less is left


@dataclass(frozen=True)
class Tried:
    """A variant's answer: the share of the error it reproduces, of the elements it gives bit for bit, and badness.

    ``badness``: the largest of the gate's numbers for what it leaves, over their limits; at most 1: it closes.
    """

    variant: Variant
    explained: float
    equal: float
    badness: float = float("inf")

    @property
    def closes(self) -> bool:
        """Whether the gate would pass what it leaves."""
        return self.badness <= 1.0

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Exact formulas before fitted ones, then bits, then badness."""
        return (self.variant.fitted, -round(self.equal, 3), round(self.badness, 2))


@dataclass(frozen=True)
class Bench:
    """Rows of an operation to try variants on: what it read, how the policy may round, and what it has to reach.

    ``members``: the ensemble of honest roundings that noise is taken from; ``others``: inputs as they were before they
    were rounded to be stored, which a compiler may have kept; ``formula``: FP64, with what a policy means by integers.
    ``stored``: the inputs as they were recorded, where ``inputs`` are those before one of them was rounded.
    """

    inputs: Inputs
    axes: str
    roundings: tuple[Rounding, ...]
    yardstick: Yardstick
    members: tuple[Rounding, ...]
    others: tuple[Inputs, ...] = ()
    formula: Rounding = FP64
    stored: Inputs | None = None

    def rows(self, some: slice) -> "Bench":
        """Return some of the rows."""
        return replace(
            self,
            inputs=self.inputs.rows(some),
            yardstick=self.yardstick.rows(some),
            others=tuple(i.rows(some) for i in self.others),
            stored=None if self.stored is None else self.stored.rows(some),
        )

    def reading(self, variants: Sequence[Variant]) -> "Bench":
        """Return the bench that reads an input as it was before it was rounded, where one of variants then leaves less.

        Far less, that is, than each of them of what was recorded: a fault too small to show beside what one rounding of
        an input moves is found only so.
        """
        benches = [self, *(replace(self, inputs=other, stored=self.inputs, others=()) for other in self.others)]
        left = [min(1.0 - b.answer(v, b.nearest(v)).explained for v in variants) for b in benches]
        i = int(np.argmin(left))
        return benches[i] if left[i] < LESS * left[0] else self

    def make(self, form: Form, r: Rounding, ahead: int = 0) -> Array:
        """Return what a form makes, canonical; what was recorded where it is masked or reads what was not recorded."""
        out = canonical(evaluate_form(form, self.inputs, r), self.axes)
        blind = self.blind(ahead)
        if blind.any() and not blind.all():
            out = np.where(blind[:, None, None], self.yardstick.candidate, out)
        hidden = self.yardstick.hidden
        return out if hidden is None else np.where(hidden, self.yardstick.candidate, out)

    def blind(self, ahead: int) -> Array:
        """Return the rows [T] of which a key so far ahead was not recorded."""
        keys = self.inputs.values[0].shape[2] if self.inputs.row.kind == "softmax" else len(self.inputs.values[-1])
        return (
            np.asarray(self.inputs.positions + ahead >= keys)
            if ahead > 0
            else np.zeros(len(self.inputs.positions), bool)
        )

    def nearest(self, variant: Variant) -> Array:
        """Return what a variant makes under the elision that comes nearest."""
        outs = [self.make(variant.form, variant.change(r), variant.ahead) for r in self.roundings]
        return min(outs, key=lambda y: -self.answer(variant, y).explained)

    def answer(self, variant: Variant, y: Array) -> Tried:
        """Return the share of candidate − FP64 that y reproduces, over what is finite; NaN must fall together."""
        c, reference = self.yardstick.candidate, self.yardstick.reference
        same = np.isfinite(c) == np.isfinite(y)
        if not same.all():
            return Tried(variant, -float(np.mean(~same)), 0.0)
        fit = np.isfinite(c) & np.isfinite(reference)
        if self.yardstick.hidden is not None:
            fit &= ~self.yardstick.hidden
        error = float(np.sum((c - reference)[fit] ** 2))
        left = float(np.sum((c - y)[fit] ** 2))
        share = 1.0 - left / error if error else 1.0 if left == 0 else 0.0
        return Tried(variant, share, float(np.mean((c == y)[fit])) if fit.any() else 1.0)

    def try_variant(self, variant: Variant, floor: float = 0.0) -> Tried:
        """Return a variant's answer; its badness where it reproduces more than ``floor``."""
        y = self.nearest(variant)
        found = self.answer(variant, y)
        if found.explained <= floor and floor < 1.0:
            return found
        measure = self.measure(variant)
        if self.stored is not None:
            measure = measure.reading_unrounded(y, replace(self, inputs=self.stored).nearest(variant))
        badness = measure.badness(y)
        for other in self.others if badness > 1.0 and found.explained >= ENOUGH else ():
            wide = replace(self, inputs=other).nearest(variant)
            badness = min(badness, measure.reading_unrounded(wide, y).badness(wide))
        if badness > 1.0 and found.explained >= ENOUGH:
            badness = min(badness, measure.badness(self.flip_near_ties(variant, y)))
        return replace(found, badness=badness)

    def measure(self, variant: Variant) -> Yardstick:
        """Return what honest programs leave of a variant: of another formula, with the policy's rounding in it.

        A narrower format has no more noise for that.
        """
        if variant.kind != "semantics":
            return self.yardstick
        old, dtype = self.yardstick, self.yardstick.dtype
        reference = self.make(variant.form, self.formula, variant.ahead)
        clean = np.where(np.isfinite(reference), reference, 0.0)
        shown = clean if old.hidden is None else np.where(old.hidden, 0.0, clean)
        with np.errstate(invalid="ignore"):
            deviations = [self.make(variant.form, r, variant.ahead) - reference for r in self.members]
        noise = Noise.pool(deviations, shown, FORMATS[dtype].unit_roundoff, old.noise.common)
        larger = max(ratio(norm(shown), norm(np.nan_to_num(old.reference))), 1.0)
        inner = old.allowed - half_ulp(old.reference, dtype)
        # what the announced formula makes exactly 0, as keys outside a window, has no bound of its own: its row's has
        nothing = old.reference == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(nothing, 0.0, inner / np.abs(old.reference)).max(axis=-1, keepdims=True)
        bound = np.where(nothing, np.maximum(inner, relative * np.abs(clean)), inner) * larger
        return replace(old, reference=reference, noise=noise, allowed=bound + half_ulp(clean, dtype))

    def flip_near_ties(self, variant: Variant, y: Array) -> Array:
        """Return ``y`` with elements as near to the candidate as roundings take them that fall otherwise.

        A sum in float32 may end on the other side of a number that a narrower format rounds to, here or inside.
        """
        rng = np.random.default_rng(0)
        lowest, highest = y.copy(), y.copy()
        for _ in range(DRAWS):
            values = tuple(x * (1 + MOVED * rng.uniform(-1, 1, x.shape)) for x in self.inputs.values)
            z = replace(self, inputs=replace(self.inputs, values=values)).nearest(variant)
            np.fmin(lowest, z, out=lowest)
            np.fmax(highest, z, out=highest)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(y), np.clip(self.yardstick.candidate, lowest, highest), y)

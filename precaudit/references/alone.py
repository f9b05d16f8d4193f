"""One array against its FP64 values, judged alone: the error record, its yardstick, and what is off."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from precaudit.numbers.arrays import Array, rounder, widen
from precaudit.numbers.formats import FORMATS
from precaudit.references.closing import SINGLE, Yardstick
from precaudit.schema.limits import default_limits
from precaudit.schema.metrics.residue import Noise
from precaudit.schema.metrics.sizes import Difference, canonical, half_ulp, norm, ratio, sizes
from precaudit.schema.records.base import json_number, value
from precaudit.schema.records.errors import LocalError, Worst

SPREAD = 4  # root mean squares of honest noise that one element is allowed before the limit


@dataclass(frozen=True)
class MeasuredArray:
    """A candidate against its reference: the record that is judged, the yardstick, and the reference rounded once.

    ``bad``: where one is not finite, in the candidate's shape.
    """

    record: LocalError
    yard: Yardstick
    honest: Array
    shape: tuple[int, ...]
    bad: Array

    @property
    def expected(self) -> float:
        """The relative error that honest rounding makes."""
        return ratio(float(np.sqrt(self.yard.noise.power.sum())), norm(self.yard.reference))

    @property
    def off(self) -> int:
        """How many elements are off by more than rounding may."""
        y = self.yard
        nearest = np.minimum(np.abs(y.candidate - y.reference), np.abs(y.candidate - self.honest))
        return int((nearest > default_limits().local(y.dtype).componentwise.at(nearest.size) * y.allowed).sum())


def measure_alone(
    stored: Array, reference: Array, spread: Sequence[Array], name: str, ties: bool = False
) -> MeasuredArray:
    """Return an array's local error, as comparing a run would record it.

    ``stored``: in its own format; ``reference``: FP64 of its shape; ``spread``: what honest programs make of the same
    inputs, FP64, before the result is rounded to the format. The last two axes of three or more are head and channel,
    those before them tokens. ``ties``: nothing in ``spread`` rounds to less than float32, so that of a narrower format
    nothing is said where FP64 lies so near a tie that those realisations fall on either side of it.
    """
    shape, form = stored.shape, FORMATS[stored.dtype.name]
    axes = "THK" if len(shape) > 2 else "TD"
    rows = stored.reshape((-1, *shape[-2:]) if len(shape) > 2 else (-1, shape[-1] if shape else 1))
    r = canonical(reference.reshape(rows.shape), axes)
    d, round_to = Difference.of(canonical(rows, axes), r), rounder(form.name)
    rounded = round_to(r)
    emulated = np.where(np.isfinite(rounded), rounded, r)  # what overflows in the format is no noise
    moved = [y.reshape(r.shape) - r for y in spread]
    noise = Noise.pool([emulated - r, *(round_to(r + m) - r for m in moved)], d.reference, form.unit_roundoff)
    rms = np.sqrt(np.mean([np.where(np.isfinite(m), m, 0.0) ** 2 for m in moved], axis=0)) if moved else 0.0
    allowed = half_ulp(d.reference, form.name) + SPREAD * rms
    sums = np.broadcast_to(SPREAD * rms, r.shape) if ties and form.unit_roundoff > SINGLE else None
    yard = Yardstick(
        axes, form.name, np.arange(len(rows)), d.reference + d.error, d.reference, noise, allowed, sums=sums
    )
    honest = np.where(np.isfinite(emulated), emulated, d.reference)
    found = yard.residue(honest)
    numbers = sizes(rows, r, axes, range(len(rows)))
    for scope, more in found.scopes.items():
        numbers["scopes"].setdefault(scope, {}).update(more)
    numbers["worst"] = _worst(numbers["worst"], stored, reference, d.nonfinite)
    most = found.unexplained.componentwise
    assert most is not None
    at = int(np.ravel_multi_index(most[1], rows.shape))
    if not d.nonfinite and value(most[0]) > default_limits().local(form.name).componentwise.at(rows.size):
        worst = (json_number(widen(stored).reshape(-1)[at]), json_number(reference.reshape(-1)[at]))
        numbers["worst"] = Worst(index=_index(at, shape), candidate=worst[0], reference=worst[1])
    unexplained = msgspec.structs.replace(found.unexplained, componentwise=(most[0], _index(at, shape)))
    record = LocalError(
        prompt="",
        phase="",
        step=0,
        layer=None,
        point=name,
        candidate=name,
        reference="fp64",
        unexplained=unexplained,
        slices=found.slices,
        ratio=json_number(ratio(norm(d.error), norm(emulated - r))),
        **numbers,
    )
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(widen(stored) - reference) & (widen(stored) != reference)
    return MeasuredArray(record, yard, honest, shape, bad)


def _worst(found: Worst, stored: Array, reference: Array, nonfinite: int) -> Worst:
    """Return the worst element, the first NaN or infinity if there is one, with its index in the candidate's shape."""
    wide = widen(stored).reshape(-1)
    flat = reference.reshape(-1)
    if nonfinite:
        at = int(np.flatnonzero(~np.isfinite(wide - flat) & (wide != flat))[0])
    else:
        index = found.index
        rows = (-1, *stored.shape[-2:]) if stored.ndim > 2 else (-1, stored.shape[-1] if stored.shape else 1)
        at = int(np.ravel_multi_index(index, stored.reshape(rows).shape))
    return Worst(index=_index(at, stored.shape), candidate=json_number(wide[at]), reference=json_number(flat[at]))


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))

"""An array alone against its reference: which slices hold the error, its scale, and what would have made it. No JAX."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.accumulation import accumulating
from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.formats import FORMATS
from precaudit.schema.digits import digits
from precaudit.schema.metrics.sizes import explained_share, norm

HOLDS = 0.9  # share of an error's square that slices must hold to be told
FEW = 4  # slices that are told, and the share of an axis (1 / FEW) that they may be
EXPLAINS = 0.9  # share of an error that what explains it reproduces
SUMS = ("bfloat16", "float16", "bfloat16/32", "float16/128")
SAME = 1e-10  # of two ways to multiply in FP64
STEPS = 1 << 30  # products of a sum that is emulated


class FewSlices(NamedTuple):
    """The few slices of an axis that hold most of an error."""

    axis: int
    indices: tuple[int, ...]
    share: float

    def cut(self, shape: tuple[int, ...]) -> tuple[slice | list[int], ...]:
        """Return the index of them all in an array."""
        return tuple(list(self.indices) if i == self.axis else slice(None) for i in range(len(shape)))


class Reproduction(NamedTuple):
    """What reproduces an error: in words, which share, and whether the rest is rounding."""

    says: str
    share: float
    closes: bool


@dataclass(frozen=True)
class Alone:
    """A candidate, its reference and what honest rounding makes of that, all FP64 in the candidate's shape.

    ``form``: the output's format; ``badness(ê)``: ≤ 1 where what ê leaves passes the limits; ``name``: of slices.
    """

    candidate: Array
    reference: Array
    honest: Array
    form: str
    badness: Callable[[Array], float]
    name: Callable[[FewSlices], str]
    inputs: Sequence[Array] = ()

    @property
    def left(self) -> Array:
        """The error that rounding does not make."""
        return self.candidate - self.honest

    def where(self) -> list[FewSlices]:
        """Return the slices that hold most of the error, of every axis where they are few; smallest share of it first.

        Slices whose values are large hold much of any error: they are told where they hold more than twice their part.
        """
        return main_slices(self.left**2, self.reference**2)

    def gain(self, where: FewSlices | None = None) -> float:
        """Return ⟨c − r, r⟩ / ⟨r, r⟩, of some slices or of the whole; 0 where the reference is 0."""
        cut = (...,) if where is None else where.cut(self.left.shape)
        c, r = self.candidate[cut], self.reference[cut]
        size = float(np.sum(r * r))
        return float(np.sum((c - r) * r)) / size if size else 0.0

    def explain(self) -> Reproduction | None:
        """Return what reproduces the error best, what leaves nothing but rounding first; None where nothing does."""
        best: Reproduction | None = None
        size = norm(self.candidate - self.reference)
        for says, made in self._variants():
            share = explained_share(self.candidate, size, made)
            if not share >= EXPLAINS or (best is not None and share <= best.share):
                continue
            best = Reproduction(says, share, self.badness(made) <= 1)
            if best.closes:
                return best
        return best

    def _variants(self) -> Iterator[tuple[str, Array]]:
        """Yield what may have been done instead: other formats, cut digits, sums in narrow formats, a scale."""
        r, round_to = self.reference, rounder(self.form)
        own = FORMATS[self.form]
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
            if FORMATS[name].precision < own.precision:
                yield f"rounding to {name}", round_to(rounder(name)(r))
        yield "digits truncated, not rounded", _truncate(self.honest, r, self.form)
        for name, total in self._sums():
            yield f"sums in {name}", round_to(total)
        for where in (None, *self.where()):
            yield from self._scaled_slices(where)

    def _sums(self) -> Iterator[tuple[str, Array]]:
        """Yield the reference's product with narrow accumulators, where it is that of its two inputs."""
        found = _product(self.inputs, self.reference)
        if found is not None:
            for name in SUMS:
                yield name, _stacked_product(accumulating(name), *found, self.reference.shape)

    def _scaled_slices(self, where: FewSlices | None) -> Iterator[tuple[str, Array]]:
        """Yield the reference with some slices times the factor that fits, in three digits."""
        factor = float(f"{1 + self.gain(where):.3g}")
        if factor == 1:
            return
        what = "it" if where is None else self.name(where)
        says = f"{what} is zero" if factor == 0 else f"{what} is times {digits(factor)}"
        round_to = rounder(self.form)
        for base in (self.reference, self.honest):  # scaled before it was rounded, or after
            made = self.honest.copy()
            cut = (...,) if where is None else where.cut(made.shape)
            made[cut] = round_to(np.ascontiguousarray(base[cut] * factor))
            yield says, made


def main_slices(error: Array, reference: Array) -> list[FewSlices]:
    """Return the slices that hold most of what is given for every element; ``reference``: their part of the whole."""
    shape = error.shape
    found = (_few_slices(error, reference, axis) for axis in range(len(shape)) if shape[axis] > 1)
    return sorted((x for x in found if x is not None), key=lambda x: len(x.indices) / shape[x.axis])


def _few_slices(error: Array, reference: Array, axis: int) -> FewSlices | None:
    others = tuple(i for i in range(error.ndim) if i != axis)
    held, size = error.sum(axis=others), reference.sum(axis=others)
    if not held.sum():
        return None
    order = np.argsort(held)[::-1]
    n = 1 + int(np.searchsorted(np.cumsum(held[order]), HOLDS * held.sum()))
    if n > FEW or n > max(1, len(held) / FEW):
        return None
    share, part = float(held[order[:n]].sum() / held.sum()), float(size[order[:n]].sum() / (size.sum() or 1.0))
    return FewSlices(axis, tuple(sorted(int(i) for i in order[:n])), share) if share > 2 * part else None


def _truncate(rounded: Array, r: Array, form: str) -> Array:
    """Return values rounded toward zero: of those that were rounded away from it the neighbour."""
    narrow = rounded.astype(FORMATS[form].dtype)
    below = np.nextafter(narrow, np.zeros_like(narrow)).astype(np.float64)
    return np.where(np.abs(rounded) > np.abs(r), below, rounded)


def _product(inputs: Sequence[Array], reference: Array) -> tuple[Array, Array] | None:
    """Return two matrices, or stacks of them, whose product the reference is, the second transposed if need be."""
    if len(inputs) != 2 or any(x.ndim < 2 or x.dtype.kind != "f" for x in inputs):
        return None
    a, b = inputs
    if a.shape[-1] * reference.size > STEPS:
        return None
    for second in (b, b.swapaxes(-1, -2)):
        with np.errstate(all="ignore"):
            try:
                made = np.matmul(a, second)
            except ValueError:
                continue
        if made.shape == reference.shape and norm(made - reference) <= SAME * norm(reference):
            return a, second
    return None


def _stacked_product(dot: Callable[[Array, Array], Array], a: Array, b: Array, shape: tuple[int, ...]) -> Array:
    stacks = shape[:-2]
    left, right = (np.broadcast_to(x, (*stacks, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return np.stack([dot(x, y) for x, y in zip(left, right, strict=True)]).reshape(shape)

"""Results that are rounded to a few bits, or to integers."""

from collections.abc import Iterator

import numpy as np

from precaudit.models.numpy_decoder.rounding import Cast, Rounding
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.references.mutations.forms import quantiser
from precaudit.references.mutations.variants import Change, Variant, at
from precaudit.schema.graphs.point import Point
from precaudit.schema.policies import Policy

FEW = (6, 5, 4, 3)  # explicit bits of a mantissa that is cut


def to_bits(bits: int) -> Cast:
    """Return the function that keeps ``bits`` explicit bits of the mantissa, to nearest, ties to even."""

    def cut(x: Array) -> Array:
        fraction, exponent = np.frexp(x)
        return np.ldexp(np.rint(np.ldexp(fraction, bits + 1)), exponent - bits - 1)

    return cut


def other_roundings(row: Point, policy: Policy) -> Iterator[Variant]:
    """Yield an operation whose result is rounded to fewer bits, or to integers."""
    announced = policy.format_of(row.format)
    if announced not in FORMATS:
        return
    for bits in FEW:
        if bits + 1 < FORMATS[announced].precision:
            says = f"results have {bits} bits of a mantissa"
            yield Variant(
                f"result cut to {bits} bits", "format", says, change=_after(row.place, to_bits(bits)), last=True
            )
    for width in (8, 4):
        says = f"results are quantised to {width} bits, one scale a row"
        yield Variant(
            f"result in int{width}", "quantisation", says, change=_after(row.place, quantiser(width)), last=True
        )


def _after(place: str, then: Cast) -> Change:
    """Round a place as usual after ``then``."""

    def change(r: Rounding) -> Rounding:
        usual = getattr(r, place)
        return at(**{place: lambda x: usual(then(x))})(r)

    return change

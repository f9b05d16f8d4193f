"""Products whose terms lie on several devices: each makes its part, rounds it, and the parts are added."""

from collections.abc import Callable

from precaudit.numbers.arrays import Array
from precaudit.schema.records.devices import SplitSum

Dot = Callable[[Array, Array], Array]
WIDE = "float32"  # parts that are added in it are rounded once, with the sum


def dot_in_parts(split: SplitSum, rounded: Callable[[Array], Array], dot: Dot) -> Dot:
    """Return a matrix product [M, K] · [K, N] made in parts of K / parts terms that follow one another.

    ``rounded``: a part as its format holds it, and a sum of parts where these are added in a format of 16 bits;
    ``dot``: how a part is made. Where the parts do not divide K the product is whole, as on one device.
    """

    def product(a: Array, b: Array) -> Array:
        size, rest = divmod(a.shape[1], split.parts)
        if rest:
            return dot(a, b)
        total = rounded(dot(a[:, :size], b[:size]))
        for first in range(size, a.shape[1], size):
            total = total + rounded(dot(a[:, first : first + size], b[first : first + size]))
            total = total if split.summed == WIDE else rounded(total)
        return total

    return product

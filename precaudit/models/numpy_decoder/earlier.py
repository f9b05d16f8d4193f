"""What came before the rows of a sequence: keys and values that attention reads and nobody makes again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from precaudit.numbers.arrays import Array


@dataclass(frozen=True)
class Earlier:
    """A sequence whose first row is at position ``start``.

    ``kept``: keys and values [start, G, K] before it, by layer. ``mixed``: where these are not known, attention's
    output [T, H, K], by layer, which is taken as given. ``turned``: by so much more than its position RoPE turns every
    row, as where positions count padding before the sequence.
    """

    start: int = 0
    kept: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    mixed: Mapping[int, Array] = field(default_factory=dict)
    turned: int = 0

    def before(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Return a layer's keys and values of rows [T, G, K] with those before them."""
        if layer not in self.kept:
            return k, v
        keys, values = self.kept[layer]
        return np.concatenate([keys, k]), np.concatenate([values, v])


FIRST = Earlier()

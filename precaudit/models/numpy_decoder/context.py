"""What an operation needs besides its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array


@dataclass(frozen=True)
class Context:
    """What an operation needs besides its inputs.

    ``weight`` returns a tensor of this layer in FP64 by its name without the layer prefix (None: the model has none);
    ``positions`` [T] are those by which RoPE turns rows, ``lengths`` [T] how long their sequences were where it depends
    on that (None: within the original context); ``layer`` is None outside layers. ``out``: where the result may
    be made. ``first``: the number of the first row among those of all sequences.
    """

    config: DecoderConfig
    weight: Callable[[str], Array | None]
    positions: Array
    rounding: Rounding
    layer: int | None = None
    lengths: Array | None = None
    out: Array | None = None
    first: int = 0

    def rows(self, a: int, b: int) -> "Context":
        """Return the same for rows a to b."""
        lengths = None if self.lengths is None else self.lengths[a:b]
        return replace(self, positions=self.positions[a:b], lengths=lengths, first=self.first + a)

    def tensor(self, name: str) -> Array:
        """Return a tensor every model of the family has."""
        found = self.weight(name)
        assert found is not None, name
        return found


Operation = Callable[..., Array]

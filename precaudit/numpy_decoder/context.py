"""What an operation needs besides its inputs."""

from collections.abc import Callable
from dataclasses import dataclass

from precaudit.arrays import Array
from precaudit.configs import DecoderConfig
from precaudit.numpy_decoder.rounding import Rounding


@dataclass(frozen=True)
class Context:
    """What an operation needs besides its inputs.

    ``weight`` returns a tensor of this layer in FP64 by its name without the layer prefix (None: the model has none);
    ``positions`` [T] are the rows' positions in their sequences; ``layer`` is None outside layers.
    """

    config: DecoderConfig
    weight: Callable[[str], Array | None]
    positions: Array
    rounding: Rounding
    layer: int | None = None

    def tensor(self, name: str) -> Array:
        """Return a tensor every model of the family has."""
        found = self.weight(name)
        assert found is not None, name
        return found


Operation = Callable[..., Array]

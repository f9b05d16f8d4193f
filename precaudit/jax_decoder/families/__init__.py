"""What differs between model families: parts and parameter names, one file each."""

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from precaudit.jax_decoder.parts import Parts


@dataclass(frozen=True)
class Family:
    """``layer_tensors``: this decoder's names for a layer's tensors → checkpoint names without the layer prefix."""

    parts: Parts
    layer_tensors: dict[str, str]


def family(name: str) -> Family:
    """Return the family in ``jax_decoder/families/<name>.py``."""
    return cast(Family, import_module(f"{__name__}.{name}").FAMILY)

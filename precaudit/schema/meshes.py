"""A mesh of devices that a model runs on: prompts are cut over ``data``, heads and the MLP's width over ``model``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from precaudit.errors import UserError, close

MOST = 1 << 16  # devices of an axis: more are a mistake


@dataclass(frozen=True)
class MeshShape:
    """How many devices each axis has."""

    data: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return self.data * self.model

    @property
    def axes(self) -> dict[str, int]:
        """Its axes and their sizes, as run.json holds them."""
        return {"data": self.data, "model": self.model}

    def __str__(self) -> str:
        """Return it as ``--mesh`` takes it."""
        return ",".join(f"{name}={n}" for name, n in self.axes.items())

    def filled(self, rows: int) -> int:
        """Return how many rows a batch has that ``data`` divides: as many as are asked for, or the next more."""
        return -(-rows // self.data) * self.data


ONE = MeshShape()
AXES = tuple(f.name for f in fields(MeshShape))


def parse_mesh(text: str) -> MeshShape:
    """Return the mesh written ``data=2,model=4``; an axis that is not named has one device. Raises UserError."""
    found: dict[str, int] = {}
    for item in text.split(","):
        name, equals, size = (part.strip() for part in item.partition("="))
        if not equals or not name:
            raise UserError(f"--mesh {text}: write NAME=N[,NAME=N], such as data=2,model=4")
        if name not in AXES:
            raise UserError(f"--mesh {text}: unknown axis {name!r}; known: {', '.join(AXES)}{close(name, AXES)}")
        if name in found:
            raise UserError(f"--mesh {text}: {name} is there twice")
        if not re.fullmatch("[1-9][0-9]{0,8}", size) or int(size) > MOST:
            raise UserError(f"--mesh {text}: {name} is a number of devices from 1 to {MOST:,}, not {size!r}")
        found[name] = int(size)
    return MeshShape(**found)


def recorded_mesh(axes: Mapping[str, int]) -> MeshShape:
    """Return the mesh of a run, from its run.json; of one device where it says none."""
    return MeshShape(**{name: axes[name] for name in AXES if name in axes})

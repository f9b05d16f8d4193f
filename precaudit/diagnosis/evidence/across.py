"""A run's tokens on other meshes, as records: what each changes, point by point. No JAX here."""

from dataclasses import dataclass

from precaudit.schema.meshes import MeshShape
from precaudit.schema.places import Place
from precaudit.schema.records.devices import SplitSum

EQUAL, ROUNDING, BROKEN, UNKNOWN = "bits equal", "rounding", "broken", "unknown"
WORST = (EQUAL, ROUNDING, UNKNOWN, BROKEN)


@dataclass(frozen=True)
class PointAcross:
    """What another mesh changes at a point: in how many tensors, and where most; ``noises``: × honest noise there."""

    point: str
    status: str
    tensors: int
    differing: int = 0
    layer: int | None = None
    phase: str = ""
    distance: float = 0.0
    noises: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class PartedSum:
    """A sum over ``model`` devices at a point; ``split``: how its parts add, where they are rounded."""

    model: int
    point: str
    held: str
    split: SplitSum | None


@dataclass(frozen=True)
class AcrossMeshes:
    """A run's tokens on another mesh against the run, point by point.

    ``first``: the first tensor whose bits are others; ``sums``: those of parts until there that one of both makes so;
    ``fails``: the first whose own error fails on one of both and not on the other.
    """

    mesh: MeshShape
    points: tuple[PointAcross, ...]
    first: Place | None
    sums: tuple[PartedSum, ...]
    fails: Place | None = None

    @property
    def status(self) -> str:
        """The worst of its points; unknown where there are none."""
        return max((p.status for p in self.points), key=WORST.index, default=UNKNOWN)

"""One difference as an ErrorRecord."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precaudit.formats import Array
from precaudit.metrics.sizes import Difference, canonical, scopes, sizes
from precaudit.points import POINTS
from precaudit.records import ErrorRecord


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs."""

    prompt: str
    phase: str
    step: int
    layer: int | None
    point: str

    def record(self, kind: Any, candidate: str, reference: str, **numbers: Any) -> ErrorRecord:
        """Return an ErrorRecord here."""
        return ErrorRecord(
            prompt=self.prompt, phase=self.phase, step=self.step, layer=self.layer, point=self.point, kind=kind,
            candidate=candidate, reference=reference, **numbers,
        )  # fmt: skip


def measured(
    stored: Array, reference: Array, point: str, positions: Sequence[int] | Array, left: Array | None = None
) -> tuple[Difference, dict[str, Any]]:
    """Compare a recorded tensor with FP64 values of its shape; return the difference and the record's fields.

    ``left`` = c − ê in the canonical layout [T, H, K], where an emulation exists.
    """
    axes = POINTS[point].axes
    d = Difference.of(canonical(stored, axes), canonical(reference, axes))
    return d, sizes(d, stored, axes) | {"scopes": scopes(d, positions, axes, left)}

"""Where a tensor belongs, in any run."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from precaudit.graphs.decoder import POINTS
from precaudit.records import ErrorRecord

ORDER = {name: i for i, name in enumerate(POINTS)}
LAST = 1 << 30  # points outside layers come after them


class Place(NamedTuple):
    """A case (``prompt``), a call of it (``phase`` and ``step``), a layer (None outside layers) and a point."""

    prompt: str
    phase: str
    step: int
    layer: int | None
    point: str

    @classmethod
    def of(cls, x: Any) -> "Place":
        """Return where a record or verdict belongs."""
        return cls(x.prompt, x.phase, x.step, x.layer, x.point)

    @property
    def order(self) -> tuple[int, int]:
        """How far into the program the point is."""
        return (LAST if self.layer is None else self.layer, ORDER.get(self.point, len(ORDER)))

    @property
    def text(self) -> str:
        """It in words."""
        where = f"layer {self.layer} {self.point}" if self.layer is not None else self.point
        return f"{where} ({self.prompt} {self.phase} {self.step})" if self.prompt else where

    def record(self, kind: Any, candidate: str, reference: str, **numbers: Any) -> ErrorRecord:
        """Return an error record here."""
        return ErrorRecord(**self._asdict(), kind=kind, candidate=candidate, reference=reference, **numbers)


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers, runs of them as ``a to b``."""
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)

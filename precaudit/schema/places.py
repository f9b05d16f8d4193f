"""Where a tensor belongs, in any run."""

from collections.abc import Container, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.errors import E

ORDER = {name: i for i, name in enumerate(POINTS)}
ORDINALS = {2: "second", 3: "third"}
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
        return order_of(self.layer, self.point)

    @property
    def text(self) -> str:
        """It in words."""
        where = f"layer {self.layer} {self.point}" if self.layer is not None else self.point
        return f"{where} ({self.prompt} {self.phase} {self.step})" if self.prompt else where

    def record(self, kind: type[E], candidate: str, reference: str, **numbers: Any) -> E:
        """Return an error record of a kind here."""
        return kind(**self._asdict(), candidate=candidate, reference=reference, **numbers)


def case_of(prompt: str, cases: Container[str]) -> str:
    """Return which of some cases a record is of: of the case itself, or a sequence of its batch (``a, row 1``)."""
    return prompt if prompt in cases else prompt.rpartition(", row ")[0] or prompt


def point_text(x: Any) -> str:
    """Return where a record, a verdict or a finding is, whatever its call: ``q of layer 3``."""
    return str(x.point) if x.layer is None else f"{x.point} of layer {x.layer}"


def order_of(layer: int | None, point: str) -> tuple[int, int]:
    """Return how far into the program a point is: those outside layers come last."""
    return (LAST if layer is None else layer, ORDER.get(point, len(ORDER)))


def layers_text(layers: Iterable[int]) -> str:
    """Return ascending layers in words: ``layer 3``, ``layers 0 to 3``, ``every second layer from 1 to 7``."""
    found = list(layers)
    steps = {b - a for a, b in pairwise(found)}
    if len(found) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"every {ORDINALS.get(step, f'{step}th')} layer from {found[0]} to {found[-1]}"
    return f"layer{'s' if len(found) > 1 else ''} {spans(found)}"


def calls_text(steps: Iterable[int], calls: int) -> str:
    """Return in which of a program's calls something is: ``from call 8 on``, ``at calls 2, 5``; "" where in all."""
    found = sorted(set(steps))
    if not found or len(found) == calls:
        return ""
    if found == list(range(found[0], calls)):
        return f"from call {found[0]} on"
    return f"at call{'s' if len(found) > 1 else ''} {spans(found)}"


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers, runs of them as ``a to b``."""
    runs = (range(*run) for run in row_spans(numbers))
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def row_spans(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as [first, end) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for i in map(int, numbers):
        if runs and i == runs[-1][1]:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return tuple(runs)

"""A run and the same once more: are all tensors the same bits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import singledispatch
from itertools import product
from typing import Any

from precaudit.recording.runs.hashes import tensor_hash
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.schema.brief import Brief
from precaudit.schema.coverage import SUMS
from precaudit.schema.places import Place
from precaudit.schema.records.runs import PointRecord

KINDS = ("taps", "outputs")  # the files of a program's call that hold what it made


@dataclass(frozen=True, repr=False)
class Repeat(Brief):
    """The new run, how many tensors both hold, how many differ, and the first of those in program order."""

    run: Run | Opened
    tensors: int
    differing: int
    first: Place | None

    @property
    def where(self) -> str | None:
        """The first tensor that differs, in words; None where none does."""
        return None if self.first is None else self.first.text


def compare_bits(before: Any, again: Any) -> Repeat:
    """Compare every tensor of a run with the one at its place in another of its kind; one that is not there differs."""
    held = dict(_tensors(again))
    each = [(place, bits, held.get(place)) for place, bits in _tensors(before)]
    differing = [place for place, bits, other in each if bits != other]
    return Repeat(again, sum(x is not None for *_, x in each), len(differing), differing[0] if differing else None)


@singledispatch
def _tensors(run: Any) -> Iterator[tuple[Place, Any]]:
    """Yield every tensor of a run by its place, in program order, as what two of the same bits have in common."""
    raise TypeError(f"{type(run).__name__} holds no tensors that a program recorded")


@_tensors.register
def _(run: Run) -> Iterator[tuple[Place, Any]]:
    order: Mapping[str, int] = {phase: i for i, phase in enumerate(run.record.requested.phases)}

    def key(p: PointRecord) -> tuple[int, int, tuple[int, int]]:
        return order.get(p.phase, 0), p.step, Place.of(p)._replace(point=p.point.removesuffix(SUMS)).order

    for p in sorted(run.points, key=key):
        yield Place.of(p), (p.hash, p.shape, p.dtype)


@_tensors.register
def _(run: Opened) -> Iterator[tuple[Place, Any]]:
    for one in run.entries:
        kinds = KINDS if one.record.outputs else KINDS[:1]
        for case, call, kind in product(one.record.cases, range(one.record.calls), kinds):
            for name, x in one.tensors(case, call, kind).items():
                yield Place(case, one.record.phase, call, None, name), (tensor_hash(x), x.shape, str(x.dtype))

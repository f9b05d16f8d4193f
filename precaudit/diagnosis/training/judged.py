"""B's steps held against A's, and against how far correct makings of A's steps are from each other. No JAX."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from precaudit.diagnosis.training.distances import difference, relative_size, times_spread
from precaudit.diagnosis.training.groups import tensor_group
from precaudit.diagnosis.training.records import Group, TrainingMember, TrainingTensor, Where
from precaudit.diagnosis.training.values import EXACT, MEMBERS, NAMES, exact_file
from precaudit.models.checkpoints.safetensors_files import ANYTHING, SafetensorsFiles
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.programs import Opened
from precaudit.schema.metrics.sizes import norm
from precaudit.schema.records.base import json_number, value
from precaudit.schema.records.lines import read_lines

LIMIT = 4.0  # times the largest distance of members: what no correct making was found to leave


class Named(NamedTuple):
    """A tensor of a step as both sides have it, by A's name of it, and the name its FP64 values are written under."""

    where: Where
    name: str
    key: str
    a: Array
    b: Array


@dataclass(frozen=True)
class Side:
    """A side's run, and the folder of its chains."""

    opened: Opened
    chains: Path

    def exact(self, case: str, call: int) -> dict[str, Array]:
        """Return FP64's values of a call; nothing where they were not made."""
        path = self.chains / exact_file(self.opened.record.cases.index(case), call)
        if not path.is_file():
            return {}
        files = SafetensorsFiles.open([path], ANYTHING)
        return {name: files.read_tensor(name) for name in files.entries}


@dataclass
class Held:
    """Both sides held against each other: a record a tensor and step, and squares of distances by group and step."""

    good: Side
    bad: Side
    lacking: dict[str, None] = field(default_factory=dict)
    squares: dict[tuple[int, Group], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read how far members are apart, and how leaves of the state are called."""
        found = read_lines(self.good.chains / MEMBERS, TrainingMember)
        self.members = {(m.case, m.step, m.where, m.name): m for m in found}
        lines = (self.good.chains / NAMES).read_text().splitlines()
        self.names = dict(line.split(" ", 1) for line in lines)
        self.sources = {p.name: p.source for p in self.good.opened.record.points}
        self.moving = self._moving()
        self.parameters = {
            tuple(sorted(shape))
            for number, shape in self.moving.items()
            if tensor_group("state", self.names[number], shape, ()) == "parameters"
        }

    def _moving(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the leaves that rounding or B changes, or that are NaN: a state, and no batch."""
        case = self.good.opened.record.cases[0]
        rounded = {m.name for m in self.members.values() if m.where == "state" and value(m.spread) > 0}
        last = self.good.opened.record.calls - 1
        a, b = (s.opened.tensors(case, last, "inputs") for s in (self.good, self.bad))
        differ = {k for k in a.keys() & b.keys() if _floats(a[k]) and difference_of(a[k], b[k])}
        return {k: a[k].shape for k in a if k in rounded | differ or (_floats(a[k]) and np.isnan(widen(a[k])).any())}

    def records(self) -> Iterator[TrainingTensor]:
        """Yield a record of every tensor after every step, in the order in which the program makes them."""
        for case in self.good.opened.record.cases:
            for step in range(self.good.opened.record.calls - 1):
                exact = [s.exact(case, step) | _after(s.exact(case, step + 1)) for s in (self.good, self.bad)]
                for one in self._tensors(case, step):
                    yield self._record(case, step, one, exact)

    def _tensors(self, case: str, step: int) -> Iterator[Named]:
        """Yield the tensors that both sides have after a step."""
        good, bad = self.good.opened, self.bad.opened
        for kind, where in (("taps", "point"), ("outputs", "output")):
            a, b = (x.tensors(case, step, kind) for x in (good, bad))
            order = [p.name for p in (good.record.points if where == "point" else good.record.outputs)]
            for name in (n for n in order if n in a):
                if name in b and a[name].shape == b[name].shape:
                    yield Named("point" if where == "point" else "output", name, name, a[name], b[name])
                else:
                    self.lacking[name] = None
            self.lacking |= dict.fromkeys(n for n in b if n not in a and "@" not in n)
        a, b = (x.tensors(case, step + 1, "inputs") for x in (good, bad))
        for number in self.moving:
            yield Named("state", number, f"{EXACT}{number}", a[number], b[number])

    def _record(self, case: str, step: int, one: Named, exact: list[dict[str, Array]]) -> TrainingTensor:
        m = self.members.get((case, step, one.where, one.name))
        norms = [0.0] * 3 if m is None else [value(x) for x in (m.norm, m.spread, m.gain)]
        off = difference(one.b, one.a)
        size = norm(off) if np.isfinite(off).all() else float("inf")
        if size == 0 and _none(one.a):
            size = nan
        name = self.names[one.name] if one.where == "state" else one.name
        group = tensor_group(one.where, name, one.a.shape, self.parameters)
        mine = self.squares.setdefault((step, group), [0.0, 0.0, 0.0])
        for i, x in enumerate((size, norms[1], norms[0])):
            mine[i] += x * x
        formats = (str(one.a.dtype), str(one.b.dtype))
        return TrainingTensor(
            case=case,
            step=step + 1,
            where=one.where,
            name=name,
            group=group,
            size=json_number(relative_size(size, norms[0])),
            spread=json_number(relative_size(norms[1], norms[0])),
            ratio=json_number(
                nan if m is None or (isnan(size) and one.where != "point") else times_spread(off, one.a, *norms)
            ),
            exact=_apart(exact, one.key),
            formats=formats if formats[0] != formats[1] else None,
            source=self.sources.get(one.name, ""),
        )


def difference_of(a: Array, b: Array) -> bool:
    """Whether two tensors are of other shapes, or any value differs."""
    return a.shape != b.shape or bool(np.any(difference(b, a)))


def _floats(x: Array) -> bool:
    return x.dtype.kind not in "iub"


def _none(x: Array) -> bool:
    """Whether a tensor holds nothing but NaN."""
    return x.size > 0 and _floats(x) and bool(np.isnan(widen(x)).all())


def _after(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the state out of the values of the next call."""
    return {n: x for n, x in values.items() if n.startswith(EXACT)}


def _apart(exact: list[dict[str, Array]], key: str) -> float | None:
    """Return how far two sides are apart in FP64; None where it is not known of both."""
    if any(key not in x for x in exact) or exact[0][key].shape != exact[1][key].shape:
        return None
    a, b = (x[key] for x in exact)
    found = relative_size(norm(difference(b, a)), norm(np.nan_to_num(a, posinf=0.0, neginf=0.0)))
    return found if np.isfinite(found) else None

"""What is aligned: named arrays of a program, a checkpoint or a tree, and families of names that differ in numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.models.checkpoints.opening import open_tensors
from precaudit.models.checkpoints.tensors import IGNORED_SUFFIXES
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.programs.program import Program
from precaudit.references.mapped_tensors import parameter_leaves
from precaudit.schema.configuration import DecoderConfig

NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Tensor:
    """An array of floats that is read when it is needed."""

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], Array]


@dataclass(frozen=True)
class Side:
    """Named arrays; ``config`` where they are a checkpoint's; ``passed``: names of what is no array of floats."""

    label: str
    tensors: Mapping[str, Tensor]
    config: DecoderConfig | None = None
    passed: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def elements(self) -> int:
        """How many numbers they are."""
        return sum(prod(t.shape) for t in self.tensors.values())


@dataclass(frozen=True)
class Family:
    """Arrays of one shape whose names differ in numbers alone: ``names`` [n₁, …] by ``numbers`` of each axis."""

    general: str
    names: Array
    numbers: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    @property
    def members(self) -> list[str]:
        """The names in order."""
        return [str(n) for n in self.names.reshape(-1)]


def side_of(subject: Any, label: str) -> Side:
    """Return the arrays of a Program, of a checkpoint as ``trace`` takes it, or of a tree.

    Raises UserError for what is none, or holds no floats.
    """
    if isinstance(subject, str | Path):
        label = str(subject)
        opened = open_tensors(label)
        read = opened.tensors.read_tensor
        shapes = {n: s for n, s in opened.tensors.shapes().items() if not n.endswith(IGNORED_SUFFIXES)}
        found = {n: _stored(n, shape, partial(read, n)) for n, shape in shapes.items() if shape}
        return _checked(Side(label, found, opened.config, (), opened.path))
    return _tree_side(subject.params if isinstance(subject, Program) else subject, label)


def _stored(name: str, shape: Sequence[int], read: Callable[[], Array]) -> Tensor:
    return Tensor(name, tuple(shape), read().dtype.name, read)


def _tree_side(params: object, label: str) -> Side:
    found, passed = {}, []
    for name, x in parameter_leaves(params).items():
        if not hasattr(x, "dtype") or not getattr(x, "shape", ()):
            passed.append(name)
        elif x.dtype.name == "float64" or x.dtype.name in FORMATS:
            found[name] = Tensor(name, tuple(x.shape), x.dtype.name, partial(_single, x))
        else:
            passed.append(name)
    return _checked(Side(label, found, None, tuple(passed)))


def _single(x: object) -> Array:
    """Return an array, one of 64 bits rounded to 32, as a Program's are."""
    found = np.asarray(x)
    return found.astype(np.float32) if found.dtype == np.float64 else found


def _checked(side: Side) -> Side:
    if side.tensors:
        return side
    held = f"{len(side.passed)} arrays of other formats, the first {side.passed[0]!r}" if side.passed else "none"
    raise UserError(
        f"{side.label}: no parameters of floats ({held}); a Program's params hold what its function reads: what it "
        "closes over is a constant of it, and integers of quantised weights are no values"
    )


def families(names: Mapping[str, tuple[int, ...]]) -> list[Family]:
    """Return the families of names, by shape; numbers that make no whole grid are one axis."""
    groups: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], str]] = {}
    for name, shape in names.items():
        key = tuple(int(n) for n in NUMBER.findall(name))
        groups.setdefault((NUMBER.sub("{}", name), shape), {})[key] = name
    found = []
    for (general, shape), members in groups.items():
        axes = [tuple(sorted(set(column))) for column in zip(*members, strict=True)]
        whole = prod(len(a) for a in axes) == len(members)
        keys = list(product(*axes)) if whole else sorted(members)
        array = np.array([members[k] for k in keys], object).reshape([len(a) for a in axes] if whole else [-1])
        found.append(Family(general, array, tuple(axes) if whole else (tuple(range(len(keys))),), shape))
    return found


def numbers_in(name: str) -> tuple[int, ...]:
    """Return the numbers in a name: a layer's, an expert's."""
    return tuple(int(n) for n in NUMBER.findall(name))

"""Where a program's values come from and go to: its equations, values numbered across calls, loops and kernels."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from precaudit.interpreters.jaxpr.labels import LIBRARIES, STANDARD
from precaudit.interpreters.tpu.hlo import JAX_FILES
from precaudit.schema.graphs.decoder import point_of

NARROW = ("bfloat16", "float16")
EIGHT_BITS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool")  # one bfloat16 pass loses none
FLOATS = (*NARROW, "float32", "float64")
MOVES = frozenset(
    (
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "slice",
        "dynamic_slice",
        "copy",
        "copy_p",
        "rev",
        "concatenate",
        "expand_dims",
        "gather",
        "sharding_constraint",
        "name",
        "stop_gradient",
        "pad",
        "split",
        "reshard",
        "pvary",
        "pcast",
        "tile",
        "stack",
        "unstack",
    )
)


@dataclass(frozen=True)
class Equation:
    """An equation of a program, wherever it lies: names it runs under, the user's frames, the numbers of its values.

    ``steps``: of the outermost scan it lies in, None outside of scans.
    """

    made: Any
    names: tuple[str, ...]
    frames: tuple[str, ...]
    inputs: tuple[int, ...] = field(repr=False)
    outputs: tuple[int, ...] = field(repr=False)
    steps: int | None = None

    @property
    def primitive(self) -> str:
        """The name of its primitive."""
        return str(self.made.primitive.name)

    @property
    def source(self) -> str:
        """FILE:LINE of the user's line; "" where JAX kept none."""
        return innermost_line(self.frames)

    @property
    def point(self) -> str:
        """The point it is a part of, of a program whose operations run under names of points."""
        return point_of(self.names)

    def dtype(self, i: int = 0) -> str:
        """Return the format of input ``i``."""
        return str(getattr(self.made.invars[i].aval, "dtype", ""))

    @property
    def result(self) -> str:
        """The format of its first result."""
        return str(getattr(self.made.outvars[0].aval, "dtype", "")) if self.made.outvars else ""

    @property
    def rounds(self) -> bool:
        """Whether it converts a wider float to bfloat16 or float16."""
        return (
            self.primitive == "convert_element_type"
            and self.result in NARROW
            and self.dtype() in ("float32", "float64")
        )


class Carried(NamedTuple):
    """A value that a loop carries: as a step reads it and as it leaves it.

    ``steps``: None where a condition says, ``condition``, the value that it has.
    """

    read: int
    left: int
    steps: int | None
    condition: int | None = None


Passes = Callable[[Equation], Iterable[int]]  # the inputs that a walk follows through an equation


@dataclass(frozen=True)
class Graph:
    """Equations and values. A value has a maker, or ``joins``: the values it may be (of a loop, a branch), or neither.

    ``constants``: values the program's text gives. ``shapes``, ``dtypes``: by number.
    """

    equations: tuple[Equation, ...]
    makers: Mapping[int, Equation]
    joins: Mapping[int, tuple[int, ...]]
    constants: Mapping[int, Any]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str]
    carried: tuple[Carried, ...]
    results: tuple[int, ...]

    @cached_property
    def users(self) -> Mapping[int, tuple[Equation, ...]]:
        """{value: equations that read it}, calls and loops not among them."""
        makers = {id(e): e for e in self.makers.values()}
        found: dict[int, list[Equation]] = {}
        for e in self.equations:
            if id(e) in makers or not e.outputs:
                for v in dict.fromkeys(e.inputs):
                    found.setdefault(v, []).append(e)
        return {v: tuple(x) for v, x in found.items()}

    @cached_property
    def flows_into(self) -> Mapping[int, tuple[int, ...]]:
        """{value: those it flows into as it is}."""
        found: dict[int, list[int]] = {}
        for v, sources in self.joins.items():
            for s in sources:
                found.setdefault(s, []).append(v)
        return {v: tuple(x) for v, x in found.items()}

    def behind(self, value: int, passes: Passes, through_loops: bool = True) -> dict[int, None]:
        """Return the values it is made of, itself first, as far as ``passes`` goes on; in the order they are met."""
        seen: dict[int, None] = {}
        todo = [value]
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen[v] = None
            if through_loops:
                todo.extend(self.joins.get(v, ()))
            if (e := self.makers.get(v)) is not None:
                todo.extend(e.inputs[k] for k in passes(e))
        return seen

    def ahead(self, value: int, passes: Passes) -> dict[int, None]:
        """Return the values made of it, itself first, through the inputs that ``passes`` names."""
        seen: dict[int, None] = {}
        todo = [value]
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen[v] = None
            todo.extend(self.flows_into.get(v, ()))
            for e in self.users.get(v, ()):
                if any(e.inputs[k] == v for k in passes(e)):
                    todo.extend(e.outputs)
        return seen

    def readers(self, value: int) -> tuple[Equation, ...]:
        """Return what reads a value, or the value moved; () where the program returns it."""
        moved = self.ahead(value, in_place)
        if moved.keys() & set(self.results):
            return ()
        return tuple(user for v in moved for user in self.users.get(v, ()) if not in_place(user))

    def is_rounded_by_all(self, value: int) -> bool:
        """Whether all that reads a value rounds it to bfloat16 or float16."""
        readers = self.readers(value)
        return bool(readers) and all(e.rounds for e in readers)

    def made_by(self, values: Iterable[int], *primitives: str) -> Iterator[Equation]:
        """Yield the equations of these primitives that made one of the values."""
        for v in values:
            if (e := self.makers.get(v)) is not None and e.primitive in primitives:
                yield e

    def scalar(self, value: int) -> float | None:
        """Return the number that a value is everywhere, as its format holds it; None where the text does not say."""
        dtypes = []
        while value not in self.constants:
            dtypes.append(self.dtypes[value])
            e = self.makers.get(value)
            if e is None or e.primitive not in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze"):
                return None
            value = e.inputs[0]
        given = np.asarray(self.constants[value])
        if given.size != 1 or not _is_number(given.dtype):
            return None
        with np.errstate(all="ignore"):
            for dtype in reversed(dtypes):
                given = given.astype(dtype)
        return float(given.reshape(()).astype(np.float64))

    def single(self, value: int) -> bool:
        """Whether it is one number, broadcast."""
        return any(self.shapes[v] == () for v in self.behind(value, as_moved))


def tap(e: Equation) -> str:
    """Return the point that an equation names; "" of others."""
    return str(e.made.params["name"]) if e.primitive == "name" else ""


def as_moved(e: Equation) -> Iterable[int]:
    """Pass through what moves values and converts them."""
    if e.primitive in MOVES:
        return range(len(e.inputs)) if e.primitive in ("concatenate", "stack") else (0,)
    if e.primitive == "select_n":
        return range(1, len(e.inputs))
    return (0,) if e.primitive in ("convert_element_type", "reduce_precision") else ()


def in_place(e: Equation) -> Iterable[int]:
    """Pass through what moves values, as they are."""
    return as_moved(e) if e.primitive in MOVES else ()


def through_scaling(graph: Graph, e: Equation) -> Iterable[int]:
    """Pass through what moves values, converts them, and multiplies or divides them by one number."""
    if e.primitive == "mul":
        return tuple(k for k in (0, 1) if graph.single(e.inputs[1 - k]))
    if e.primitive == "div":
        return (0,) if graph.single(e.inputs[1]) else ()
    return as_moved(e)


def is_cast_up(graph: Graph, e: Equation, i: int) -> bool:
    """Whether input ``i`` is nothing but bfloat16 or narrower values, cast up: one pass loses nothing of it."""
    values = graph.behind(e.inputs[i], in_place)
    ends = [v for v in values if v not in graph.joins and not any(True for _ in _inputs(graph, v))]
    return bool(ends) and all(_fits_bfloat16(graph, v) for v in ends)


def innermost_line(frames: Sequence[str]) -> str:
    """Return the innermost line of a user's code: outside libraries and Python's own; where none is, the innermost."""
    own = (x for x in frames if not LIBRARIES.search(x) and Path(x).parent != STANDARD)
    return next(own, frames[0] if frames else "")


def user_frames(found: Iterable[str]) -> tuple[str, ...]:
    """Return the frames outside JAX, innermost first."""
    return tuple(x for x in found if not JAX_FILES.search(x.replace("\\", "/")))


def _inputs(graph: Graph, value: int) -> Iterable[int]:
    e = graph.makers.get(value)
    return () if e is None else in_place(e)


def _fits_bfloat16(graph: Graph, value: int) -> bool:
    """Whether it is cast up from a format that a bfloat16 holds, or a number that one holds."""
    e = graph.makers.get(value)
    if e is not None and e.primitive == "convert_element_type" and e.dtype() in EIGHT_BITS:
        return True
    number = graph.scalar(value)
    return number is not None and float(np.asarray(number).astype(ml_dtypes.bfloat16)) == number


def _is_number(dtype: Any) -> bool:
    return bool(np.issubdtype(dtype, np.number)) or dtype == np.bool_ or str(dtype) in NARROW

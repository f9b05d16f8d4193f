"""Where a program's values come from and go to: its equations, values numbered across calls, loops and branches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from precaudit.graphs.decoder import point_of
from precaudit.tpu.hlo import JAX_FILES
from precaudit.transforms.jax_versions import bodies, called, closed, frames, scanned
from precaudit.transforms.primitives import CALLS

NARROW = ("bfloat16", "float16")
EIGHT_BITS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool")  # one bfloat16 pass loses none
FLOATS = (*NARROW, "float32", "float64")
MOVES = frozenset(
    ("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice", "copy", "copy_p", "rev",
     "concatenate", "expand_dims", "gather", "sharding_constraint", "name", "stop_gradient", "pad", "split", "reshard",
     "pvary", "pcast")
)  # fmt: skip
LOOPS = ("scan", "while", "cond")


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
        return self.frames[0] if self.frames else ""

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
    """A value that a loop carries: as a step reads it and as it leaves it. ``steps``: None where a condition says."""

    read: int
    left: int
    steps: int | None


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
    def joined(self) -> Mapping[int, tuple[int, ...]]:
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
            todo.extend(self.joined.get(v, ()))
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

    def rounded(self, value: int) -> bool:
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


def as_moved(e: Equation) -> Iterable[int]:
    """Pass through what moves values and converts them."""
    if e.primitive in MOVES:
        return range(len(e.inputs)) if e.primitive == "concatenate" else (0,)
    if e.primitive == "select_n":
        return range(1, len(e.inputs))
    return (0,) if e.primitive in ("convert_element_type", "reduce_precision") else ()


def in_place(e: Equation) -> Iterable[int]:
    """Pass through what moves values, as they are."""
    return as_moved(e) if e.primitive in MOVES else ()


def scaled(graph: Graph, e: Equation) -> Iterable[int]:
    """Pass through what moves values, converts them, and multiplies or divides them by one number."""
    if e.primitive == "mul":
        return tuple(k for k in (0, 1) if graph.single(e.inputs[1 - k]))
    if e.primitive == "div":
        return (0,) if graph.single(e.inputs[1]) else ()
    return as_moved(e)


def widened(graph: Graph, e: Equation, i: int) -> bool:
    """Whether input ``i`` is nothing but bfloat16 or narrower values, cast up: one pass loses nothing of it."""
    values = graph.behind(e.inputs[i], in_place)
    ends = [v for v in values if v not in graph.joins and not any(True for _ in _inputs(graph, v))]
    return bool(ends) and all(_held(graph, v) for v in ends)


def user_frames(found: Iterable[str]) -> tuple[str, ...]:
    """Return the frames outside JAX, innermost first."""
    return tuple(x for x in found if not JAX_FILES.search(x.replace("\\", "/")))


def build(jaxpr: Any) -> Graph:
    """Return the graph of a program, a closed jaxpr."""
    builder = _Builder()
    body, consts = closed(jaxpr)
    results = builder.run(body, consts, [builder.value(v.aval) for v in body.invars], (), ())
    return Graph(
        tuple(builder.equations), builder.makers, {v: tuple(x) for v, x in builder.joins.items()}, builder.constants,
        builder.shapes, builder.dtypes, tuple(builder.carried), tuple(results),
    )  # fmt: skip


class _Builder:
    """Numbers the values of a jaxpr; a body that is called twice has values of its own each time."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.makers: dict[int, Equation] = {}
        self.joins: dict[int, list[int]] = {}
        self.constants: dict[int, Any] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[str] = []
        self.carried: list[Carried] = []
        self.steps: int | None = None  # of the outermost scan around what is taken in

    def value(self, aval: Any) -> int:
        """Number a value."""
        self.shapes.append(tuple(getattr(aval, "shape", ())))
        self.dtypes.append(str(getattr(aval, "dtype", "")))
        return len(self.shapes) - 1

    def join(self, value: int, *sources: int) -> None:
        """Say what a value may be."""
        self.joins.setdefault(value, []).extend(sources)

    def constant(self, aval: Any, given: Any) -> int:
        """Number a value that the text gives."""
        v = self.value(aval)
        self.constants[v] = given
        return v

    def run(
        self, jaxpr: Any, consts: Sequence[Any], given: Sequence[int], names: tuple[str, ...], around: tuple[str, ...]
    ) -> list[int]:
        """Take in a body on numbered arguments; return the numbers of its results."""
        known = dict(zip(jaxpr.invars, given, strict=True))
        for i, var in enumerate(jaxpr.constvars):
            known[var] = self.constant(var.aval, consts[i]) if i < len(consts) else self.value(var.aval)

        def read(var: Any) -> int:
            return self.constant(var.aval, var.val) if hasattr(var, "val") else known[var]

        for e in jaxpr.eqns:
            stack = str(getattr(e.source_info, "name_stack", ""))
            path = (*names, *(x for x in stack.split("/") if x))
            own = user_frames(f"{file}:{line}" for file, line, *_ in frames(e))
            whole = own if own[-len(around) :] == around else (*own, *around)
            inputs = [read(v) for v in e.invars]
            at = len(self.equations)
            outputs = self.outputs(e, inputs, path, whole)
            inner = outputs is not None
            made = [self.value(v.aval) for v in e.outvars] if outputs is None else outputs
            found = Equation(e, path, whole, tuple(inputs), tuple(made), self.steps)
            self.equations.insert(at, found)
            if not inner:
                self.makers.update(dict.fromkeys(made, found))
            known.update(zip(e.outvars, made, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def outputs(self, e: Any, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]) -> list[int] | None:
        """Take in the bodies of an equation; return the numbers of its results where they are those of a body."""
        name, params = e.primitive.name, e.params
        if name in LOOPS:
            return getattr(self, f"{name}_loop")(e, inputs, names, around)
        if name == "optimization_barrier":
            made = [self.value(v.aval) for v in e.outvars]
            for v, source in zip(made, inputs, strict=True):
                self.join(v, source)
            return made
        if name in CALLS or name == "shard_map":
            body, consts = called(params, CALLS.get(name, "jaxpr"))
            if len(body.invars) == len(inputs) and len(body.outvars) == len(e.outvars):
                return self.run(body, consts, inputs, names, around)
        for value in params.values():
            for body in bodies(value):
                self.run(body, (), [self.value(v.aval) for v in body.invars], names, around)
        return None

    def scan_loop(self, e: Any, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]) -> list[int]:
        """Take in a scan: what a step carries is its first value or what the step before left."""
        body, consts = closed(e.params["jaxpr"])
        n, m = scanned(e.params)
        given = [*inputs[:n], *(self.value(v.aval) for v in body.invars[n:])]
        outer = self.steps
        self.steps = outer or int(e.params["length"])
        left = self.run(body, consts, given, names, around)
        self.steps = outer
        for k in range(n, len(inputs)):
            self.join(given[k], inputs[k])
        made = [self.value(v.aval) for v in e.outvars]
        for k, v in enumerate(made):
            self.join(v, left[k])
        for k in range(m):
            self.join(given[n + k], left[k])
            self.carried.append(Carried(given[n + k], left[k], int(e.params["length"])))
        return made

    def while_loop(self, e: Any, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]) -> list[int]:
        """Take in a loop with a condition."""
        n, m = e.params["cond_nconsts"], e.params["body_nconsts"]
        (condition, known), (body, consts) = closed(e.params["cond_jaxpr"]), closed(e.params["body_jaxpr"])
        carried = [self.value(v.aval) for v in body.invars[m:]]
        self.run(condition, known, [*inputs[:n], *carried], names, around)
        left = self.run(body, consts, [*inputs[n : n + m], *carried], names, around)
        made = [self.value(v.aval) for v in e.outvars]
        for k, (read, first, out) in enumerate(zip(carried, inputs[n + m :], left, strict=True)):
            self.join(read, first, out)
            self.join(made[k], first, out)
            self.carried.append(Carried(read, out, None))
        return made

    def cond_loop(self, e: Any, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]) -> list[int]:
        """Take in the branches of a condition."""
        made = [self.value(v.aval) for v in e.outvars]
        for branch in e.params["branches"]:
            left = self.run(*closed(branch), inputs[1:], names, around)
            for v, source in zip(made, left, strict=True):
                self.join(v, source)
        return made


def _inputs(graph: Graph, value: int) -> Iterable[int]:
    e = graph.makers.get(value)
    return () if e is None else in_place(e)


def _held(graph: Graph, value: int) -> bool:
    """Whether it is cast up from a format that a bfloat16 holds, or a number that one holds."""
    e = graph.makers.get(value)
    if e is not None and e.primitive == "convert_element_type" and e.dtype() in EIGHT_BITS:
        return True
    number = graph.scalar(value)
    return number is not None and float(np.asarray(number).astype(ml_dtypes.bfloat16)) == number


def _is_number(dtype: Any) -> bool:
    return bool(np.issubdtype(dtype, np.number)) or dtype == np.bool_ or str(dtype) in NARROW

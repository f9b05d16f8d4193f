"""What rules look at: a call of a program, as its jaxpr and as a TPU's compiler made it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from precaudit.graphs.decoder import POINTS
from precaudit.policies import Policy
from precaudit.tpu.hlo import JAX_FILES, Instruction, Module, Shape
from precaudit.tpu.target import Compiled, Target
from precaudit.transforms.jax_versions import bodies, closed, frames


@dataclass(frozen=True)
class Equation:
    """An equation of a program, wherever it lies: names it runs under, the user's frames, what made its inputs."""

    made: Any
    names: tuple[str, ...]
    frames: tuple[str, ...]
    producers: Mapping[Any, Any] = field(repr=False)

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

    def producer(self, i: int = 0) -> Any:
        """Return the equation that made input ``i`` in the same body; None for arguments and constants."""
        var = self.made.invars[i]
        return None if hasattr(var, "val") else self.producers.get(var)


@dataclass(frozen=True)
class View:
    """One call: its jaxpr, and, for a TPU, what its compiler made of it. ``donated``: bytes the caller gives up.

    ``platform``: cpu, gpu or tpu; ``policy``: of the shipped decoder, None of other programs.
    """

    phase: str
    platform: str
    jaxpr: Any = field(repr=False)
    policy: Policy | None = None
    target: Target | None = None
    compiled: Compiled | None = field(default=None, repr=False)
    module: Module | None = field(default=None, repr=False)
    donated: int = 0

    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        """Every equation, those inside of loops, branches and calls among them."""
        return tuple(_equations(closed(self.jaxpr)[0], ()))

    @cached_property
    def by_line(self) -> Mapping[tuple[str, str], tuple[Equation, ...]]:
        """{(FILE:LINE, primitive): equations}: what an instruction may have been made of."""
        found: dict[tuple[str, str], list[Equation]] = {}
        for e in self.equations:
            found.setdefault((e.source, e.primitive), []).append(e)
        return {key: tuple(x) for key, x in found.items()}

    def made_of(self, instruction: Instruction) -> tuple[Equation, ...]:
        """Return the equations an instruction may come from: of one line and primitive, and one point where it says.

        Compiled text keeps the innermost frames alone, so stacks are compared as far as both go.
        """
        assert self.module is not None
        stack = user_frames(self.module.frames(instruction))
        line = self.by_line.get((stack[0] if stack else "", primitive_of(instruction)), ())
        found = [e for e in line if all(a == b for a, b in zip(e.frames, stack, strict=False))]
        here = [e for e in found if e.point == point_of(tuple(instruction.op_name.split("/")))]
        return tuple(here or found)

    @cached_property
    def instructions(self) -> tuple[tuple[str, Instruction], ...]:
        """Every instruction with the name of its computation."""
        assert self.module is not None
        return tuple((c.name, i) for c, i in self.module.walk())


def point_of(names: tuple[str, ...]) -> str:
    """Return the innermost name of a path that is a point; "" where none is."""
    return next((name for name in reversed(names) if name in POINTS), "")


def place_of(view: View, instruction: Instruction) -> tuple[str, str]:
    """Return (FILE:LINE, point) of an instruction; "" for what the compiled text does not say."""
    assert view.module is not None
    return view.module.source(instruction) or "", point_of(tuple(instruction.op_name.split("/")))


def primitive_of(instruction: Instruction) -> str:
    """Return the JAX primitive an instruction was made of; "" where its text does not say."""
    return instruction.op_name.rpartition("/")[2]


def user_frames(found: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames outside JAX, innermost first."""
    return tuple(x for x in found if not JAX_FILES.search(x.replace("\\", "/")))


def array(instruction: Instruction) -> Shape | None:
    """Return the type of an instruction that is one array."""
    return instruction.type if isinstance(instruction.type, Shape) else None


def _equations(jaxpr: Any, names: tuple[str, ...]) -> Iterator[Equation]:
    producers = {var: e for e in jaxpr.eqns for var in e.outvars}
    for e in jaxpr.eqns:
        stack = str(getattr(e.source_info, "name_stack", ""))
        path = (*names, *(x for x in stack.split("/") if x))
        yield Equation(e, path, user_frames(tuple(f"{file}:{line}" for file, line, *_ in frames(e))), producers)
        for value in e.params.values():
            for body in bodies(value):
                yield from _equations(body, path)

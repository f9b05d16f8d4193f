"""What rules look at: a call of a program, as its jaxpr and as a TPU's compiler made it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from precaudit.checks.lint.building import build
from precaudit.checks.lint.flow import Equation, Graph, innermost_line, user_frames
from precaudit.checks.lint.recorded import Extent
from precaudit.checks.lint.whole import Ranges, whole_numbers
from precaudit.interpreters.tpu.hlo import ArrayType, Instruction, Module, Type
from precaudit.interpreters.tpu.target import CompiledProgram, Target
from precaudit.schema.graphs.decoder import point_of
from precaudit.schema.policies import Policy


@dataclass(frozen=True)
class CallView:
    """One call: its jaxpr, and, for a TPU, what its compiler made of it. ``donated``: bytes the caller gives up.

    ``platform``: cpu, gpu or tpu; ``policy``: of the shipped decoder, None of other programs. ``extents``: of each
    point that a run recorded, None without a run; ``taps``: the jaxpr with taps at these points, None where its own is.
    """

    phase: str
    platform: str
    jaxpr: Any = field(repr=False)
    policy: Policy | None = None
    target: Target | None = None
    compiled: CompiledProgram | None = field(default=None, repr=False)
    module: Module | None = field(default=None, repr=False)
    donated: int = 0
    extents: Mapping[str, Extent] | None = field(default=None, repr=False, compare=False)
    taps: Any = field(default=None, repr=False, compare=False)

    @cached_property
    def graph(self) -> Graph:
        """Its equations and where their values come from and go to."""
        return build(self.jaxpr)

    @cached_property
    def whole(self) -> Ranges:
        """The ranges of its values that are whole numbers."""
        return whole_numbers(self.graph)

    @cached_property
    def tapped_graph(self) -> Graph:
        """The graph whose equations named ``name`` are the points that a run recorded."""
        return self.graph if self.taps is None else build(self.taps)

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Every equation, those inside of loops, branches and calls among them."""
        return self.graph.equations

    @cached_property
    def by_line(self) -> Mapping[tuple[str, str], tuple[Equation, ...]]:
        """{(innermost FILE:LINE, primitive): equations}: what an instruction may have been made of."""
        found: dict[tuple[str, str], list[Equation]] = {}
        for e in self.equations:
            found.setdefault((e.frames[0] if e.frames else "", e.primitive), []).append(e)
        return {key: tuple(x) for key, x in found.items()}

    def made_of(self, instruction: Instruction) -> tuple[Equation, ...]:
        """Return the equations an instruction may come from: of one line and primitive; where it says, names and size.

        Compiled text keeps the innermost frames alone, so stacks are compared as far as both go.
        """
        assert self.module is not None
        stack = user_frames(self.module.frames(instruction))
        line = self.by_line.get((stack[0] if stack else "", primitive_of(instruction)), ())
        found = [e for e in line if all(a == b for a, b in zip(e.frames, stack, strict=False))]
        names = instruction.op_name.split("/")
        found = [e for e in found if set(e.names) <= set(names)] or found
        found = [e for e in found if e.point == point_of(tuple(names))] or found
        shape = array(instruction)
        size = None if shape is None else prod(shape.dims)
        return tuple([e for e in found if size in [prod(v.aval.shape) for v in e.made.outvars]] or found)

    def layers(self, source: str, point: str) -> int | None:
        """Return how many layers run a line and point: the steps of the scan around it; None where it is in none.

        What is scanned is one text for all layers. None, too, where the line runs both inside and outside of scans.
        """
        found = {e.steps for e in self.equations if e.source == source and e.point == point}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def instructions(self) -> tuple[tuple[str, Instruction], ...]:
        """Every instruction with the name of its computation."""
        assert self.module is not None
        return tuple((c.name, i) for c, i in self.module.walk())

    def reads(self, computation: str, instruction: Instruction) -> set[str]:
        """Return the formats of what an instruction of a computation reads."""
        assert self.module is not None
        made = self.module.computations[computation].instructions
        return {x for o in instruction.operands for x in formats_of(made[o].type)}


def instruction_place(view: CallView, instruction: Instruction) -> tuple[str, str]:
    """Return (FILE:LINE, point) of an instruction; "" for what the compiled text does not say."""
    assert view.module is not None
    frames = user_frames(view.module.frames(instruction))
    return innermost_line(frames), point_of(tuple(instruction.op_name.split("/")))


def primitive_of(instruction: Instruction) -> str:
    """Return the JAX primitive an instruction was made of; "" where its text does not say."""
    return instruction.op_name.rpartition("/")[2]


def array(instruction: Instruction) -> ArrayType | None:
    """Return the type of an instruction that is one array."""
    return instruction.type if isinstance(instruction.type, ArrayType) else None


def formats_of(kind: Type) -> Iterator[str]:
    """Yield the formats of the arrays of a type."""
    if isinstance(kind, ArrayType):
        yield kind.dtype
    else:
        for part in kind:
            yield from formats_of(part)

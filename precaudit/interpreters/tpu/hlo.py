"""Optimised HLO as frozen records, modules of computations of instructions, and the source of each. No JAX here."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from precaudit.interpreters.tpu.scanner import braced_fields, integer

CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "select",
    "scatter",
)
JAX_FILES = re.compile(r"(^|/)((site|dist)-packages/jax(lib)?|jax/(_src|experimental))/")


class ArrayType(NamedTuple):
    """An array: HLO's name of the element type, sizes, and the dimensions from the fastest running to the slowest.

    ``tile``: of the fastest dimensions, the slower first, the block that is stored together; a last block is padded.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...]
    tile: tuple[int, ...] = ()


Type: TypeAlias = "ArrayType | tuple[Type, ...]"


@dataclass(frozen=True)
class Instruction:
    """One value. ``literal``: what stands for operands in ``constant`` and ``parameter``; ``line``: where, from 1.

    ``attributes`` are as written, but for the quotes of one that is a string.
    """

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    literal: str
    attributes: Mapping[str, str]
    root: bool
    line: int

    @property
    def op_name(self) -> str:
        """The path of JAX's names that it was made of, such as ``jit(f)/while/body/dot_general``; "" if none."""
        return braced_fields(self.attributes.get("metadata", "")).get("op_name", "")

    @property
    def frame(self) -> int:
        """The number of its stack frame in the module's table; 0 if none."""
        return integer(braced_fields(self.attributes.get("metadata", "")).get("stack_frame_id", ""))

    def ints(self, key: str) -> tuple[int, ...]:
        """Return the integers of an attribute, () where it is not there."""
        return tuple(map(int, _INTEGERS.findall(self.attributes.get(key, ""))))

    def names(self, key: str) -> tuple[str, ...]:
        """Return the computations an attribute names, () where it is not there."""
        return tuple(_NAMES.findall(self.attributes.get(key, "")))

    def fields(self, key: str) -> dict[str, str]:
        """Return the parts of an attribute such as ``window={size=4 pad=3_3}``, {} where it is not there."""
        return braced_fields(self.attributes.get(key, ""))

    @property
    def computations(self) -> tuple[str, ...]:
        """The computations it runs."""
        return tuple(name for key in CALLS if key in self.attributes for name in self.names(key))


@dataclass(frozen=True)
class Computation:
    """Instructions by name, each after its operands."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next(x for x in self.instructions.values() if x.root)

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters in their order."""
        found = [x for x in self.instructions.values() if x.opcode == "parameter"]
        return tuple(sorted(found, key=lambda x: int(x.literal)))


class Location(NamedTuple):
    """A place in a source file, as the text's tables name it."""

    file: int
    function: int
    line: int


class Frame(NamedTuple):
    """A stack frame: its location, and the frame that called it (0: none)."""

    location: int
    parent: int


@dataclass(frozen=True)
class Module:
    """A program: computations by name, each after those it calls; the tables of where its values come from."""

    computations: Mapping[str, Computation]
    entry: str
    attributes: Mapping[str, str]
    files: Mapping[int, str]
    functions: Mapping[int, str]
    locations: Mapping[int, Location]
    stack: Mapping[int, Frame]

    def walk(self) -> Iterator[tuple[Computation, Instruction]]:
        """Give every instruction with its computation, in the order of the text."""
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                yield computation, instruction

    def frames(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the FILE:LINE of an instruction's stack, innermost first; () where the text does not say."""
        return tuple(f"{self.files[at.file]}:{at.line}" for at in self._locations(instruction.frame))

    def source(self, instruction: Instruction) -> str | None:
        """Return the innermost FILE:LINE outside JAX's own files; None where the text names none."""
        for at in self._locations(instruction.frame):
            if not JAX_FILES.search(self.files[at.file].replace("\\", "/")):
                return f"{self.files[at.file]}:{at.line}"
        return None

    def _locations(self, frame: int) -> Iterator[Location]:
        seen = set()
        while frame in self.stack and frame not in seen:
            seen.add(frame)
            at = self.locations.get(self.stack[frame].location)
            if at is not None and at.file in self.files:
                yield at
            frame = self.stack[frame].parent


_NAMES = re.compile(r"%([\w.\-]+)", re.ASCII)
_INTEGERS = re.compile(r"-?[0-9]{1,18}")

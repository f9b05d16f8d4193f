"""Optimised HLO text (``compiled.as_text()``) as frozen records, by its grammar.

    module      = "HloModule" NAME {"," attribute} {table} {computation}
    table       = "FileNames" {INT STRING} | "FunctionNames" … | "FileLocations" {INT "{" fields "}"} | "StackFrames" …
    computation = ["ENTRY"] NAME ["(" [NAME ":" type {"," …}] ")" "->" type] "{" {instruction} "}" {"," attribute}
    instruction = ["ROOT"] NAME "=" type OPCODE "(" (INT | literal | [[type] NAME {"," …}]) ")" {"," attribute}
    attribute   = KEY "=" value             value: up to a comma or the end of the line, outside brackets and strings
    type        = DTYPE "[" [INT {"," INT}] "]" ["{" [INT {"," INT}] [":" tiles] "}"] | "(" [type {"," type}] ")"

No JAX here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from precaudit.interpreters.tpu.scanner import (
    DEEPEST,
    INTEGER,
    KEY,
    STRING,
    HloError,
    Scanner,
    fields,
    integer,
    unescaped,
)

# XLA's opcodes (xla/hlo/ir/hlo_opcode.h); one that runs asynchronously is written with a suffix of SUFFIXES.
_OPCODES = """
    abs acos acosh add add-dependency after-all all-gather all-gather-done all-gather-start all-reduce all-reduce-done
    all-reduce-start all-to-all and asin asinh async-done async-start async-update atan2 atanh batch-norm-grad
    batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil cholesky clamp
    collective-broadcast collective-permute collective-permute-done collective-permute-start compare complex
    concatenate conditional constant convert convolution copy copy-done copy-start cosine cosh count-leading-zeros
    custom-call divide domain dot dynamic-reshape dynamic-slice dynamic-update-slice erf exponential
    exponential-minus-one fft floor fusion gather get-dimension-size get-tuple-element imag infeed iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not optimization-barrier or outfeed pad parameter
    partition-id popcnt power ragged-all-to-all ragged-dot real recv recv-done reduce reduce-precision reduce-scatter
    reduce-window remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
    round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter send send-done set-dimension-size
    shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract tan
    tanh topk transpose triangular-solve tuple while xor
"""
OPCODES = frozenset(_OPCODES.split())
SUFFIXES = ("-start", "-update", "-done")
CALLS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation",
         "called_computations", "select", "scatter")  # fmt: skip
JAX_FILES = re.compile(r"(^|/)((site|dist)-packages/jax(lib)?|jax/(_src|experimental))/")


class Shape(NamedTuple):
    """An array: HLO's name of the element type, sizes, and the dimensions from the fastest running to the slowest."""

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...]


Type: TypeAlias = "Shape | tuple[Type, ...]"


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
        return fields(self.attributes.get("metadata", "")).get("op_name", "")

    @property
    def frame(self) -> int:
        """The number of its stack frame in the module's table; 0 if none."""
        return integer(fields(self.attributes.get("metadata", "")).get("stack_frame_id", ""))

    def ints(self, key: str) -> tuple[int, ...]:
        """Return the integers of an attribute, () where it is not there."""
        return tuple(map(int, _INTEGERS.findall(self.attributes.get(key, ""))))

    def names(self, key: str) -> tuple[str, ...]:
        """Return the computations an attribute names, () where it is not there."""
        return tuple(_NAMES.findall(self.attributes.get(key, "")))

    def fields(self, key: str) -> dict[str, str]:
        """Return the parts of an attribute such as ``window={size=4 pad=3_3}``, {} where it is not there."""
        return fields(self.attributes.get(key, ""))

    @property
    def called(self) -> tuple[str, ...]:
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


def parse(text: str) -> Module:
    """Read a module. Raises HloError, with the line, for what the grammar does not give and unknown opcodes."""
    scanner = Scanner(text)
    scanner.expect("HloModule")
    scanner.name()
    attributes = _attributes(scanner)
    tables: dict[str, dict[int, str]] = {}
    while (table := scanner.take(_TABLE)) is not None:
        tables[table] = _table(scanner)
    computations, entry = _computations(scanner)
    return Module(
        computations,
        entry,
        attributes,
        tables.get("FileNames", {}),
        tables.get("FunctionNames", {}),
        {key: _location(fields(row)) for key, row in tables.get("FileLocations", {}).items()},
        _stack({key: fields(row) for key, row in tables.get("StackFrames", {}).items()}),
    )


_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_TABLE = re.compile(r"FileNames|FunctionNames|FileLocations|StackFrames")
_NAMES = re.compile(r"%([\w.\-]+)", re.ASCII)
_OPCODE = re.compile(r"[a-z][a-z0-9\-]*+")
_INTEGERS = re.compile(r"-?[0-9]{1,18}")
_DTYPE = re.compile(r"([a-z][a-z0-9]*+)\[")


def _attributes(scanner: Scanner) -> dict[str, str]:
    found = {}
    while scanner.accept(","):
        key = scanner.need(KEY, "an attribute")
        value = scanner.nested().strip()
        whole = STRING.fullmatch(value)
        found[key] = unescaped(whole[1]) if whole else value if '"' in value else _COMMENT.sub("", value)
    return found


def _table(scanner: Scanner) -> dict[int, str]:
    rows = {}
    while (key := scanner.take(INTEGER)) is not None:
        if (string := scanner.take(STRING)) is not None:
            rows[int(key)] = unescaped(string)
        else:
            scanner.expect("{")
            rows[int(key)] = scanner.nested("{")
    return rows


def _location(row: Mapping[str, str]) -> Location:
    return Location(*(integer(row.get(key, "")) for key in ("file_name_id", "function_name_id", "line")))


def _stack(rows: Mapping[int, Mapping[str, str]]) -> dict[int, Frame]:
    """Return the frames. Every stack has an outermost one, whose parent is 0 or not written.

    libtpu 0.0.42 writes the parent's number plus one, so that 1 stands for none and no 0 is there.
    """
    parents = {key: integer(row.get("parent_frame_id", "")) for key, row in rows.items()}
    shift = 1 if parents and 0 not in parents.values() else 0
    return {key: Frame(integer(row.get("file_location_id", "")), parents[key] - shift) for key, row in rows.items()}


def _type(scanner: Scanner, depth: int = 0) -> Type:
    if depth > DEEPEST:
        scanner.fail("a type of too many tuples inside each other")
    if scanner.accept("("):
        parts: list[Type] = []
        scanner.many(")", lambda: parts.append(_type(scanner, depth + 1)))
        return tuple(parts)
    dtype = scanner.need(_DTYPE, "a type")
    dims: list[int] = []
    scanner.many("]", lambda: dims.append(scanner.integer()))
    layout = list(reversed(range(len(dims))))
    if scanner.text.startswith("{", scanner.at):
        layout = _layout(scanner, layout)
    if sorted(layout) != list(range(len(dims))) or min(dims, default=0) < 0:
        scanner.fail("a layout that is not of the type's dimensions")
    return Shape(dtype, tuple(dims), tuple(layout))


def _layout(scanner: Scanner, default: list[int]) -> list[int]:
    """Return the order of dimensions; one that says only tiles has the default."""
    scanner.expect("{")
    order: list[int] = []
    while (size := scanner.take(INTEGER)) is not None:
        order.append(int(size))
        if not scanner.accept(","):
            break
    if scanner.accept(":"):
        scanner.nested("{")
    else:
        scanner.expect("}")
    return order or default


def _computations(scanner: Scanner) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry = None
    scanner.blank()
    while scanner.at < len(scanner.text):
        main = scanner.accept("ENTRY")
        if main and entry is not None:
            scanner.fail("a second ENTRY computation")
        computation = _computation(scanner, computations)
        computations[computation.name] = computation
        entry = computation.name if main else entry
        scanner.blank()
    if entry is None:
        scanner.fail("the text ends without an ENTRY computation")
    return computations, entry


def _computation(scanner: Scanner, known: Mapping[str, Computation]) -> Computation:
    name = scanner.name()
    if name in known:
        scanner.fail(f"a second computation {name}")
    _signature(scanner)
    scanner.expect("{")
    instructions: dict[str, Instruction] = {}
    while not scanner.accept("}"):
        instruction = _instruction(scanner, instructions, known)
        instructions[instruction.name] = instruction
    if sum(x.root for x in instructions.values()) != 1:
        scanner.fail(f"computation {name} has not one ROOT")
    numbers = sorted(int(x.literal) for x in instructions.values() if x.opcode == "parameter")
    if numbers != list(range(len(numbers))):
        scanner.fail(f"computation {name} has not every parameter once")
    _attributes(scanner)
    return Computation(name, instructions)


def _signature(scanner: Scanner) -> None:
    def parameter() -> None:
        scanner.name()
        scanner.expect(":")
        _type(scanner)

    if scanner.accept("("):
        scanner.many(")", parameter)
        scanner.expect("->")
        _type(scanner)


def _instruction(scanner: Scanner, before: Mapping[str, Instruction], known: Mapping[str, Computation]) -> Instruction:
    scanner.blank()
    line, root = scanner.line(), scanner.accept("ROOT ")
    name = scanner.name()
    if name in before:
        scanner.fail(f"a second instruction {name}")
    scanner.expect("=")
    kind = _type(scanner)
    opcode = scanner.need(_OPCODE, "an opcode")
    if not is_known(opcode):
        scanner.fail(f"the opcode {opcode!r} is not known")
    scanner.expect("(")
    literal, operands = _operands(scanner, opcode)
    for missing in [x for x in operands if x not in before]:
        scanner.fail(f"{name} reads {missing}, which nothing before it makes")
    found = Instruction(name, opcode, kind, operands, literal, _attributes(scanner), root, line)
    for missing in [x for x in found.called if x not in known]:
        raise HloError(f"line {line}: {name} calls {missing}, which nothing before it defines")
    return found


def _operands(scanner: Scanner, opcode: str) -> tuple[str, tuple[str, ...]]:
    """Return the literal and the operands, after the opening bracket."""
    if opcode == "parameter":
        number = scanner.integer()
        scanner.expect(")")
        return str(number), ()
    if opcode == "constant":
        return _COMMENT.sub("", scanner.nested("(")).strip(), ()
    operands: list[str] = []

    def operand() -> None:
        scanner.blank()
        if scanner.text.startswith("(", scanner.at) or _DTYPE.match(scanner.text, scanner.at):
            _type(scanner)
        operands.append(scanner.name())

    scanner.many(")", operand)
    return "", tuple(operands)


def is_known(opcode: str) -> bool:
    """Return whether XLA has the opcode, run at once or asynchronously."""
    return opcode in OPCODES or any(opcode.endswith(end) and opcode[: -len(end)] in OPCODES for end in SUFFIXES)

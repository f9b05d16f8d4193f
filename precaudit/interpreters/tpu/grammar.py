"""Optimised HLO text (``compiled.as_text()``) read by its grammar.

    module      = "HloModule" NAME {"," attribute} {table} {computation}
    table       = "FileNames" {INT STRING} | "FunctionNames" … | "FileLocations" {INT "{" fields "}"} | "StackFrames" …
    computation = ["ENTRY"] NAME ["(" [NAME ":" type {"," …}] ")" "->" type] "{" {instruction} "}" {"," attribute}
    instruction = ["ROOT"] NAME "=" type OPCODE "(" (INT | literal | [[type] NAME {"," …}]) ")" {"," attribute}
    attribute   = KEY "=" value             value: up to a comma or the end of the line, outside brackets and strings
    type        = DTYPE "[" [INT {"," INT}] "]" ["{" [INT {"," INT}] [":" tiles] "}"] | "(" [type {"," type}] ")"

No JAX here.
"""

import re
from collections.abc import Mapping

from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Frame, Instruction, Location, Module, Type
from precaudit.interpreters.tpu.opcodes import is_known
from precaudit.interpreters.tpu.scanner import (
    DEEPEST,
    INTEGER,
    KEY,
    STRING,
    HloError,
    Scanner,
    braced_fields,
    integer,
    unescape,
)


def parse_module(text: str) -> Module:
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
        {key: _location(braced_fields(row)) for key, row in tables.get("FileLocations", {}).items()},
        _stack({key: braced_fields(row) for key, row in tables.get("StackFrames", {}).items()}),
    )


_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_TABLE = re.compile(r"FileNames|FunctionNames|FileLocations|StackFrames")
_OPCODE = re.compile(r"[a-z][a-z0-9\-]*+")
_DTYPE = re.compile(r"([a-z][a-z0-9]*+)\[")
_TILE = re.compile(r"T\((\d[\d,]*)\)")


def _attributes(scanner: Scanner) -> dict[str, str]:
    found = {}
    while scanner.accept(","):
        key = scanner.need(KEY, "an attribute")
        value = scanner.nested_text().strip()
        whole = STRING.fullmatch(value)
        found[key] = unescape(whole[1]) if whole else value if '"' in value else _COMMENT.sub("", value)
    return found


def _table(scanner: Scanner) -> dict[int, str]:
    rows = {}
    while (key := scanner.take(INTEGER)) is not None:
        if (string := scanner.take(STRING)) is not None:
            rows[int(key)] = unescape(string)
        else:
            scanner.expect("{")
            rows[int(key)] = scanner.nested_text("{")
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
    layout, tile = list(reversed(range(len(dims)))), tuple[int, ...]()
    if scanner.text.startswith("{", scanner.at):
        layout, tile = _layout(scanner, layout)
    if sorted(layout) != list(range(len(dims))) or min(dims, default=0) < 0:
        scanner.fail("a layout that is not of the type's dimensions")
    return ArrayType(dtype, tuple(dims), tuple(layout), tile if len(tile) <= len(dims) and all(tile) else ())


def _layout(scanner: Scanner, default: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return the order of dimensions, and the first tile; one that says only tiles has the default order."""
    scanner.expect("{")
    order: list[int] = []
    while (size := scanner.take(INTEGER)) is not None:
        order.append(int(size))
        if not scanner.accept(","):
            break
    if not scanner.accept(":"):
        scanner.expect("}")
        return order or default, ()
    found = _TILE.match(scanner.nested_text("{"))
    return order or default, () if found is None else tuple(map(integer, found[1].split(",")))


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
    for missing in [x for x in found.computations if x not in known]:
        raise HloError(f"line {line}: {name} calls {missing}, which nothing before it defines")
    return found


def _operands(scanner: Scanner, opcode: str) -> tuple[str, tuple[str, ...]]:
    """Return the literal and the operands, after the opening bracket."""
    if opcode == "parameter":
        number = scanner.integer()
        scanner.expect(")")
        return str(number), ()
    if opcode == "constant":
        return _COMMENT.sub("", scanner.nested_text("(")).strip(), ()
    operands: list[str] = []

    def operand() -> None:
        scanner.blank()
        if scanner.text.startswith("(", scanner.at) or _DTYPE.match(scanner.text, scanner.at):
            _type(scanner)
        operands.append(scanner.name())

    scanner.many(")", operand)
    return "", tuple(operands)

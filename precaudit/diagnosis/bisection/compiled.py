"""The compiled programs of two states, diffed where their records part first: fusions, formats, algorithms. No JAX."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from precaudit.diagnosis.bisection.records import HloRow, Parted
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module
from precaudit.interpreters.tpu.scanner import HloError
from precaudit.recording.runs.programs import is_program_run, open_program_run
from precaudit.references.comparison.between import compare_runs
from precaudit.schema.records.base import json_number, value

SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # that compute nothing
SAID = ("operand_precision", "algorithm", "custom_call_target", "kind")
MOST = 20  # rows


def first_parted(good: Path, bad: Path) -> Parted | None:
    """Return the first tensor of two runs whose values differ, in the program's order; None where none does."""
    first = next((e for e in compare_runs(bad, good).errors if e.kind == "pair" and e.max_diff not in (0, None)), None)
    if first is None:
        return None
    source = ""
    if is_program_run(good):
        points = [p for one in open_program_run(good).entries for p in one.record.points]
        source = next((p.source for p in points if p.name == first.point), "")
    where = f"{first.prompt}, {first.phase} {first.step}"
    return Parted(
        point=first.point, where=where, layer=first.layer, source=source, size=json_number(value(first.rel_l2))
    )


def hlo_rows(good: Sequence[str], bad: Sequence[str], source: str) -> tuple[HloRow, ...]:
    """Return what the compiled texts of two sides hold otherwise of a line; of all where none is of that line."""
    sides = [[m for m in map(_read, texts) if m is not None] for texts in (good, bad)]
    counts = [Counter(x for m in side for x in _described(m, source)) for side in sides]
    if source and not (counts[0] and counts[1]):
        return hlo_rows(good, bad, "")
    differ = [what for what in dict.fromkeys((*counts[0], *counts[1])) if counts[0][what] != counts[1][what]]
    return tuple(HloRow(what=what, good=counts[0][what], bad=counts[1][what]) for what in sorted(differ)[:MOST])


def _read(text: str) -> Module | None:
    try:
        return parse_module(text)
    except HloError:
        return None


def _described(module: Module, source: str) -> Iterator[str]:
    """Yield in words each operation of a line, and with which other lines it is fused."""
    fusions = {name: x for _, x in module.walk() if x.opcode == "fusion" for name in x.computations}
    for computation, x in module.walk():
        at = _line(module, x)
        if x.opcode in SILENT or (source and at != source):
            continue
        yield _operation(computation, x)
        if computation.name in fusions and source:
            lines = {_line(module, y) for y in computation.instructions.values() if y.opcode not in SILENT}
            others = sorted(filter(None, lines - {source, None}))
            yield f"fused with {', '.join(others) if others else 'nothing else'}"


def _line(module: Module, x: Instruction) -> str | None:
    found = module.source(x)
    return None if found is None else found.replace("\\", "/").rpartition("/")[2]


def _operation(computation: Computation, x: Instruction) -> str:
    operands = [_format(computation.instructions[name]) for name in x.operands]
    said = [f"{key} {x.attributes[key]}" for key in SAID if key in x.attributes]
    return " ".join([f"{x.opcode} {_format(x)} of {', '.join(dict.fromkeys(operands)) or 'nothing'}", *said])


def _format(x: Instruction) -> str:
    return x.type.dtype if isinstance(x.type, ArrayType) else "a tuple"

"""The compiled programs of two states, diffed where their records part first: fusions, formats, algorithms. No JAX."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from precaudit.diagnosis.bisection.records import HloRow, Parted
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module
from precaudit.interpreters.tpu.scanner import HloError
from precaudit.recording.runs.programs import ProgramPoint, is_program_run, open_program_run
from precaudit.references.comparison.between import compare_runs
from precaudit.schema.places import Place
from precaudit.schema.records.base import json_number, value
from precaudit.schema.records.errors import ErrorRecord, PairError

SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # that compute nothing
SAID = ("operand_precision", "algorithm", "custom_call_target", "kind")
MOST = 20  # rows
SHARE = 0.01  # of the largest relative difference of any tensor


def first_parted(good: Path, bad: Path) -> Parted | None:
    """Return the first tensor of two runs, in the program's order, that differs by a share of the largest difference.

    Before it other orders of float32 sums may have moved single elements. None where no tensor differs.
    """
    differ = [e for e in compare_runs(bad, good).errors if isinstance(e, PairError) and e.max_diff not in (0, None)]
    if not differ:
        return None
    points: dict[str, dict[str, ProgramPoint]] = {}
    if is_program_run(good):
        entries = [one.record for one in open_program_run(good).entries]
        points = {r.phase: {p.name: p for p in (*r.points, *r.outputs)} for r in entries}
        differ.sort(key=lambda e: program_order(e, points))
    else:
        differ.sort(key=lambda e: (e.phase != "prefill", Place.of(e).order))
    sizes = [value(e.rel_l2) for e in differ]
    most = max((x for x in sizes if isfinite(x)), default=0.0)
    first = next(e for e, x in zip(differ, sizes, strict=True) if not x < SHARE * most)
    known = points.get(first.phase, {}).get(first.point)
    source = "" if known is None else known.source
    where = f"{first.prompt}, {first.phase} {first.step}"
    return Parted(
        point=first.point, where=where, layer=first.layer, source=source, size=json_number(value(first.rel_l2))
    )


def program_order(e: ErrorRecord, points: Mapping[str, Mapping[str, ProgramPoint]]) -> tuple[int, ...]:
    """Return a key that sorts the records of a program as it makes them: through steps of scans, point after point.

    ``points``: of each entry point, by phase and name, in the program's order.
    """
    own = list(points[e.phase].values())
    at = next((i for i, p in enumerate(own) if p.name == e.point), len(own))
    begin = at
    while 0 < begin < len(own) and own[begin].stacked and own[begin - 1].stacked == own[begin].stacked:
        begin -= 1
    return list(points).index(e.phase), e.step, begin, -1 if e.layer is None else e.layer, at


def hlo_rows(good: Sequence[str], bad: Sequence[str], source: str) -> tuple[HloRow, ...]:
    """Return what the compiled texts of two sides hold otherwise of a line; of all where that is nothing."""
    sides = [[m for m in map(_read, texts) if m is not None] for texts in (good, bad)]
    counts = [Counter(x for m in side for x in _described(m, source)) for side in sides]
    differ = [what for what in dict.fromkeys((*counts[0], *counts[1])) if counts[0][what] != counts[1][what]]
    if source and not (differ and counts[0] and counts[1]):
        return hlo_rows(good, bad, "")
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
    operands = [_operand(computation.instructions[name]) for name in x.operands]
    said = [f"{key} {x.attributes[key]}" for key in SAID if key in x.attributes]
    return " ".join([f"{x.opcode} {_format(x)} of {', '.join(dict.fromkeys(operands)) or 'nothing'}", *said])


def _operand(x: Instruction) -> str:
    """Return an operand's format, with the value of a number."""
    number = x.opcode == "constant" and isinstance(x.type, ArrayType) and not x.type.dims
    return f"{_format(x)} {x.literal}" if number else _format(x)


def _format(x: Instruction) -> str:
    return x.type.dtype if isinstance(x.type, ArrayType) else "a tuple"

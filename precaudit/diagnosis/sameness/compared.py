"""Whether two programs are one formula: outputs in FP64, row for row; then what rounding does, or where they part."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from precaudit.diagnosis.evidence.effects import DISTANCE, output_shares
from precaudit.diagnosis.evidence.last_call import Last
from precaudit.diagnosis.named import norms
from precaudit.diagnosis.sameness.observed import Observed, observe
from precaudit.diagnosis.sameness.on_mesh import causes_on_meshes
from precaudit.diagnosis.sameness.others import ENOUGH
from precaudit.diagnosis.sameness.parting import first_parting
from precaudit.diagnosis.sameness.records import RowsBeside, Sameness
from precaudit.diagnosis.sameness.sums import sums_of_one
from precaudit.diagnosis.sameness.trees import output_names, outputs_left_out
from precaudit.errors import UserError, nearest
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance, silent
from precaudit.recording.programs.preparing import error_text
from precaudit.recording.programs.program import OUTPUT, OUTPUT_LOGITS, Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.programs import Opened
from precaudit.references.alignment.vectors import Vectors
from precaudit.references.traced.forward import NotChained
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.places import spans
from precaudit.schema.records.base import json_number, value

ONE_VALUE = 1e-9  # of a row's norm, that FP64 leaves between two ways of one formula
CONSTANT = 1e-6  # of a row's norm, that constants held in float32 by one of them leave
BY_FAR = 0.5  # of the distance of rows from where else they may begin: rows of other tokens are all as far
ALONE = ProgramTraceOptions(unchecked=True)  # nothing here asks what taps change
UNNAMED = "out"  # output of a program that names none and returns one array


@dataclass(frozen=True)
class Named:
    """A program, the entry point of it that is looked at, and what it is called."""

    program: Program
    entry: str
    name: str

    @property
    def outputs(self) -> str | Sequence[str] | None:
        """The names of the entry point's outputs."""
        return (self.program if self.entry == self.program.entry else self.program.then[self.entry]).outputs


def same_formula(
    one: Named, other: Named, rows: int | None = None, cases: Sequence[str] | None = None, tell: Advance = silent
) -> tuple[Sameness, ...]:
    """Return, of every case that both have, whether two programs are one formula.

    ``rows``: which row of the longer output is the first of the shorter; None: where FP64 finds it.
    Raises UserError where no case or no output is of both.
    """
    with tempfile.TemporaryDirectory() as folder:
        both = [with_named_output(x) for x in (one, other)]
        shared = [c for c in both[0].program.cases if c in both[1].program.cases]
        if not shared:
            named = (", ".join(x.program.cases) for x in both)
            raise UserError("no case is of both programs: one has {}, the other {}".format(*named))
        if cases is not None and (bad := [c for c in cases if c not in shared]):
            raise UserError(f"no case {bad[0]!r} is of both{nearest(bad[0], shared)}")
        asked = [c for c in shared if cases is None or c in cases]
        runs = []
        for i, x in enumerate(both):
            program = x.program.some(asked)
            runs.append((trace_program(program, Path(folder) / str(i), options=ALONE, tell=tell), program))
        return tuple(_of_case(both, runs, case, rows, tell) for case in asked)


def with_named_output(x: Named) -> Named:
    """Return a program whose only result is named, where it names none; raises UserError where it has several."""
    if x.outputs is not None:
        return x
    if x.entry == x.program.entry:
        try:
            shape = jax.eval_shape(x.program.call, x.program.params, *next(iter(x.program.cases.values())))
        except Exception as error:
            raise UserError(f"{x.name} cannot be traced: {error_text(error)}") from None
        if not hasattr(shape, "dtype"):
            raise UserError(f'{x.name} returns several results; name them: Program(..., outputs=("logits", "cache"))')
        return replace(x, program=x.program.altered(outputs=UNNAMED))
    raise UserError(f'{x.name} names no outputs: Entry(..., outputs=("logits", "cache"))')


def _of_case(
    both: Sequence[Named], runs: Sequence[tuple[Opened, Program]], case: str, rows: int | None, tell: Advance
) -> Sameness:
    programs = (both[0].name, both[1].name)

    def unknown(why: str) -> Sameness:
        return Sameness(programs=programs, case=case, answer="unknown", says=f"cannot be compared: {why}")

    try:
        seen = [observe(*run, case)[x.entry] for x, run in zip(both, runs, strict=True)]
    except (CannotLift, NotImplementedError, NotChained) as error:
        return unknown(f"FP64 does not come through: {str(error).splitlines()[0]}")
    exact = [x.outputs() for x in seen]
    names = [output_names(program, x.entry) for x, (_, program) in zip(both, runs, strict=True)]
    shared = [n for n in exact[0] if n in exact[1] and n in names[0] and n in names[1]]
    if not shared:
        return unknown("no output is of both: one names {}, the other {}".format(*(", ".join(x) for x in exact)))
    found: list[Beside] = []
    for name in shared:
        x, y = exact[0][name], exact[1][name]
        if x.shape[1] != y.shape[1]:
            return unknown(f"{name} has rows of {x.shape[1]} elements in one and of {y.shape[1]} in the other")
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return unknown(f"{name} is not finite in FP64")
        found.append(b := _beside(name, (x, y), rows))
        if rows is None and not b.told:
            why = f"of {len(x)} and {len(y)} rows of {name} none is equal: which one does the shorter begin at (rows)"
            return unknown(why)
    worst = max(float(b.apart.max()) for b in found)
    outputs = tuple(_rows_record(b, exact, [s.outputs_as_run()[b.output] for s in seen]) for b in found)
    rounding = min(max(value(r.rounding[i]) for r in outputs) for i in (0, 1))
    if worst <= ONE_VALUE or worst <= min(CONSTANT, rounding):
        lines = tuple(_line(x, tell) for x in seen)
        says, sums = _same_says(programs, outputs, worst), sums_of_one(programs, seen)
        left = outputs_left_out(names, {b.output for b in found})
        says += f". Not compared: {', '.join(left)}" if left else ""
        return Sameness(programs=programs, case=case, answer="same", says=says, outputs=outputs, lines=lines, sums=sums)
    if not _share_values(seen):
        return unknown("no weight and no input of one is among the other's, so that their formulas are not either")
    partings = tuple(
        first_parting(name, mine, its, _covered(mine, found), _calls_apart(mine, found, i))
        for i, (name, mine, its) in enumerate(zip(programs, seen, seen[::-1], strict=True))
    )
    return Sameness(
        programs=programs,
        case=case,
        answer="other",
        says=_other_says(outputs, worst),
        outputs=outputs,
        partings=partings,
        causes=causes_on_meshes(programs, seen, [p.call for p in partings]),
    )


class Beside(NamedTuple):
    """Rows of an output of both, from ``first`` on, and how far each is apart in FP64.

    ``told``: whether it is known that these are to be held against each other.
    """

    output: str
    first: tuple[int, int]
    apart: Array
    told: bool = True


def _beside(name: str, exact: tuple[Array, Array], given: int | None) -> Beside:
    """Return the rows of an output side by side: the shorter begins where most are equal, else nearest by far."""
    lengths = [len(x) for x in exact]
    n, spare = min(lengths), abs(lengths[0] - lengths[1])
    if given is not None and not 0 <= given <= spare:
        raise UserError(f"rows = {given}: {name} has {lengths[0]} and {lengths[1]} rows; 0 to {spare} fit")

    def at(start: int) -> Beside:
        first = (start, 0) if lengths[0] >= lengths[1] else (0, start)
        x, y = (e[f : f + n] for e, f in zip(exact, first, strict=True))
        return Beside(name, first, norms(x - y) / np.where(norms(y) > 0, norms(y), 1.0))

    each = [at(s) for s in (range(spare + 1) if given is None else [given])]
    off = sorted(float(np.median(b.apart)) for b in each)
    best = min(each, key=lambda b: (-int((b.apart <= ONE_VALUE).sum()), float(np.median(b.apart))))
    told = len(each) == 1 or bool((best.apart <= ONE_VALUE).any()) or off[0] <= BY_FAR * off[1]
    return best._replace(told=told)


def _rows_record(b: Beside, exact: Sequence[dict[str, Array]], ran: Sequence[Array]) -> RowsBeside:
    n = len(b.apart)
    both = [(e[b.output][f : f + n], r[f : f + n]) for e, r, f in zip(exact, ran, b.first, strict=True)]
    off = [json_number(ratio(norm(its - mine), norm(mine))) for mine, its in both]
    top1 = [int((its.argmax(axis=1) == mine.argmax(axis=1)).sum()) for mine, its in both]
    return RowsBeside(
        output=b.output,
        rows=n,
        first=b.first,
        apart=float(b.apart.max()),
        where=tuple(int(i) for i in np.flatnonzero(b.apart > ONE_VALUE)),
        rounding=(off[0], off[1]),
        top1=(top1[0], top1[1]) if b.output == LOGITS else None,
    )


def _share_values(seen: Sequence[Observed]) -> bool:
    """Whether a weight or an input of a program, of several numbers, is the other's, in any layout."""
    mine, its = ([x for x in s.given() if x.size > 1] for s in seen)
    known = Vectors(its)
    return not mine or not its or any(known.share(x) >= ENOUGH for x in mine)


def _covered(mine: Observed, found: Sequence[Beside]) -> float:
    """Return the share of a program's output rows that are held against the other's."""
    whole = mine.outputs()
    return min(len(b.apart) / len(whole[b.output]) for b in found)


def _calls_apart(mine: Observed, found: Sequence[Beside], i: int) -> list[int]:
    """Return the calls of a program, the first or the second, with a row that is apart."""
    calls = set()
    for b in found:
        ends = np.cumsum([len(mine.rows(call, np.asarray(c[OUTPUT + b.output]))) for call, c in enumerate(mine.exact)])
        calls |= {int(np.searchsorted(ends, b.first[i] + at, "right")) for at in np.flatnonzero(b.apart > ONE_VALUE)}
    return sorted(calls)


def _line(x: Observed, tell: Advance) -> str:
    """Return which point's own rounding changes a program's output most, and its share of all sizes."""
    names = [p.name for p in x.of.opened.record.outputs]
    last = Last(*x.of, OUTPUT_LOGITS if OUTPUT_LOGITS in names else names[0])
    with without_mesh():
        (found,) = output_shares(last, [x.case], "kl" if last.distributions else DISTANCE, tell)
    sizes = [abs(value(s.share)) for s in found.shares]
    if found.unknown or not sum(sizes):
        return ""
    most = found.shares[int(np.argmax(sizes))]
    source = next((p.source for p in x.points if p.name == most.point), "")
    layer = "" if most.layer is None else f" of layer {most.layer}"
    return f"{most.point}{layer} ({source}), {100 * max(sizes) / sum(sizes):.0f} % of what rounding changes"


def _same_says(programs: tuple[str, str], found: Sequence[RowsBeside], worst: float) -> str:
    rows = ", ".join(f"{r.output} ({r.rows} rows)" for r in found)
    off = [max(value(r.rounding[i]) for r in found) for i in (0, 1)]
    constants = "" if worst <= ONE_VALUE else ", a difference that a constant in float32 may explain"
    return (
        f"are one formula: {rows} agree in FP64 to {digits(worst, 2)}{constants}. As they ran, {programs[0]} is "
        f"{digits(off[0])} from FP64 and {programs[1]} {digits(off[1])}" + _nearer(programs, off)
    )


def _nearer(programs: tuple[str, str], off: Sequence[float]) -> str:
    """Return which of two is nearer, where they are not alike to a tenth."""
    if abs(off[0] - off[1]) <= 0.1 * max(off):
        return ""
    return f": {programs[int(off[1] < off[0])]} is nearer"


def _other_says(found: Sequence[RowsBeside], worst: float) -> str:
    r = max(found, key=lambda r: value(r.apart))
    row = f"row{'s' if len(r.where) > 1 else ''} {spans(r.where)} of {r.rows}"
    where = row if len(r.where) < r.rows else f"all {r.rows} rows" if r.rows > 1 else "its only row"
    return f"are not one formula: without any rounding, {r.output} is up to {digits(worst, 2)} apart in {where}"

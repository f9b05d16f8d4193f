"""The verdicts of a program's run: its error records by the default rule, and what is not there."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

import msgspec

from precaudit.judging.baselines import BaselineRecord
from precaudit.judging.budgets import Known
from precaudit.judging.units import unit_notes
from precaudit.judging.verdicts import Verdict, other_products
from precaudit.recording.runs.compared_programs import filed_errors, is_compared, marks_of, pairs_of
from precaudit.recording.runs.program_places import compared_places, recomputed_places
from precaudit.recording.runs.programs import Opened, file_of
from precaudit.schema import predictions
from precaudit.schema.digits import digits
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import CACHES, LOGITS, POINTS, parts_of
from precaudit.schema.places import ORDER, Place
from precaudit.schema.records.errors import (
    ErrorRecord,
    FormulaError,
    ForwardError,
    LocalError,
    PolicyError,
)

OUTSIDE = 1 << 30  # the layer of what comes after all layers
Key = tuple[str, Place]  # kind, and where


def was_compared(
    opened: Opened,
    names: Mapping[str, str] | None,
    accum: Sequence[str] = (),
    holds: Callable[[Verdict], bool] | None = None,
) -> bool:
    """Whether a run was compared, in all places that are looked at, with sums in all of these formats (``accum``).

    Beside the textbook of these files where there are any (``names``, as ``Names`` has it).
    """
    if not is_compared(opened):
        return False
    marks = marks_of(opened)
    if not ({*accum} <= {*marks.accum} and (names is None or marks.names == names)):
        return False
    seen = {(e.kind, *Place.of(e)) for e in filed_errors(opened)}
    lacks = (v for v in missing_program_records(opened, seen) if v.prompt not in opened.absent)
    return not any(holds is None or holds(v) for v in lacks)


def suspect(verdicts: Sequence[Verdict], errors: Sequence[ErrorRecord]) -> Iterator[Verdict]:
    """Yield the verdicts with those that something before them accounts for called ``input suspect``."""
    after = _formulas(verdicts, errors) | _inherited_keys(verdicts, errors)
    follows = _nonfinite(verdicts, errors)
    return (
        msgspec.structs.replace(v, status="input suspect") if follows(v) or (v.kind, v.place) in after else v
        for v in verdicts
    )


def with_indices(verdicts: Iterable[Verdict], opened: Opened) -> Iterator[Verdict]:
    """Yield the verdicts, a row of a point of several leading axes as its index in each: row 2 of a batch, its 7th."""
    every = [(x.record.phase, p) for x in opened.entries for p in (*x.record.points, *x.record.outputs)]
    shapes = {(phase, p.name): p.shape[:-1] for phase, p in every}
    for v in verdicts:
        lead = shapes.get((v.phase, v.point), ()) if v.kind in ("local", "forward") and v.scope == "token" else ()
        if sum(n > 1 for n in lead) > 1 and isinstance(v.index, int) and v.index < prod(lead):
            v = msgspec.structs.replace(v, index=_each(v.index, lead))
        yield v


def _each(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return an index in the order of memory as that along every axis."""
    found: list[int] = []
    for n in reversed(shape):
        index, i = divmod(index, n)
        found.insert(0, i)
    return tuple(found)


def _nonfinite(verdicts: Iterable[Verdict], errors: Sequence[ErrorRecord]) -> Callable[[Verdict], bool]:
    """Return what tells what is not finite after the first segment that makes it so, in its call or a later one.

    What arises in an operation of its own stays.
    """
    first: dict[str, tuple[int, ...]] = {}
    order: Callable[[Verdict], tuple[int, ...]] | None = None
    for v in verdicts:
        if v.status == "nonfinite" and v.kind == "local":
            order = order or _order(errors)
            first[v.prompt] = min(first.get(v.prompt, order(v)), order(v))

    def follows(v: Verdict) -> bool:
        if v.status != "nonfinite" or v.kind not in ("local", "forward") or v.prompt not in first or order is None:
            return False
        arises = v.kind == "local" and ((v.metric and v.text) or order(v) == first[v.prompt])
        return not arises and order(v) >= first[v.prompt]

    return follows


def _order(errors: Sequence[ErrorRecord]) -> Callable[[Verdict], tuple[int, ...]]:
    """Return what orders places of a case as the program does: each step of a scan with all of the scan's points."""
    steps: dict[tuple[str, str], int] = {}
    for e in errors:
        if isinstance(e, ForwardError | LocalError):
            at = e.phase, e.point
            steps[at] = max(steps.get(at, 0), 0 if e.layer is None else e.layer + 1)
    phases = {phase: i for i, phase in enumerate(dict.fromkeys(phase for phase, _ in steps))}
    places: dict[tuple[str, str], tuple[int, int]] = {}
    block, before = 0, 0
    for i, (at, n) in enumerate(steps.items()):
        block = block if n and n == before else i
        places[at], before = (block, i), n

    def order(v: Verdict) -> tuple[int, ...]:
        block, i = places[v.phase, v.point]
        return phases[v.phase], v.step, block, v.layer or 0, i

    return order


def _formulas(verdicts: Sequence[Verdict], errors: Sequence[ErrorRecord]) -> set[Key]:
    """Return formulas that read what fails before them.

    A textbook's record says whose value it is (``FAMILY:LAYER.POINT``), and the rows of the graph what that reads; of
    any other reference what comes later in the records of a call inherits.
    """
    broken = [v for v in verdicts if v.kind == "formula" and v.status in ("fail", "nonfinite")]
    if not broken:
        return set()
    wanted = {v.place for v in broken}
    names: dict[Place, str] = {}
    order: dict[Place, int] = {}
    for i, e in enumerate(of_kinds(errors, FormulaError)):
        if (key := Place.of(e)) in wanted:
            names[key], order[key] = e.reference, i
    calls: dict[tuple[str, str, int], list[Verdict]] = {}
    for v in broken:
        calls.setdefault((v.prompt, v.phase, v.step), []).append(v)
    inherits: set[Key] = set()
    for its in calls.values():
        seen = {x for v in its if (x := _textbook(names[v.place])) is not None}
        first = min(order[v.place] for v in its)
        for v in its:
            mine = _textbook(names[v.place])
            later = order[v.place] > first if mine is None else _inherits(mine, seen, [i for i, _ in seen])
            if later:
                inherits.add(("formula", v.place))
    return inherits


def _inherited_keys(verdicts: Sequence[Verdict], errors: Sequence[ErrorRecord]) -> set[Key]:
    """Return what an announced policy is broken at only because something before it is.

    Attention that closes from its own recorded scores or probabilities, which fail, and what is not finite after the
    first operation that makes it so, in its call.
    """
    broken = [v for v in verdicts if v.kind == "policy" and v.status in ("fail", "nonfinite")]
    if not broken:
        return set()
    wanted = {v.place for v in broken}
    names = {
        at: x for e in of_kinds(errors, PolicyError) if (at := Place.of(e)) in wanted and (x := _textbook(e.reference))
    }
    calls: dict[tuple[str, str, int], list[Verdict]] = {}
    for v in broken:
        calls.setdefault((v.prompt, v.phase, v.step), []).append(v)
    inherits: set[Key] = set()
    for its in calls.values():
        places = {names[v.place] for v in its}
        first = min((_depth(names[v.place]) for v in its if v.status == "nonfinite"), default=None)
        for v in its:
            layer, point = names[v.place]
            between = v.inherits is not None and any((layer, name) in places for name in parts_of(point))
            later = v.status == "nonfinite" and first is not None and first < _depth((layer, point))
            if between or later:
                inherits.add(("policy", v.place))
    return inherits


def _depth(at: tuple[int, str]) -> tuple[int, int]:
    """Return how far into the textbook a place is."""
    return at[0], ORDER[at[1]]


def _textbook(reference: str) -> tuple[int, str] | None:
    """Return (layer, point) of a textbook's record; None of another reference's."""
    where, _, point = reference.partition(":")[2].rpartition(".")
    if point not in POINTS:
        return None
    return (int(where) if where else OUTSIDE, point)


def _inherits(mine: tuple[int, str], broken: Container[tuple[int, str]], layers: Iterable[int]) -> bool:
    """Whether a point of the textbook is made from one that is broken: in an earlier layer, or among what it reads."""
    layer, point = mine
    if any(other < layer for other in layers):
        return True
    row = POINTS[point]
    read = {(layer, name) for name in (*row.inputs, *(row.with_experts or ()))}
    read |= {(layer, CACHES[name]) for name in row.inputs if row.reads_keys and name in CACHES}
    return any(x in broken or _inherits(x, broken, ()) for x in read)


def unpaired_views(opened: Opened) -> Iterator[Verdict]:
    """Yield ``unknown`` for every entry point whose positions could be held against no other's."""
    for x in marks_of(opened).unpaired:
        yield Verdict(status="unknown", kind="coverage", prompt=x.case, phase=x.phase, point=LOGITS, text=x.why)


def absent_cases(opened: Opened) -> Iterator[Verdict]:
    """Yield a missing verdict for every case that was not recorded, since the run was cut off."""
    for case in opened.absent:
        yield Verdict(status="missing", kind="coverage", prompt=case, text="the run was cut off before it was recorded")


def missing_program_records(opened: Opened, seen: Container[object]) -> Iterator[Verdict]:
    """Yield a missing verdict for every point, step, case and call without an error record, and for absent cases."""
    yield from absent_cases(opened)
    for one in opened.entries:
        wanted = [("local", *place) for place in recomputed_places(one.record)]
        wanted += [("forward", *place) for place in compared_places(one.record)]
        for case, call in product(one.record.cases, range(one.record.calls)):
            for kind, p, layer in wanted:
                if (kind, case, one.record.phase, call, layer, p.name) not in seen:
                    yield Verdict(
                        status="missing",
                        kind=kind,
                        prompt=case,
                        phase=one.record.phase,
                        step=call,
                        layer=layer,
                        point=p.name,
                        text="no error record of it; compare again without filters",
                    )


def program_disturbances(opened: Opened) -> Iterator[Verdict]:
    """Yield ``unknown`` for every case of a predicted run whose products taps change in precision."""
    for one in opened.entries:
        for n in one.record.neutrality:
            yield from other_products(n.predicted, (n.case,), one.record.phase, 0)


def program_provenance(opened: Opened) -> BaselineRecord:
    """Return where a program's errors come from; of its code nothing: that is what a baseline is held against."""
    r = opened.record
    inputs = {case: r.hashes.get(file_of(r, i, 0, "inputs"), "") for i, case in enumerate(r.cases)}
    return BaselineRecord(
        schema=r.schema,
        model=r.program,
        weights=r.weights,
        policy={},
        tokens=inputs,
        device=r.device,
        versions=r.versions,
        run=r.id,
    )


def program_budget_names(opened: Opened) -> Known:
    """Return what a budget of a program's run may name: its points and outputs, and its phases."""
    every = [one.record for one in opened.entries]
    return Known(frozenset(p.name for x in every for p in (*x.points, *x.outputs)), frozenset(x.phase for x in every))


def layers_of(opened: Opened) -> int:
    """Return the most steps that a point is stacked over; of a run of some layers, up to the last of these."""
    if opened.record.layers is not None:
        return max(opened.record.layers, default=-1) + 1
    every = (p for one in opened.entries for p in one.record.points)
    return max((prod(p.stacked) for p in every if p.stacked), default=0)


def sources(opened: Opened) -> dict[str, str]:
    """Return the ``FILE:LINE`` that made each point, the file as seen from here where it is the program's or beside it.

    A run knows a file by its name alone; one that is not there keeps it.
    """
    where = opened.record.program.rpartition(":")[0]
    folder = Path(where).parent if where.endswith(".py") else Path()
    found = {}
    for p in (p for one in opened.entries for p in one.record.points):
        name, _, line = p.source.rpartition(":")
        if name:
            found[p.name] = f"{folder / name if (folder / name).is_file() else name}:{line}"
    return found


def notes(opened: Opened) -> list[str]:
    """Return what the run rests on, and what tapping did to the program's outputs."""
    every = [(one.record.phase, n) for one in opened.entries for n in one.record.neutrality]
    changed = [(phase, n) for phase, n in every if not n.bitwise]
    compared = (opened.folder / "compared.json").is_file()
    told = [*opened.record.warnings, *(marks_of(opened).told if compared else ())]
    told += [*predictions.prediction_notes((phase, n.predicted) for phase, n in every)]
    told += unit_notes(opened.record)
    if compared and len(opened.entries) > 1 and not pairs_of(opened):
        told.append("two entry points share no position whose tokens are known (Entry(tokens=…) says where)")
    if not changed:
        return [*told, "taps changed no bit of the outputs"]
    worst = ", ".join(f"{n.case} by up to {digits(n.max_diff, 2)}" for _, n in changed[:3])
    return [
        *told,
        f"taps changed the outputs ({worst}): another rounding, or the compiler fused differently",
    ]

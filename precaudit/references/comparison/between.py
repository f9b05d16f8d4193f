"""Two runs of any kind against each other: a model's, a program's, an imported dump. No JAX."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, singledispatch
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array
from precaudit.numbers.executors import Executor, Threads, in_waves
from precaudit.progress import Advance, silent
from precaudit.recording.dumps.runs import Imported, is_rowwise
from precaudit.recording.opening import AnyRun, against_folder, open_any
from precaudit.recording.runs.program_places import judged_places, not_taken, step_values
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison
from precaudit.references.comparison.pairs import (
    Calls,
    CaseSides,
    Common,
    PairPiece,
    Side,
    case_errors,
    common_kinds,
    divide_cases,
    side_of,
    token_notes,
)
from precaudit.schema.filed import Filed
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.base import Number
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord
from precaudit.schema.records.lines import read_lines, write_lines
from precaudit.schema.records.manifests import DumpTensor, Reported
from precaudit.schema.records.runs import PROGRAM_CALL, is_call
from precaudit.writing import made_folder

# What the JSONL of an attention audit calls its numbers of what attention makes: kind of record, and field
STATISTICS = {
    "attn_ref_mae": ("local", "mae"),
    "attn_ref_max_diff": ("local", "max_diff"),
    "attn_accum_mae": ("accum", "mae"),
    "attn_accum_max_diff": ("accum", "max_diff"),
}
MIXED = next(p.name for p in POINTS.values() if p.kind == "mix")
FP16 = "float16"  # what it accumulates in
TOP = {"prefill_last_top1": "prefill_top1", "decode0_top1": "decode_top1"}


class ReportedNumber(NamedTuple):
    """A number that a dump reports, and the same of the other run, None where that has none."""

    reported: Reported
    here: Number | None


@dataclass(frozen=True)
class SidePair:
    """Two runs of any kinds, opened; another process opens them again, where they lie."""

    both: tuple[AnyRun, AnyRun]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Another process has nothing open."""
        return _open_again, tuple((x.folder.absolute(), x.record.id) for x in self.both)

    @cached_property
    def sides(self) -> tuple[CaseSides, CaseSides]:
        """Both, case by case: by calls where one of them is a program's."""
        a, b = (_sides(x) for x in self.both)
        programs = [any(is_call(p.phase) for c in side.cases[:1] for p in side.of(c).places) for side in (a, b)]
        if a.calls is not None and b.calls is not None:
            b = _numbered_as(b, a.calls, b.calls)
        if any(programs) and not all(programs):
            a, b = (side if program else _as_calls(side) for side, program in zip((a, b), programs, strict=True))
        return a, b


class CommonPair(NamedTuple):
    """What pieces of two runs share: the runs, and what these have in common."""

    pair: SidePair
    common: Common


def _open_again(*given: tuple[Path, str]) -> SidePair:
    a, b = (open_same(*one) for one in given)
    return SidePair((a, b))


def open_same(folder: Path, name: str) -> Any:
    """Return a run, also one that was cut off, in another process; raises UserError where another lies there."""
    found = open_any(folder, partial=True, held=False)
    if found.record.id != name:
        raise UserError(f"{folder}: a worker finds another run there ({found.record.id}, not {name})")
    return found


def piece_records(shared: CommonPair, piece: PairPiece, tell: Advance) -> list[ErrorRecord]:
    """Return the records of a piece."""
    tell(0, 1, "cases of both runs")
    return case_errors(*shared.pair.sides, shared.common, piece)


def compare_runs(
    run: Path | str, against: Path | str, tell: Advance = silent, held: bool = True, by: Executor | None = None
) -> Comparison[AnyRun]:
    """Hold ``run`` against another; write its records to run/against/<hash>/errors.jsonl and return them.

    A call of a program is prefill where it is its first, else decode step by step. ``held``: whether the records are in
    memory, or stay in their file (precaudit/schema/filed.py). ``by``: what makes its pieces (None: threads). Raises
    UserError for what is no run, was altered, or has nothing in common with the other.
    """
    both = open_any(run, held=False), open_any(against, held=False)
    pair = SidePair(both)
    sides, by = pair.sides, by or Threads()
    beside = tuple(_beside(*sides))
    errors: Iterable[ErrorRecord] = ()
    notes: list[str] = []
    if not beside or all(side.cases for side in sides):  # a dump may hold reported numbers alone
        common, notes = common_kinds(*sides)
        pieces = divide_cases(sorted(c for c in sides[0].cases if c in common["cases"]), by)
        errors = (e for some in in_waves(by, piece_records, CommonPair(pair, common), pieces, tell) for e in some)
    notes += _inputs(*sides) if all(side.calls is not None for side in sides) else token_notes(*sides)
    notes += [f"not in the dump: {text}" for side in sides for text in side.lacks]
    folder = against_folder(both[0].folder, both[1].folder)
    with made_folder(folder):
        write_lines(folder / "errors.jsonl", errors)
    filed = Filed(folder / "errors.jsonl", ERROR_KINDS)
    errors = tuple(filed) if held else filed
    return Comparison(both[0], errors, [], tuple(notes), folder, both[1], peaks=by.peaks, beside=beside)


@singledispatch
def _sides(run: Any) -> CaseSides:
    """Return a run of any kind, case by case."""
    raise TypeError(f"{type(run).__name__} is no run")


@_sides.register
def _(run: Run) -> CaseSides:
    part = run.by_prompt()
    return CaseSides(run.folder, tuple(run.prompts), lambda case: side_of(Recorded.of(part(case))))


@_sides.register
def _(run: Imported) -> CaseSides:
    index, tokens = run.index(), run.record.tokens
    cases: dict[str, dict[Place, DumpTensor]] = {}
    for place, t in index.items():
        cases.setdefault(place.prompt, {})[place] = t
    lengths = run.lengths

    def rows(place: Place) -> Array | None:
        """Return the positions of rows: all of a prompt's, or the token that a decode step was fed."""
        if not is_rowwise(place.point):
            return None
        if place.phase != "decode":
            return np.arange(index[place].shape[0])
        return np.array([lengths[place.prompt] - 1 + place.step]) if place.prompt in lengths else None

    def side(case: str) -> Side:
        return Side(run.record.id, run.folder, cases[case], lambda place: run.tensor(index[place]), rows, tokens.get)

    return CaseSides(run.folder, tuple(cases), side, lacks=run.record.absent, reported=run.record.reported)


@_sides.register
def _(run: Opened) -> CaseSides:
    entries = {one.record.phase: one for one in run.entries}
    cases = tuple(dict.fromkeys(case for one in entries.values() for case in one.record.cases))
    began = {phase: one.record.began for phase, one in entries.items()}
    first = range(run.record.began, run.record.began + run.record.calls)
    calls = Calls(began, first, lambda case, call: run.tensors(case, call, "inputs"))
    return CaseSides(run.folder, cases, partial(_case, run, entries), calls)


def _case(run: Opened, entries: Mapping[str, Opened], case: str) -> Side:
    """Return a case of a program's run; ``entries``: its entry points, by the phase of their calls."""
    held = {
        Place(case, phase, call, layer, p.name): p
        for phase, one in entries.items()
        if case in one.record.cases
        for call in range(one.record.calls)
        for p, layer in [*judged_places(one.record), *((p, None) for p in one.record.outputs)]
    }

    def tensor(place: Place) -> Array:
        p, one = held[place], entries[place.phase]
        found = one.tensors(place.prompt, place.step, "outputs" if p in one.record.outputs else "taps")
        if p.name not in found:
            raise UserError(f"{run.folder}: {place.text} was not recorded; the run is damaged: trace again")
        return np.asarray(step_values(one.record, p, place.layer, found[p.name]))

    def why_skipped(place: Place) -> str | None:
        p, one = held[place], entries[place.phase]
        if p in one.record.outputs:
            return None
        return not_taken(one.record, p, place.layer, one.tensors(place.prompt, place.step, "taps"))

    return Side(run.record.id, run.folder, held, tensor, lambda _place: None, lambda _case: None, why_skipped)


def _as_calls(sides: CaseSides) -> CaseSides:
    """Return a model's run with calls for phases: prefill, then the steps that follow its last position."""
    return replace(sides, of=lambda case: _case_as_calls(sides.of(case)))


def _case_as_calls(side: Side) -> Side:
    old = {
        p._replace(phase=PROGRAM_CALL): p
        for p in side.places
        if (p.phase, p.step) == ("prefill", 0) or (p.phase == "decode" and p.step)
    }
    return replace(
        side, places=old, tensor=lambda place: side.tensor(old[place]), rows=lambda place: side.rows(old[place])
    )


def _numbered_as(sides: CaseSides, first: Calls, second: Calls) -> CaseSides:
    """Return the second of two runs with its calls as the first numbers them, where either was begun at a later one.

    Calls before the first run's first are left out.
    """
    later = {phase: began - first.began.get(phase, 0) for phase, began in second.began.items()}
    if not any(later.values()):
        return sides

    def case_of(case: str) -> Side:
        side = sides.of(case)
        old = {p._replace(step=n): p for p in side.places if (n := p.step + later[p.phase]) >= 0}

        def skipped(place: Place) -> str | None:
            return side.skipped(old[place])

        return replace(side, places=old, tensor=lambda place: side.tensor(old[place]), skipped=skipped)

    return replace(sides, of=case_of)


def _inputs(a: CaseSides, b: CaseSides) -> Iterator[str]:
    """Yield the cases that two programs were not given the same inputs for, in the first call that both hold."""
    assert a.calls is not None
    assert b.calls is not None
    both = [n for n in a.calls.first if n in b.calls.first][:1]
    for call, case in product(both, (c for c in a.cases if c in b.cases)):
        x, y = (calls.inputs(case, call - calls.first.start) for calls in (a.calls, b.calls))
        differ = sorted(k for k in {**x, **y} if k not in x or k not in y or x[k].tobytes() != y[k].tobytes())
        if differ:
            yield f"{case}: the inputs of the first call differ (leaves {', '.join(differ[:5])})"


def _beside(run: CaseSides, against: CaseSides) -> Iterator[ReportedNumber]:
    """Yield the numbers that a dump reports, with what compare wrote of the other run."""
    for dump, other in ((run, against), (against, run)):
        if dump.reported:
            errors, pairs = other.folder / "errors.jsonl", other.folder / "prefill_decode.jsonl"
            written = read_lines(errors, ERROR_KINDS) if errors.is_file() else []
            views = read_lines(pairs, PrefillDecodeRecord) if pairs.is_file() else []
            for x in dump.reported:
                yield ReportedNumber(x, _here(x, written, views))


def _here(x: Reported, errors: list[ErrorRecord], pairs: list[PrefillDecodeRecord]) -> Number | None:
    if x.name in TOP:
        found = [p for p in pairs if p.prompt == x.prompt and p.against == "prefill"]
        return getattr(found[0], TOP[x.name]) if found else None
    if x.name not in STATISTICS:
        return None
    kind, field = STATISTICS[x.name]
    place = (x.prompt, x.phase, x.step, x.layer, MIXED)
    its = [e for e in errors if e.kind == kind and Place.of(e) == place and (kind == "local" or e.candidate == FP16)]
    return getattr(its[0], field) if its else None

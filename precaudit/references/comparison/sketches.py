"""Two runs of which sketches are kept, and no tensors: how far each value is off, and what is exactly the same."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array
from precaudit.recording.opening import against_folder
from precaudit.recording.runs.program_places import index_of, judged_places
from precaudit.recording.runs.programs import Opened, ProgramRun
from precaudit.recording.runs.sketched import sketches_in
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import CACHES
from precaudit.schema.places import Place
from precaudit.schema.records.base import json_number
from precaudit.schema.records.lines import write_lines
from precaudit.schema.records.sketches import SketchRecord

RESOLVED = 2e-6  # differences below it are of the size of the projections' own rounding, in float32
NORMAL = 1.96  # standard deviations of an estimate, at 95 %
Parts = Mapping[str, Array]
Places = dict[tuple[str, int | None], tuple[int, tuple[int, ...]]]


@dataclass(frozen=True)
class StateFault:
    """A cache that does not hold what was written, exactly: where, and what is wrong."""

    case: str
    phase: str
    call: int
    layer: int | None
    point: str
    why: str


@dataclass(frozen=True)
class SketchComparison:
    """What two runs of sketches say; ``caches``: how many were checked in the first, and what is wrong of them.

    ``lacking``: what one run has and the other has not, in words.
    """

    records: tuple[SketchRecord, ...]
    caches: int
    faults: tuple[StateFault, ...]
    lacking: tuple[str, ...]
    folders: tuple[Path, ...]


def compare_sketches(run: Path, against: Path) -> SketchComparison:
    """Compare two runs of sketches, and write sketches.jsonl beside the first; raises UserError for what is none."""
    ours, theirs = sketches_in(run), sketches_in(against)
    if not (both := [name for name in ours if name in theirs]):
        raise UserError(f"{run} and {against} have no value in common: trace both with the same prompts")
    lacking = [f"{name or run} is in one run alone" for name in ours.keys() ^ theirs.keys()]
    every, caches, faults, folders = list[SketchRecord](), 0, list[StateFault](), []
    for name in both:
        records, missing = _pairs(ours[name], theirs[name])
        lacking += missing
        folders.append(folder := against_folder(ours[name].folder, theirs[name].folder))
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "sketches.jsonl", records)
        every += records
        for one in ours[name].entries:
            checked, wrong = _state(one)
            caches, faults = caches + checked, [*faults, *wrong]
    return SketchComparison(tuple(every), caches, tuple(faults), tuple(lacking), tuple(folders))


def _pairs(ours: Opened, theirs: Opened) -> tuple[list[SketchRecord], list[str]]:
    """Return the records of all that is in the first, and what is in one run alone, in words."""
    other = {one.record.entry: one for one in theirs.entries}
    own = [one.record.entry for one in ours.entries]
    found, lacking = list[SketchRecord](), [f"{entry} is in one run alone" for entry in _alone(own, other)]
    for one in ours.entries:
        if (view := other.get(one.record.entry)) is None:
            continue
        lacking += (f"{case} is in one run alone" for case in _alone(one.record.cases, view.record.cases))
        lacking += _second_alone(_places(one.record), _places(view.record))
        if one.record.calls != view.record.calls:
            lacking.append(f"{one.record.entry} has {one.record.calls} and {view.record.calls} calls")
        for case in (case for case in one.record.cases if case in view.record.cases):
            apart = False
            later = one.record.began - view.record.began
            for call in range(max(0, -later), min(one.record.calls, view.record.calls - later)):
                a, b = one.tensors(case, call, "taps"), view.tensors(case, call + later, "taps")
                apart = apart or any(k in b and not np.array_equal(a[k], b[k]) for k in a if k.startswith("inputs/"))
                why = "other tokens were fed" if apart else ""
                found += _of_call(case, call, CallSketch(one.record, a), CallSketch(view.record, b), why)
    return found, list(dict.fromkeys(lacking))


def _second_alone(ours: Places, theirs: Places) -> Iterator[str]:
    """Yield what only the second run holds; what only the first holds has a record that says so."""
    names = {name for name, _ in ours}
    for name in dict.fromkeys(name for name, layer in theirs if (name, layer) not in ours):
        yield f"{f'some layers of {name} are' if name in names else f'{name} is'} in the second run alone"


def _alone(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Return what is among only one of two sets of names."""
    ours, theirs = list(ours), list(theirs)
    return [x for x in ours if x not in theirs] + [x for x in theirs if x not in ours]


def _places(run: ProgramRun) -> Places:
    """Return where each value lies among the steps of its point that are recorded, and its shape."""
    found: Places = {(p.name, layer): (index_of(run, p, layer), p.shape) for p, layer in judged_places(run)}
    return found | {(p.name, None): (0, p.shape) for p in run.outputs}


class CallSketch(NamedTuple):
    """What a run holds of one call."""

    run: ProgramRun
    parts: Parts


def _of_call(case: str, call: int, one: CallSketch, other: CallSketch, why: str) -> Iterator[SketchRecord]:
    known = _places(other.run)
    for (name, layer), (i, shape) in _places(one.run).items():
        if (x := _step(one.parts, name, i)) is None:
            continue
        there = known.get((name, layer))
        y = None if there is None else _step(other.parts, name, there[0])
        if there is None or y is None:
            said = "the other run lacks it"
        else:
            said = why or ("" if there[1] == shape else "the other run's has another shape")
        yield _record(Place(case, one.run.phase, call, layer, name), x, None if said else y, said)


def _step(parts: Parts, name: str, i: int) -> dict[str, Array] | None:
    found = {key.rpartition("/")[2]: x[i] for key, x in parts.items() if key.rpartition("/")[0] == name and i < len(x)}
    return found or None


def _record(place: Place, x: Parts, y: Parts | None, why: str) -> SketchRecord:
    rows, ours = len(x["hashes"]), int(x["counts"].sum())
    largest = json_number(float(x["size"][1]))
    case, phase, call, layer, name = place
    at: dict[str, Any] = {"case": case, "phase": phase, "call": call, "layer": layer, "point": name, "rows": rows}
    if y is None:
        return SketchRecord(
            **at, equal=False, differing=rows, largest=(largest, None), nonfinite=(ours, None), unknown=why
        )
    off = (x["hashes"] != y["hashes"]).any(axis=1)
    same: dict[str, Any] = {
        "largest": (largest, json_number(float(y["size"][1]))),
        "nonfinite": (ours, int(y["counts"].sum())),
    }
    if not off.any():
        return SketchRecord(**at, **same, equal=True, differing=0, rel_l2=0.0, within=0.0)
    rel, within, why = _estimate(x, y)
    return SketchRecord(
        **at,
        **same,
        equal=False,
        differing=int(off.sum()),
        rel_l2=rel,
        within=within,
        unknown=why,
        row=_farthest(x["rows"], y["rows"]),
        head=_farthest(x["heads"], y["heads"]),
    )


def _estimate(x: Parts, y: Parts) -> tuple[float | None, float | None, str]:
    """Return the size of a difference over the reference's, how well that is known, or why it is not."""
    if "projections" not in x or "projections" not in y:
        return None, None, "no projections were kept (--sketch N)"
    if len(x["projections"]) != len(y["projections"]):
        return None, None, "the runs have other numbers of projections"
    if x["counts"].any() or y["counts"].any():
        return None, None, "it holds NaN or infinity"
    size = float(y["size"][0])
    if size == 0:
        return None, None, "the reference is 0"
    apart = np.linalg.norm(x["projections"].astype(np.float64) - y["projections"]) / size
    if apart < RESOLVED:
        return None, None, f"below {digits(RESOLVED, 1)}, which projections in float32 cannot show"
    return float(apart), NORMAL / (2 * len(x["projections"])) ** 0.5, ""


def _farthest(x: Array, y: Array) -> int:
    apart = np.abs(x.astype(np.float64) - y)
    scale = np.maximum(np.abs(y).max(axis=0, keepdims=True), 1e-30)
    return int(np.argmax((apart / scale).max(axis=1)))


def _state(one: Opened) -> tuple[int, list[StateFault]]:
    """Return how many caches were checked, and which do not hold what was written: the hash of every row."""
    checked, faults = 0, []
    written = {cache: row for row, cache in CACHES.items()}
    places = _places(one.record)
    for case in one.record.cases:
        before: Parts = {}
        for call in range(one.record.calls):
            parts = one.tensors(case, call, "taps")
            for (name, layer), (i, _) in places.items():
                if name not in written or (now := _step(parts, name, i)) is None:
                    continue
                row, old = _step(parts, written[name], i), _step(before, name, i)
                if row is None:
                    continue
                checked += 1
                if why := _wrong(now["hashes"], row["hashes"], None if old is None else old["hashes"]):
                    faults.append(StateFault(case, one.record.phase, call, layer, name, why))
            before = parts
    return checked, faults


def _wrong(cache: Array, rows: Array, before: Array | None) -> str:
    """Return what is wrong of a cache's rows; nothing where they are those of before, and those just written."""
    held = {tuple(h) for h in cache.tolist()}
    if lost := sum(tuple(h) not in held for h in rows.tolist()):
        return f"{lost} of {len(rows)} rows that were written are not in it"
    changed = cache[(cache != before).any(axis=1)] if before is not None else cache[:0]
    if len(changed) > len(rows):
        return f"{len(changed)} of its rows changed, and {len(rows)} were written"
    written = {tuple(h) for h in rows.tolist()}
    stray = sum(tuple(h) not in written for h in changed.tolist())
    return f"{stray} of its rows changed and were not written" if stray else ""

"""Two runs of which sketches are kept, and no tensors: how far each value is off, and what is exactly the same."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array
from precaudit.recording.opening import against_folder
from precaudit.recording.runs.programs import Opened, index_of, judged_places
from precaudit.recording.runs.sketched import sketches_in
from precaudit.schema.graphs.decoder import CACHES
from precaudit.schema.records.base import json_number
from precaudit.schema.records.lines import write_lines
from precaudit.schema.records.sketches import SketchRecord

RESOLVED = 2e-6  # differences below it are of the size of the projections' own rounding, in float32
NORMAL = 1.96  # standard deviations of an estimate, at 95 %
Parts = Mapping[str, Array]


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
    other = {one.record.entry: one for one in theirs.entries}
    found, lacking = list[SketchRecord](), list[str]()
    for one in ours.entries:
        if (view := other.get(one.record.entry)) is None:
            lacking.append(f"{one.record.entry} is in one run alone")
            continue
        for case in one.record.cases:
            if case not in view.record.cases:
                lacking.append(f"{case} is in one run alone")
                continue
            if one.record.calls != view.record.calls:
                lacking.append(f"{one.record.entry} has {one.record.calls} and {view.record.calls} calls")
            apart = False
            for call in range(min(one.record.calls, view.record.calls)):
                a, b = one.tensors(case, call, "taps"), view.tensors(case, call, "taps")
                apart = apart or any(k in b and not np.array_equal(a[k], b[k]) for k in a if k.startswith("inputs/"))
                found += _of_call(one, view, case, call, a, b, "other tokens were fed" if apart else "")
    return found, list(dict.fromkeys(lacking))


def _of_call(
    one: Opened, view: Opened, case: str, call: int, a: Parts, b: Parts, why: str
) -> Iterator[SketchRecord]:  # fmt: skip
    known = {(p.name, layer) for p, layer in judged_places(view.record)}
    places = [(p.name, layer, index_of(one.record, p, layer)) for p, layer in judged_places(one.record)]
    places += [(p.name, None, 0) for p in one.record.outputs]
    for name, layer, i in places:
        x, y = _step(a, name, i), _step(b, name, i)
        if x is None:
            continue
        said = why or ("" if y is not None and ((name, layer) in known or layer is None) else "the other run lacks it")
        if y is not None and x["rows"].shape != y["rows"].shape:
            said = said or "the other run's has another shape"
        yield _record(case, one.record.phase, call, layer, name, x, None if said else y, said)


def _step(parts: Parts, name: str, i: int) -> dict[str, Array] | None:
    found = {key.rpartition("/")[2]: x[i] for key, x in parts.items() if key.rpartition("/")[0] == name and i < len(x)}
    return found or None


def _record(
    case: str, phase: str, call: int, layer: int | None, name: str, x: Parts, y: Parts | None, why: str
) -> SketchRecord:  # fmt: skip
    rows, ours = len(x["hashes"]), int(x["counts"].sum())
    largest = json_number(float(x["size"][1]))
    at: dict[str, Any] = {"case": case, "phase": phase, "call": call, "layer": layer, "point": name, "rows": rows}
    if y is None:
        return SketchRecord(
            **at, equal=False, differing=rows, largest=(largest, "nan"), nonfinite=(ours, 0), unknown=why
        )  # fmt: skip
    off = (x["hashes"] != y["hashes"]).any(axis=1)
    same: dict[str, Any] = {
        "largest": (largest, json_number(float(y["size"][1]))),
        "nonfinite": (ours, int(y["counts"].sum())),
    }
    if not off.any():
        return SketchRecord(**at, **same, equal=True, differing=0, rel_l2=0.0, within=0.0)
    rel, within, why = _estimate(x, y)
    return SketchRecord(
        **at, **same, equal=False, differing=int(off.sum()), rel_l2=rel, within=within, unknown=why,
        row=_farthest(x["rows"], y["rows"]), head=_farthest(x["heads"], y["heads"]),
    )  # fmt: skip


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
        return None, None, f"below {RESOLVED:.0e}, which projections in float32 do not tell"
    return float(apart), NORMAL / (2 * len(x["projections"])) ** 0.5, ""


def _farthest(x: Array, y: Array) -> int:
    apart = np.abs(x.astype(np.float64) - y)
    scale = np.maximum(np.abs(y).max(axis=0, keepdims=True), 1e-30)
    return int(np.argmax((apart / scale).max(axis=1)))


def _state(one: Opened) -> tuple[int, list[StateFault]]:
    """Return how many caches were checked, and which do not hold what was written: the hash of every row."""
    checked, faults = 0, []
    written = {cache: row for row, cache in CACHES.items()}
    places = [(p.name, layer, index_of(one.record, p, layer)) for p, layer in judged_places(one.record)]
    for case in one.record.cases:
        before: Parts = {}
        for call in range(one.record.calls):
            parts = one.tensors(case, call, "taps")
            for name, layer, i in places:
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
    if before is not None and (changed := int((cache != before).any(axis=1).sum())) > len(rows):
        return f"{changed} of its rows changed, and {len(rows)} were written"
    return ""

"""The verb ``import``: a dump's arrays, named by a map, become a run that ``compare`` holds against another.

A map (TOML) says what is what:

    case = "p4_sys"                # where names have no {case}; by default the dump's own name
    calls = ["prefill", "decode 1"]  # what each {call} is; by default 0 is prefill, n is decode n
    tokens = "{case}/input_ids"    # token ids [T], where the dump has them
    ignore = ["timing/"]           # names, or what they begin with, that are nobody's

    [points]                       # ours = theirs; {i} the layer, {case}, {call}
    q = "model.layers.{i}.self_attn.q"
    attn_out = { name = "{case}/{i}/out", axes = "1 h t k -> t h k" }
    k = { name = "k/{i}", axes = "t (h k) -> t h k", sizes = { h = 2 }, dtype = "bfloat16" }
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.mirrors import takes_urls
from precaudit.models.checkpoints.names import rearrange_axes
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.progress import Advance, silent
from precaudit.recording.dumps.reading import Dump, DumpArray, read_dump
from precaudit.recording.dumps.runs import Imported, open_imported
from precaudit.recording.runs.folders import check_folder, check_space, follow_link
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.point_lines import place_record
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.lines import write_lines
from precaudit.schema.records.manifests import SCHEMA, DumpRun, DumpTensor, Reported
from precaudit.schema.records.runs import PointRecord
from precaudit.schema.toml import read_toml
from precaudit.writing import temporary

PLACEHOLDERS = {"{i}": r"(?P<i>\d{1,9})", "{case}": r"(?P<case>.+)", "{call}": r"(?P<call>\d{1,9})"}
MOST_ID = (1 << 31) - 1
CALL = re.compile(r"(prefill|rescore)|decode (\d{1,9})")


class Theirs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array of a dump: its name, the einops pattern of its axes (and sizes that no axis tells), its format.

    ``layer``: where the name has no {i} and the point belongs to one. ``dtype``: of arrays that NumPy wrote without
    knowing theirs (bfloat16 becomes V2).
    """

    name: str
    axes: str = ""
    sizes: dict[str, int] = {}
    dtype: str = ""
    layer: int | None = None


class DumpNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A names map of a dump."""

    points: dict[str, Theirs | str]
    case: str = ""
    calls: tuple[str, ...] = ()
    tokens: str = ""
    ignore: tuple[str, ...] = ()


# A dump that has our names needs no map: lists in JSONL do, and files case/call/layer/point.
OWN = DumpNames(
    {name: "{case}/{call}/{i}/" + name if row.per_layer else "{case}/{call}/" + name for name, row in POINTS.items()},
    tokens="{case}/tokens",
)


@takes_urls
def import_dump(
    source: Path | str,
    folder: Path | str,
    names: Path | str | None = None,
    force: bool = False,
    command: str = "precaudit.import_dump(...)",
    tell: Advance = silent,
) -> Imported:
    """Write a dump as a run into ``folder``; return it opened.

    ``names``: the map's file. Raises UserError for a map that is wrong, a point that the dump has nowhere, an array
    whose axes or format do not fit, before anything is written where that shows in the names alone.
    """
    source, folder = Path(source), follow_link(Path(folder))
    given = OWN if names is None else _parse_names(Path(names))
    where = "the dump" if names is None else str(names)
    dump = read_dump(source)
    case = given.case or (source.name if source.is_dir() else source.stem)
    calls = [_call(text, where) for text in given.calls]
    taken, tokens, left = _take_arrays(dump, given, case, calls, where, strict=names is not None)
    if not taken and not dump.reported:
        raise UserError(f"{source}: no array has a name of ours; say what is what with --map FILE")
    check_space(folder, sum(_size(held) for _, _, held in taken) + (1 << 20), "map fewer points")
    check_folder(folder, force)
    part, old = temporary(folder), temporary(folder)
    try:
        (part / "tensors").mkdir(parents=True)
        tensors, hashes = _tensors(part, taken, where, tell)
        record = DumpRun(
            schema=SCHEMA,
            id=folder.resolve().name,
            source=source.name,
            command=command,
            tensors=tuple(tensors),
            tokens={name: _ids(held, where) for name, held in tokens.items()},
            left_out=tuple(left),
            reported=tuple(_reported_values(dump, calls, where)),
            absent=tuple(_absent([t[0] for t in taken])),
            hashes=hashes,
            started=datetime.now(UTC).isoformat("T", "seconds"),
            finished=datetime.now(UTC).isoformat("T", "seconds"),
        )
        write_manifest(part, record)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for gone in (part, old):
            shutil.rmtree(gone, ignore_errors=True)
    return open_imported(folder)


def _parse_names(path: Path) -> DumpNames:
    table = read_toml(path)
    try:
        found = msgspec.convert(table, DumpNames)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from None
    for name, x in found.points.items():
        text = x if isinstance(x, str) else x.name
        if odd := [p for p in re.findall(r"\{\w*\}", text) if p not in PLACEHOLDERS]:
            raise UserError(f"{path}: [points] {name}: {odd[0]} is none of {', '.join(PLACEHOLDERS)}")
        if not isinstance(x, str) and x.dtype and x.dtype not in FORMATS:
            raise UserError(f"{path}: [points] {name}: dtype = {x.dtype!r}{nearest(x.dtype, FORMATS)}")
    if not found.points:
        raise UserError(f'{path}: [points] is empty; for example q = "layers.{{i}}.q"')
    return found


def _call(text: str, where: str) -> tuple[str, int]:
    found = CALL.fullmatch(text)
    if found is None:
        raise UserError(f"{where}: calls: {text!r} is not prefill, rescore or decode N")
    return (found[1], 0) if found[1] else ("decode", int(found[2]))


def _pattern(text: str) -> re.Pattern[str]:
    """Return what a name matches; a placeholder that stands in it again is the same again."""
    parts = re.split(r"(\{\w+\})", text)
    again = [p in parts[:i] for i, p in enumerate(parts)]
    found = [
        re.escape(p) if p not in PLACEHOLDERS else f"(?P={p[1:-1]})" if second else PLACEHOLDERS[p]
        for p, second in zip(parts, again, strict=True)
    ]
    return re.compile("".join(found))


Taken = tuple[Place, Theirs, DumpArray]


def _take_arrays(
    dump: Dump, names: DumpNames, case: str, calls: Sequence[tuple[str, int]], where: str, strict: bool
) -> tuple[list[Taken], dict[str, DumpArray], list[str]]:
    """Return the arrays that the map takes with their places, token ids by case, and the names that nothing takes."""
    entries = {p: Theirs(x) if isinstance(x, str) else x for p, x in names.points.items()}
    patterns = {point: _pattern(x.name) for point, x in entries.items()}
    ids = _pattern(names.tokens) if names.tokens else None
    taken: list[Taken] = []
    tokens: dict[str, DumpArray] = {}
    left = list(dump.other)
    for held in dump.arrays:
        found = [(p, m) for p, pattern in patterns.items() if (m := pattern.fullmatch(held.name))]
        if len(found) > 1:
            raise UserError(f"{where}: {held.name!r} is {found[0][0]} and {found[1][0]}, by their patterns")
        if ids is not None and (m := ids.fullmatch(held.name)):
            tokens[m.groupdict().get("case") or case] = held
        elif found:
            point, m = found[0]
            said = m.groupdict()
            phase, step = _phase(int(said.get("call") or 0), calls, f"{where}: {held.name!r}")
            layer = int(said["i"]) if said.get("i") is not None else entries[point].layer
            taken.append((Place(said.get("case") or case, phase, step, layer, point), entries[point], held))
        elif not held.name.startswith(names.ignore or ("\0",)):
            left.append(held.name)
    places = {t[0] for t in taken}
    if len(places) < len(taken):
        twice = next(t[0] for i, t in enumerate(taken) if t[0] in {x[0] for x in taken[:i]})
        raise UserError(f"{where}: two arrays are {twice.text}; tell them apart with {{i}}, {{case}} or {{call}}")
    if strict and (lacking := [p for p in entries if p not in {x.point for x in places}]):
        text = entries[lacking[0]].name
        hint = nearest(text, [held.name for held in dump.arrays])
        more = f" (nor {', '.join(lacking[1:])})" if lacking[1:] else ""
        raise UserError(f"{where}: no array is {lacking[0]}: {text!r}{hint}{more}")
    return taken, tokens, left


def _phase(call: int, calls: Sequence[tuple[str, int]], where: str) -> tuple[str, int]:
    if calls:
        if call >= len(calls):
            raise UserError(f"{where} is of call {call}, and calls = […] names {len(calls)}")
        return calls[call]
    return ("decode", call) if call else ("prefill", 0)


def _reported_values(dump: Dump, calls: Sequence[tuple[str, int]], where: str) -> Iterator[Reported]:
    for x in dump.reported:
        phase, step = _phase(x.call, calls, f"{where}: {x.name} of {x.case}")
        yield Reported(prompt=x.case, phase=phase, step=step, layer=x.layer, name=x.name, value=x.value)


def _absent(places: Sequence[Place]) -> Iterator[str]:
    """Yield the places that a point lacks in one call and has in another."""
    there = set(places)
    for call in dict.fromkeys((p.prompt, p.phase, p.step) for p in places):
        for layer, point in dict.fromkeys((p.layer, p.point) for p in places):
            if (place := Place(*call, layer, point)) not in there:
                yield place.text


def _size(held: DumpArray) -> int:
    x = held.load()
    return int(x.size) * x.dtype.itemsize


def _tensors(
    folder: Path, taken: Sequence[Taken], where: str, tell: Advance
) -> tuple[list[DumpTensor], dict[str, str]]:
    """Write the arrays, a file for every case and call, and points.jsonl; return their table and the files' hashes."""
    from safetensors.numpy import save_file

    groups: dict[tuple[str, str, int], list[Taken]] = {}
    for t in taken:
        groups.setdefault(t[0][:3], []).append(t)
    tensors: list[DumpTensor] = []
    hashes: dict[str, str] = {}
    lines: list[PointRecord] = []
    for n, (call, its) in enumerate(groups.items()):
        file = f"tensors/{n}.safetensors"
        arrays: dict[str, Any] = {}
        for place, theirs, held in its:
            key = place.point if place.layer is None else f"{place.layer}.{place.point}"
            x = arrays[key] = _array(held, theirs, place.point, f"{where}: {place.point}: {held.name!r}")
            axes = POINTS[place.point].axes if place.point in POINTS else ""
            lines.append(place_record(place, x, (file, key), axes))
            tensors.append(
                DumpTensor(**place._asdict(), file=file, key=key, source=held.name, shape=x.shape, dtype=x.dtype.name)
            )
        save_file(arrays, folder / file)
        hashes[file] = file_hash(folder / file)
        tell(n + 1, len(groups), f"{call[0]}, {call[1]} {call[2]}")
    write_lines(folder / "points.jsonl", lines)
    return tensors, hashes


def _array(held: DumpArray, theirs: Theirs, point: str, where: str) -> Array:
    """Return an array with our axes, in its own format; raises UserError where either does not fit."""
    x = _to_format(held.load(), theirs.dtype, where)
    if theirs.axes:
        x = rearrange_axes(x, theirs.axes, where, theirs.sizes)
    row = POINTS.get(point)
    if row is not None and x.ndim != len(row.axes):
        raise UserError(
            f"{where}: {list(x.shape)} is not {list(row.axes)} ({row.text}); give its axes: axes = '1 t d -> t d'"
        )
    return np.ascontiguousarray(x.astype(x.dtype.newbyteorder("=")))


def _to_format(x: Array, dtype: str, where: str) -> Array:
    """Return an array in its format: bits that NumPy has no name for as what they are, wider numbers if they fit."""
    if x.dtype.kind == "V" and x.dtype.name not in FORMATS and not dtype:
        raise UserError(f"{where}: its format is unknown ({x.dtype}); say it: dtype = 'bfloat16'")
    if dtype and x.dtype.name != dtype:
        kind = FORMATS[dtype]
        if x.dtype.kind in "Vu" and x.dtype.itemsize == kind.itemsize:
            return np.ascontiguousarray(x).view(kind.dtype)
        with np.errstate(all="ignore"):
            cast = x.astype(kind.dtype) if x.dtype.kind in "fiu" else None
        if cast is None or not np.array_equal(cast.astype(np.float64), x.astype(np.float64), equal_nan=True):
            raise UserError(f"{where}: {x.dtype} numbers that {dtype} does not hold")
        return cast
    x = x.astype(np.float64) if x.dtype.kind in "iu" else x
    if x.dtype.name not in FORMATS:
        raise UserError(f"{where}: {x.dtype}, not one of {', '.join(FORMATS)}")
    return x


def _ids(held: DumpArray, where: str) -> tuple[int, ...]:
    x = held.load()
    if x.dtype.kind not in "iu" or x.size != x.shape[-1] or (x < 0).any():
        raise UserError(f"{where}: tokens: {held.name!r} is {x.dtype} {list(x.shape)}; token ids are integers [T]")
    ids = tuple(int(i) for i in x.reshape(-1))
    if max(ids, default=0) > MOST_ID:
        raise UserError(f"{where}: tokens: {held.name!r} holds {max(ids)}, which is no token id")
    return ids

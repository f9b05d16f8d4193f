"""Runs on disk: written tensor file by tensor file, read back with every hash checked."""

import errno
import glob
import hashlib
import os
import shutil
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from precaudit.errors import UserError
from precaudit.schema.brief import Brief
from precaudit.schema.coverage import config_of
from precaudit.schema.filed import CHUNK, Filed
from precaudit.schema.policies import KEYS, Policy, apply_settings, completed
from precaudit.schema.records.base import SCHEMA, Record, number
from precaudit.schema.records.lines import encode, write_lines
from precaudit.schema.records.runs import BatchRecord, PointRecord, PromptRecord, RunRecord, Stats, StepRecord
from precaudit.schema.selection import parse_points
from precaudit.writing import PART, sync, temporary, write_whole

if TYPE_CHECKING:  # the gate reads runs, and no tensor of them
    from precaudit.numbers.arrays import Array

OPEN = 128
OWN_NAMES = {
    "run.json", "prompts.jsonl", "steps.jsonl", "points.jsonl", "tensors", "errors.jsonl", "prefill_decode.jsonl",
    "compare.json", "report.md", "against", "findings.jsonl", "formula.json", "remedies.jsonl", "shares.jsonl",
    "kept.json", "lines.jsonl", "program.json", "compared.json", "dump.json", "batches.jsonl",
}  # fmt: skip
JSONL = {"prompts.jsonl": PromptRecord, "steps.jsonl": StepRecord, "points.jsonl": PointRecord}
BATCHES = "batches.jsonl"  # what is written whole of a run that is not finished


def tensor_hash(x: "Array") -> str:
    """Return the XXH3-128 of a tensor's bytes."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(_bytes(x))}"


def _bytes(x: "Array") -> memoryview:
    import numpy as np

    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def statistics(x: "Array") -> Stats:
    """Return a tensor's statistics; mean and rms summed in FP32 pairs and FP32 dots, for the eye only."""
    import numpy as np

    from precaudit.numbers.arrays import single

    y = single(x).reshape(-1) if x.dtype.itemsize <= 4 else x.astype(np.float64).reshape(-1)
    power = float(np.dot(y, y)) if y.size else 0.0
    nan = inf = 0
    if not np.isfinite(power):
        nan, inf = int(np.isnan(y).sum()), int(np.isinf(y).sum())
        y = y[np.isfinite(y)].astype(np.float64)
        power = float(np.dot(y, y)) if y.size else 0.0
    if not y.size:
        return Stats(min="nan", max="nan", mean="nan", rms="nan", nan=nan, inf=inf)
    low, high, mean, rms = y.min(), y.max(), y.mean(), (power / y.size) ** 0.5
    return Stats(min=number(low), max=number(high), mean=number(mean), rms=number(rms), nan=nan, inf=inf)


def safe_name(prompt: str) -> str:
    """Return a file name for a prompt id, which may hold anything."""
    clean = "".join(c if (c.isalnum() and c.isascii()) or c in "-_" else "_" for c in prompt)[:80]
    return clean if clean == prompt else f"{clean}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: which point it is, its rows and values."""

    layer: int | None
    point: str
    axes: str
    positions: tuple[int, ...]
    values: "Array"
    support: bool

    @property
    def key(self) -> str:
        """Its name inside the file."""
        return self.point if self.layer is None else f"{self.layer}.{self.point}"


@lru_cache(maxsize=64)
def pack_positions(positions: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return ([first, end), "range") for consecutive rows, else (the rows, "list")."""
    if positions and positions == tuple(range(positions[0], positions[0] + len(positions))):
        return (positions[0], positions[-1] + 1), "range"
    return positions, "list"


def positions_of(record: PointRecord) -> Sequence[int]:
    """Return the rows a record holds."""
    return range(*record.positions) if record.rows == "range" else record.positions


def unpack_positions(record: PointRecord) -> "Array":
    """Return the rows a record holds, int64."""
    import numpy as np

    return np.asarray(positions_of(record), np.int64)


class Lines:
    """A file of lines that grows; ``since``: bytes and hash of what was added since this was last asked."""

    def __init__(self, path: Path) -> None:
        self._file, self._hash, self._bytes = path.open("ab", buffering=0), xxhash.xxh3_128(), 0

    def add(self, records: Iterable[Record]) -> None:
        """Append a line for each record; raises OSError where the disk takes but a part of them."""
        data = b"".join(encode(r) for r in records)
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._hash.update(data)
        self._bytes += len(data)

    def since(self) -> tuple[int, str]:
        """Return bytes and hash of what was added since the last call."""
        found = self._bytes, f"xxh3:{self._hash.hexdigest()}"
        self._hash, self._bytes = xxhash.xxh3_128(), 0
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunWriter:
    """Writes a run: run.json without ``finished`` first, then tensors and lines, then run.json again.

    ``kept``: bytes of the tensors that are there, of a run that goes on (``runs/unfinished.py``); None: a new run.
    """

    def __init__(self, folder: Path, run: RunRecord, prompts: Iterable[PromptRecord], kept: int | None = None) -> None:
        self.folder, self.run = folder, run
        self.written = self._marked = kept or 0
        self._pool = ThreadPoolExecutor(1, "precaudit-file")
        if kept is None:
            (folder / "tensors").mkdir(parents=True, exist_ok=True)
            self._write_run(run)
            write_lines(folder / "prompts.jsonl", prompts)
        self._steps, self._points, self._batches = (
            Lines(folder / name) for name in ("steps.jsonl", "points.jsonl", BATCHES)
        )

    def _write_run(self, run: RunRecord) -> None:
        text = msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n"
        write_whole(self.folder / "run.json", text, inside=True)

    def steps(self, records: Iterable[StepRecord]) -> None:
        """Append lines of steps.jsonl."""
        self._steps.add(records)

    def tensors(self, prompt: str, phase: str, step: int, tensors: list[Tensor]) -> None:
        """Write one file of tensors and its lines of points.jsonl."""
        import numpy as np
        from safetensors.numpy import save_file

        name = f"tensors/{safe_name(prompt)}.{phase}.{step}.safetensors"
        path = self.folder / name
        part = temporary(path)
        blobs = {t.key: np.ascontiguousarray(t.values) for t in tensors}
        try:
            # hashes and statistics are taken while the kernel copies the file
            writing = self._pool.submit(save_file, blobs, part)
            lines = [_point_record(t, blobs[t.key], prompt, phase, step, name) for t in tensors]
            writing.result()
            part.replace(path)
            self.written += sum(x.nbytes for x in blobs.values())
        except Exception as error:
            part.unlink(missing_ok=True)
            if "No space left" in str(error):
                raise OSError(28, "No space left on device", str(path)) from None
            raise
        self._points.add(lines)

    def mark(self, batch: BatchRecord) -> None:
        """Note that all of a batch is written: since the last mark nothing else was."""
        size, self._marked = self.written - self._marked, self.written
        steps, points = self._steps.since(), self._points.since()
        self._batches.add([msgspec.structs.replace(batch, steps=steps, points=points, bytes=size)])

    def finish(self, run: RunRecord) -> RunRecord:
        """Write run.json with ``finished`` and the hashes of the JSONL files, once the disk has all of the run."""
        self.close()
        for path in (*(self.folder / name for name in JSONL), *(self.folder / "tensors").iterdir()):
            sync(path)
        hashes = {name: file_hash(self.folder / name) for name in JSONL}
        done = msgspec.structs.replace(run, hashes=hashes, bytes=self.written)
        self._write_run(done)
        sync(self.folder / "run.json")
        (self.folder / BATCHES).unlink(missing_ok=True)
        sync(self.folder)
        return done

    def close(self) -> None:
        """Close the JSONL files."""
        self._pool.shutdown()
        for lines in (self._steps, self._points, self._batches):
            lines.close()


def _point_record(t: Tensor, values: "Array", prompt: str, phase: str, step: int, file: str) -> PointRecord:
    positions, rows = pack_positions(t.positions)
    return PointRecord(
        prompt=prompt, phase=phase, step=step, layer=t.layer, point=t.point, axes=tuple(t.axes), shape=values.shape,
        dtype=values.dtype.name, positions=positions, rows="range" if rows == "range" else "list", file=file,
        key=t.key, hash=tensor_hash(values), support=t.support, stats=statistics(values),
    )  # fmt: skip


def known_hash(path: Path) -> str:
    """Return ``file_hash`` of a file that is read many times: again where its time or size changed."""
    stat = path.stat()
    return _hashed(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _hashed(path: str, _changed: int, _size: int) -> str:
    return file_hash(Path(path))


def file_hash(path: Path) -> str:
    """Return the XXH3-128 of a file, which is read a part at a time."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as f:
        while part := f.read(CHUNK):
            digest.update(part)
    return f"xxh3:{digest.hexdigest()}"


@dataclass(frozen=True, repr=False)
class Run(Brief):
    """A run opened for reading."""

    folder: Path
    record: RunRecord
    prompts: dict[str, PromptRecord]
    steps: list[StepRecord]
    points: Sequence[PointRecord]
    _files: dict[str, Any] = field(default_factory=dict)
    _mapped: set[str] = field(default_factory=set)

    def tensor(self, record: PointRecord) -> "Array":
        """Return a tensor (a view of its file) after checking its hash; raises UserError when it was altered."""
        files = self._files.get(record.file) or self._open(record.file)
        if record.file not in self._mapped:
            self._map(record.file)
        entry = files.entries.get(record.key)
        if entry is None or entry.shape != record.shape or entry.dtype != record.dtype:
            where = self.folder / record.file
            raise UserError(f"{where}: tensor {record.key!r} is not what points.jsonl says; the run was altered")
        values = files.read(record.key)
        if tensor_hash(values) != record.hash:
            where = self.folder / record.file
            raise UserError(
                f"{where}: tensor {record.key!r} was altered since it was recorded (its hash differs); trace again"
            )
        return values

    def _open(self, name: str) -> Any:
        """Return a file of tensors, whose header is read once."""
        path = self.folder / name
        if Path(name).parts[:1] != ("tensors",) or ".." in Path(name).parts:
            raise UserError(f"{self.folder}: points.jsonl names a file outside the run: {name!r}")
        if not path.is_file():
            raise UserError(f"{path} is missing; the run is damaged: trace again")
        from precaudit.models.checkpoints.safetensors_files import (  # brings every reader of models
            WORDS,
            SafetensorsFiles,
        )

        self._files[name] = SafetensorsFiles.open([path], WORDS)
        return self._files[name]

    def _map(self, name: str) -> None:
        """Note that a file is mapped; every map holds a file descriptor."""
        if len(self._mapped) >= OPEN:
            for other in self._mapped:
                self._files[other].close()
            self._mapped.clear()
        self._mapped.add(name)


def open_run(folder: Path | str, partial: bool = False, held: bool = True) -> Run:
    """Open a run; raises UserError when it is not one, was cut off (unless ``partial``), altered, or newer than us.

    ``held``: whether the lines of points.jsonl are in memory, or stay in their file (precaudit/schema/filed.py).
    """
    folder = Path(folder)
    path = folder / "run.json"
    if (folder / "program.json").is_file():
        raise UserError(f"{folder} is of a program of one's own, which compare, gate, diagnose and report take")
    if (folder / "dump.json").is_file():
        raise UserError(f"{folder} was imported; hold it against another run: precaudit compare {folder} RUN")
    if not path.is_file():
        raise UserError(f"{folder}: no run here (no run.json); make one with: precaudit trace SUBJECT -o {folder}")
    record = read_manifest(path)
    if record.finished is None and not partial:
        raise UserError(
            f"{folder}: this run was cut off before it finished; open what is there with --partial, or trace "
            "it with --resume"
        )
    files = {name: _lines(folder / name, kind, record) for name, kind in JSONL.items()}
    prompts, steps = (list(files[name]) for name in ("prompts.jsonl", "steps.jsonl"))
    points = list(files["points.jsonl"]) if held else files["points.jsonl"]
    if not prompts:
        raise UserError(f"{folder / 'prompts.jsonl'}: no prompt is in it; a run has at least one")
    if odd := {p.id for p in prompts} - {*record.requested.prompts}:  # what was asked for and is not there is missing
        raise UserError(f"{path}: prompt {min(odd)!r} is in prompts.jsonl alone; the run was altered")
    once(folder / "prompts.jsonl", (p.id for p in prompts))
    once(folder / "steps.jsonl", ((s.prompt, s.phase, s.step, s.position) for s in steps))
    once(folder / "points.jsonl", _keys(folder / "points.jsonl", points))
    return Run(folder, record, {p.id: p for p in prompts}, steps, points)


def _keys(path: Path, points: Iterable[PointRecord]) -> Iterator[tuple[Hashable, ...]]:
    for line, p in enumerate(points, 1):
        _check_rows(f"{path}:{line}", p)
        yield p.prompt, p.phase, p.step, p.layer, p.point


def _check_rows(where: str, p: PointRecord) -> None:
    """Raise UserError where a line claims more positions than its tensor has elements, or none.

    Nothing is made of a size that a line claims; a shape that is not the point's is another matter, and judged.
    """
    ranged, size = p.rows == "range", prod(p.shape)
    if ranged and len(p.positions) != 2:
        raise UserError(f"{where}: {len(p.positions)} positions are no range; the run was altered")
    held = p.positions[1] - p.positions[0] if ranged else len(p.positions)
    if not min(size, 1) <= held <= size:
        raise UserError(f"{where}: {held} positions of {size} elements; the run was altered")


def once(path: Path, keys: Iterable[Hashable]) -> None:
    """Raise UserError where a file has two lines for one thing."""
    seen = Seen()
    for line, key in enumerate(keys, 1):
        if not seen.add(key):
            raise UserError(f"{path}:{line}: a second line for {key}; the file was put together wrongly")


class Seen:
    """Things that were seen, by their 64-bit hashes: a million tuples would take 300 MB.

    Two of a million share one with a probability of 3e-8; str hashes are keyed anew in every process.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, key: Hashable) -> bool:
        """Add a thing; return whether it is new."""
        before = len(self._hashes)
        self._hashes.add(hash(key))
        return len(self._hashes) > before

    def __contains__(self, key: object) -> bool:
        return hash(key) in self._hashes


def read_manifest(path: Path) -> RunRecord:
    """Read run.json; raises UserError when it is not one, is of a newer schema, or holds what no run holds."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
        schema = raw["schema"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not a run manifest") from None
    if type(schema) is not int or schema < 1:
        raise UserError(f"{path}: not a run manifest: schema is {schema!r}")
    if schema > SCHEMA:
        raise UserError(f"{path}: schema {schema} is newer than this precaudit reads ({SCHEMA}): upgrade precaudit")
    try:
        record = msgspec.convert(raw, RunRecord)
        config = config_of(record.model.config)
        apply_settings(Policy(), {k: v for k, v in record.policy.items() if k != "name"})
        parse_points(",".join((*record.requested.points, *record.requested.support)))
    except (msgspec.ValidationError, UserError) as error:
        raise UserError(f"{path}: {error}") from None
    record = msgspec.structs.replace(record, policy=completed(record.policy))
    if missing := {"name", *KEYS} - record.policy.keys():
        raise UserError(f"{path}: the policy lacks {', '.join(sorted(missing))}")
    if not 0 <= record.requested.decode_steps <= config.context:
        raise UserError(f"{path}: decode_steps = {record.requested.decode_steps} is outside the model's context")
    return record


def _lines(path: Path, kind: Any, run: RunRecord) -> Filed[Any]:
    if not path.is_file():
        raise UserError(f"{path} is missing; the run is damaged: trace again")
    if run.finished is not None and file_hash(path) != run.hashes.get(path.name):
        raise UserError(f"{path} was altered since it was recorded (its hash differs); trace again")
    return Filed(path, kind, tail=run.finished is not None)


def _replaceable(folder: Path, force: bool) -> None:
    """Raise UserError where a folder is not a run, whole or cut off before its run.json, that may be replaced."""
    if not folder.is_dir():
        raise UserError(f"{folder} exists and is not a run: choose another -o")
    names = [p.name for p in folder.iterdir()]
    foreign = [name for name in names if name not in OWN_NAMES and not name.endswith(PART)]
    if "run.json" in names:
        if not force:
            raise UserError(f"{folder} holds a run already: choose another -o, or --force to replace it")
        try:
            read_manifest(folder / "run.json")
        except UserError as error:
            raise UserError(f"{folder} is not a run of ours ({error}): choose another -o") from None
        if foreign:
            raise UserError(f"{folder} holds {foreign[0]!r}, which is not part of a run: choose another -o")
    elif {"program.json", "dump.json"} & set(names) and not foreign and not force:
        kind = "a program's" if "program.json" in names else "an imported"
        raise UserError(f"{folder} holds {kind} run already: choose another -o, or --force to replace it")
    elif foreign or not force:
        hint = "" if foreign else ", or --force to replace what a run that was cut off left"
        raise UserError(f"{folder} exists and is not a run: choose another -o{hint}")


def followed(folder: Path) -> Path:
    """Return the folder that a link leads to, so that what is replaced is that; any other as it was given."""
    return folder.resolve() if folder.is_symlink() else folder


def check_folder(folder: Path, force: bool) -> bool:
    """Return whether something is in ``folder`` that a new run may replace; raises UserError where it may not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        _replaceable(folder, force)
        return True
    return False


def prepare_folder(folder: Path, force: bool) -> None:
    """Make ``folder`` ready for a new run; raises UserError when something is there or it cannot be written."""
    folder = followed(folder)
    if check_folder(folder, force):
        folder.rename(temporary(folder))  # at once: what is killed while it deletes leaves no half of a run behind
    for gone in folder.parent.glob(f".{glob.escape(folder.name)}.????????{PART}"):
        if gone.is_dir():  # of this run, or of one that was killed here
            shutil.rmtree(gone)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable")


def check_space(folder: Path, needed: int, less: str = "record less with --layers, --points or --positions") -> None:
    """Raise UserError when the disk under ``folder`` has less than ``needed`` bytes left; ``less``: what needs less."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"no space: the run needs about {needed / 1e6:,.0f} MB, {place} has {free / 1e6:,.0f} MB left; "
            f"{less}, or choose another -o"
        )

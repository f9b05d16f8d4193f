"""Baselines: a run's errors frozen to a file, without tensors, that later runs are held against."""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import nsmallest
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from precaudit.errors import UserError
from precaudit.judging.placed import Placed
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison
from precaudit.schema.places import Place
from precaudit.schema.policies import completed
from precaudit.schema.records.base import SCHEMA, Number, Record, value
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.lines import encode
from precaudit.writing import whole

S = TypeVar("S", bound=Record)  # the first line of a baseline: it has created, sha256 and chain
Judged = tuple[str, str, str, int, int | None, str]  # kind and place
FROZEN = ("local", "forward", "state", "formula", "sums", "policy")


class Link(Record, frozen=True):
    """A baseline that was replaced: the SHA-256 of its lines, when it was made, and why it was replaced."""

    sha256: str
    created: str
    why: str


class BaselineRecord(Record, frozen=True, omit_defaults=False):
    """The first line: where the values come from. ``sha256``: of this line without it, and of all after it."""

    schema: int
    model: str
    weights: str
    policy: dict[str, str]
    tokens: dict[str, str]
    device: str
    versions: dict[str, str]
    run: str
    created: str = ""
    sha256: str = ""
    chain: tuple[Link, ...] = ()


class BaselineLine(Record, frozen=True):
    """One frozen error; ``first``: rel_l2 in the first baseline of the chain from which the place is in all of them."""

    prompt: str
    phase: str
    step: int
    layer: int | None
    point: str
    kind: str
    rel_l2: Number | None = None
    mae: Number | None = None
    max_diff: Number | None = None
    first: Number | None = None

    @property
    def place(self) -> Judged:
        """What identifies it."""
        return (self.kind, *Place.of(self))


@dataclass(frozen=True)
class Baseline:
    """A baseline opened for reading; its ``lines`` stay in its file (precaudit/judging/placed.py)."""

    path: Path
    record: BaselineRecord
    lines: Mapping[Judged, BaselineLine]


def place_of(e: ErrorRecord) -> Judged:
    """Return what identifies an error record among those a baseline holds."""
    return (e.kind, *Place.of(e))


def provenance(run: Run) -> BaselineRecord:
    """Return where a run's errors come from: the first line of a baseline not yet frozen."""
    r = run.record
    return BaselineRecord(
        schema=SCHEMA, model=r.model.id, weights=r.model.sha256, policy=r.policy, tokens=token_hashes(run),
        device=r.device, versions=r.versions, run=r.id,
    )  # fmt: skip


def token_hashes(run: Run) -> dict[str, str]:
    """Return a SHA-256 of every prompt's token ids."""
    return {p.id: hashlib.sha256(",".join(map(str, p.tokens)).encode()).hexdigest() for p in run.prompts.values()}


def freeze(found: Comparison, path: Path, accept: bool = False, why: str = "") -> BaselineRecord:
    """Write a baseline of a compared run; raises UserError where one is there, unless ``accept`` with ``why``."""
    return freeze_errors(found.errors, provenance(found.run), str(found.folder), path, accept, why)


def freeze_errors(
    errors: Sequence[ErrorRecord], of: BaselineRecord, where: str, path: Path, accept: bool = False, why: str = ""
) -> BaselineRecord:
    """Write a baseline of error records that lie at ``where``; raises UserError as ``freeze``."""
    before = read_baseline(path) if replaces(path, accept, why) else None
    first, unfit, frozen = "", 0, False
    for e in errors:
        if e.missing is not None or e.nonfinite:
            first, unfit = first or f"layer {e.layer} {e.point}, prompt {e.prompt}", unfit + 1
        frozen = frozen or e.kind in FROZEN
    if unfit:
        raise UserError(f"{where}: {unfit} records are missing or not finite, first {first}: no baseline")
    if not frozen:
        raise UserError(f"{where}: no local, forward or state errors to freeze")
    return write_sealed(path, of, _frozen(errors, before), None if before is None else before.record, why)


def replaces(path: Path, accept: bool, why: str) -> bool:
    """Return whether a new baseline takes the place of one; raises UserError unless ``accept`` with ``why``."""
    if not path.exists():
        return False
    if not accept:
        raise UserError(f"{path} exists; a new baseline takes its place with --accept --why TEXT")
    if not why.strip():
        raise UserError("--accept needs --why TEXT: why the new errors are the ones to hold")
    return True


def write_sealed(path: Path, of: S, lines: Iterable[Record], before: Any = None, why: str = "") -> S:
    """Write a baseline's lines under its first line, which is sealed; return that.

    ``of``: a record with ``created``, ``sha256`` and ``chain``; ``before``: that of the baseline whose place it takes.
    """
    chain = () if before is None else (*before.chain, Link(sha256=before.sha256, created=before.created, why=why))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record = msgspec.structs.replace(of, created=created, chain=chain)
    digest = seal(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as f:
            f.write(encode(msgspec.structs.replace(record, sha256="0" * 2 * digest.digest_size)))
            for line in lines:
                data = encode(line)
                digest.update(data)
                f.write(data)
            record = msgspec.structs.replace(record, sha256=digest.hexdigest())
            f.seek(0)
            f.write(encode(record))  # as many bytes as before
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another -o") from None
    return record


def seal(record: Record) -> Any:
    """Return the SHA-256 of a baseline's first line with the seal empty, to be updated with all lines after."""
    return hashlib.sha256(encode(msgspec.structs.replace(record, sha256="")))


def _frozen(errors: Iterable[ErrorRecord], before: Baseline | None) -> Iterable[BaselineLine]:
    for e in errors:
        if e.kind not in FROZEN:
            continue
        old = before.lines.get(place_of(e)) if before is not None else None
        first = old.first if old is not None and old.first is not None else e.rel_l2
        yield BaselineLine(
            prompt=e.prompt, phase=e.phase, step=e.step, layer=e.layer, point=e.point, kind=e.kind, rel_l2=e.rel_l2,
            mae=e.mae, max_diff=e.max_diff, first=first,
        )  # fmt: skip


def read_baseline(path: Path) -> Baseline:
    """Read a baseline; raises UserError when it is not one or was altered."""
    starts, hashes = array("Q"), array("l")

    def add(line: BaselineLine, start: int, end: int) -> None:
        hashes.append(hash(line.place))
        starts[-1:] = array("Q", (start, end))

    record = read_sealed(path, BaselineRecord, BaselineLine, add)
    return Baseline(path, record, Placed(path, msgspec.json.Decoder(BaselineLine).decode, starts, hashes))


def read_sealed(
    path: Path, first: type[S], line: Any, add: Callable[[Any, int, int], None], what: str = "a baseline"
) -> S:
    """Return a baseline's first line, and ``add`` each other with the bytes [start, end) that it has in the file.

    Raises UserError when it is not ``what`` or was altered.
    """
    if not path.is_file():
        raise UserError(f"no baseline at {path}; make one with: precaudit baseline RUN -o {path}")
    decode, end = msgspec.json.Decoder(line).decode, 0
    with path.open("rb") as f:
        try:
            head = f.readline()
            record = msgspec.json.decode(head, type=first)
            digest, end = seal(record), len(head)
            for x in f:
                digest.update(x)
                start, end = end, end + len(x)
                if x != b"\n":
                    add(decode(x), start, end)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path}: not {what}: {error}") from None
    if digest.hexdigest() != getattr(record, "sha256", None):
        raise UserError(f"{path} was altered since it was frozen (its SHA-256 differs)")
    return record


def stale(baseline: Baseline, run: Run | BaselineRecord, across_devices: bool) -> list[str]:
    """Return why a baseline does not hold for a run: other weights, tokens, policy, schema or device kind."""
    b, r = baseline.record, run if isinstance(run, BaselineRecord) else provenance(run)
    found = []
    if b.schema != r.schema:
        found.append(f"schema {b.schema}, now {r.schema}")
    if b.weights != r.weights:
        found.append(f"weights {b.weights[:12]}…, now {r.weights[:12]}…")
    was = completed(b.policy) if b.policy else {}
    changed = sorted(k for k in {*was, *r.policy} - {"name"} if was.get(k) != r.policy.get(k))
    if changed:
        told = ", ".join(f"{k} {was.get(k)}, now {r.policy.get(k)}" for k in changed)
        found.append(f"policy: {told}")
    other = sorted(p for p in r.tokens if p in b.tokens and b.tokens[p] != r.tokens[p])
    if other:
        found.append(f"token ids of prompt {', '.join(other)}")
    if not across_devices and device_kind(b.device) != device_kind(r.device):
        found.append(f"device {b.device}, now {r.device} (--across-devices allows it)")
    return found


def version_suspects(b: dict[str, str], r: dict[str, str]) -> list[str]:
    """Return the versions that changed from a baseline's to a run's: the first suspects of a change in the numbers."""
    return [f"{k} {b.get(k, 'absent')} → {r.get(k, 'absent')}" for k in sorted({*b, *r}) if b.get(k) != r.get(k)]


def drift(baseline: Baseline, errors: Iterable[ErrorRecord], most: int = 10) -> list[tuple[float, float, ErrorRecord]]:
    """Return the ``most`` largest of (rel_l2 over the baseline's, over the first of the chain's, record), in order."""
    return nsmallest(most, _grown(baseline, errors), lambda x: float("-inf") if math.isnan(x[0]) else -x[0])


def _grown(baseline: Baseline, errors: Iterable[ErrorRecord]) -> Iterator[tuple[float, float, ErrorRecord]]:
    for e in errors:
        old = baseline.lines.get(place_of(e)) if e.kind != "formula" else None  # below its limit it is no error
        if old is not None and e.rel_l2 is not None and value(old.rel_l2) and value(old.first):
            yield value(e.rel_l2) / value(old.rel_l2), value(e.rel_l2) / value(old.first), e

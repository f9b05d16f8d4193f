"""Baselines: numbers of a run or a rollout frozen to a file, without tensors, that later ones are held against."""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import nsmallest
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from precaudit.errors import UserError
from precaudit.judging.placed import Placed
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison
from precaudit.schema.places import Place
from precaudit.schema.policies import complete_policy
from precaudit.schema.records.base import SCHEMA, Number, Record, value
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.lines import encode
from precaudit.writing import whole

S = TypeVar("S", bound=Record)  # the first line of a baseline: it has created, sha256 and chain
L = TypeVar("L", bound=Record)  # another line: it has a place
T = TypeVar("T")
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

    def differences(self, before: "BaselineRecord") -> list[str]:
        """Return in words what else than schema, weights and device is another: policy, tokens."""
        was = complete_policy(before.policy) if before.policy else {}
        other = sorted(p for p in self.tokens if before.tokens.get(p, self.tokens[p]) != self.tokens[p])
        tokens = [f"token ids of prompt {', '.join(other)}"] if other else []
        return [*changed_keys("policy", was | {"name": ""}, self.policy | {"name": ""}), *tokens]


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


class Origin(Protocol):
    """Where numbers come from: what a baseline knows by whether it still holds."""

    @property
    def schema(self) -> int:
        """Of the records."""

    @property
    def weights(self) -> str:
        """SHA-256."""

    @property
    def device(self) -> str:
        """Its name."""

    def differences(self, before: Any, /) -> list[str]:
        """Return in words what else than these is another."""


@dataclass(frozen=True)
class BaselineForm(Generic[S, L]):
    """How a kind of baseline is written: its first line, the others, and what it is called."""

    first: type[S]
    line: Any
    called: str


OF_RUNS = BaselineForm[BaselineRecord, BaselineLine](BaselineRecord, BaselineLine, "a baseline")


@dataclass(frozen=True)
class Baseline(Generic[S, L]):
    """A baseline opened for reading; its ``lines`` stay in its file (precaudit/judging/placed.py)."""

    path: Path
    record: S
    lines: Mapping[Any, L]


RunBaseline = Baseline[BaselineRecord, BaselineLine]


def frozen_place(e: ErrorRecord) -> Judged:
    """Return what identifies an error record among those a baseline holds."""
    return (e.kind, *Place.of(e))


def provenance(run: Run) -> BaselineRecord:
    """Return where a run's errors come from: the first line of a baseline not yet frozen."""
    r = run.record
    return BaselineRecord(
        schema=SCHEMA,
        model=r.model.id,
        weights=r.model.sha256,
        policy=r.policy,
        tokens=token_hashes(run),
        device=r.device,
        versions=r.versions,
        run=r.id,
    )


def token_hashes(run: Run) -> dict[str, str]:
    """Return a SHA-256 of every prompt's token ids."""
    return {p.id: hashlib.sha256(",".join(map(str, p.tokens)).encode()).hexdigest() for p in run.prompts.values()}


def freeze(found: Comparison[Run], path: Path, accept: bool = False, why: str = "") -> BaselineRecord:
    """Write a baseline of a compared run; raises UserError where one is there, unless ``accept`` with ``why``."""
    return freeze_errors(found.errors, provenance(found.run), str(found.folder), path, accept, why)


def freeze_errors(
    errors: Sequence[ErrorRecord], of: BaselineRecord, where: str, path: Path, accept: bool = False, why: str = ""
) -> BaselineRecord:
    """Write a baseline of error records that lie at ``where``; raises UserError as ``freeze``."""
    first, unfit, frozen = "", 0, False
    for e in errors:
        if e.missing is not None or e.nonfinite:
            first, unfit = first or f"layer {e.layer} {e.point}, prompt {e.prompt}", unfit + 1
        frozen = frozen or e.kind in FROZEN
    if unfit:
        raise UserError(f"{where}: {unfit} records are missing or not finite, first {first}: no baseline")
    if not frozen:
        raise UserError(f"{where}: no local, forward or state errors to freeze")
    return write_baseline(path, OF_RUNS, of, lambda before: _frozen(errors, before), accept, why)


def write_baseline(
    path: Path,
    form: BaselineForm[S, L],
    of: S,
    lines: Callable[[Baseline[S, L] | None], Iterable[L]],
    accept: bool,
    why: str,
) -> S:
    """Write a baseline's lines under its first line, which is sealed; return that.

    ``of``: the first line without ``created``, ``sha256`` and ``chain``; ``lines``: given the baseline whose place it
    takes. Raises UserError where there is one, unless ``accept`` with ``why``.
    """
    before, chain = None, ()
    if path.exists():
        if not accept:
            raise UserError(f"{path} exists; a new baseline takes its place with --accept --why TEXT")
        if not why.strip():
            raise UserError("--accept needs --why TEXT: why the new errors are the ones to keep")
        before = read_baseline(path, form)
        old: Any = before.record
        chain = (*old.chain, Link(sha256=old.sha256, created=old.created, why=why))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record = msgspec.structs.replace(of, created=created, chain=chain)
    digest = seal(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as f:
            f.write(encode(msgspec.structs.replace(record, sha256="0" * 2 * digest.digest_size)))
            for line in lines(before):
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


def _frozen(errors: Iterable[ErrorRecord], before: RunBaseline | None) -> Iterable[BaselineLine]:
    for e in errors:
        if e.kind not in FROZEN:
            continue
        old = before.lines.get(frozen_place(e)) if before is not None else None
        first = old.first if old is not None and old.first is not None else e.rel_l2
        yield BaselineLine(
            prompt=e.prompt,
            phase=e.phase,
            step=e.step,
            layer=e.layer,
            point=e.point,
            kind=e.kind,
            rel_l2=e.rel_l2,
            mae=e.mae,
            max_diff=e.max_diff,
            first=first,
        )


def read_run_baseline(path: Path) -> RunBaseline:
    """Read a baseline of a run's errors; raises UserError when it is not one or was altered."""
    return read_baseline(path, OF_RUNS)


def read_baseline(path: Path, form: BaselineForm[S, L]) -> Baseline[S, L]:
    """Read a baseline of a kind; raises UserError when it is not one or was altered."""
    if not path.is_file():
        raise UserError(f"no baseline at {path}; make one with: precaudit baseline RUN -o {path}")
    starts, hashes = array("Q"), array("l")
    decode, end = msgspec.json.Decoder(form.line).decode, 0
    with path.open("rb") as f:
        try:
            head = f.readline()
            record = msgspec.json.decode(head, type=form.first)
            digest, end = seal(record), len(head)
            for x in f:
                digest.update(x)
                start, end = end, end + len(x)
                if x != b"\n":
                    hashes.append(hash(decode(x).place))
                    starts[-1:] = array("Q", (start, end))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path}: not {form.called}: {error}") from None
    if digest.hexdigest() != getattr(record, "sha256", None):
        raise UserError(f"{path} was altered since it was frozen (its SHA-256 differs)")
    return Baseline(path, record, Placed(path, decode, starts, hashes))


def stale(before: Origin, now: Origin, across_devices: bool = False) -> list[str]:
    """Return why a baseline does not hold: other weights, schema or kind of device, or what its kind adds to these."""
    found = []
    if before.schema != now.schema:
        found.append(f"schema {before.schema}, now {now.schema}")
    if before.weights != now.weights:
        found.append(f"weights {before.weights[:12]}…, now {now.weights[:12]}…")
    found += now.differences(before)
    if not across_devices and device_kind(before.device) != device_kind(now.device):
        found.append(f"device {before.device}, now {now.device} (--across-devices allows it)")
    return found


def changed_keys(what: str, was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return in a line which keys have other values, or nothing."""
    keys = sorted(k for k in {*was, *now} if was.get(k) != now.get(k))
    return [f"{what}: " + ", ".join(f"{k} {was.get(k)}, now {now.get(k)}" for k in keys)] if keys else []


def version_suspects(b: dict[str, str], r: dict[str, str]) -> list[str]:
    """Return in a line the versions that changed from a baseline's: the first suspects of a change in the numbers."""
    told = [f"{k} {b.get(k, 'absent')} → {r.get(k, 'absent')}" for k in sorted({*b, *r}) if b.get(k) != r.get(k)]
    return [f"versions differ from the baseline's, first suspects of any change: {', '.join(told)}"] if told else []


class Drift(NamedTuple):
    """How many times the baseline's value a number is, and how many times the first baseline's of the chain."""

    now: float
    first: float
    what: str


def largest_drift(rows: Iterable[tuple[float, float, T]], said: Callable[[T], str], most: int = 10) -> list[Drift]:
    """Return the ``most`` numbers that grew most, in order; NaN first. ``said``: what each is of."""
    found = nsmallest(most, rows, lambda x: float("-inf") if math.isnan(x[0]) else -x[0])
    return [Drift(now, first, said(of)) for now, first, of in found]


def drift(baseline: RunBaseline, errors: Iterable[ErrorRecord]) -> list[Drift]:
    """Return which relative errors grew most against a baseline."""
    return largest_drift(_grown(baseline, errors), lambda e: f"{Place.of(e).text} [{e.kind}] rel_l2")


def _grown(baseline: RunBaseline, errors: Iterable[ErrorRecord]) -> Iterator[tuple[float, float, ErrorRecord]]:
    for e in errors:
        old = baseline.lines.get(frozen_place(e)) if e.kind != "formula" else None  # below its limit it is no error
        if old is not None and e.rel_l2 is not None and value(old.rel_l2) and value(old.first):
            yield value(e.rel_l2) / value(old.rel_l2), value(e.rel_l2) / value(old.first), e

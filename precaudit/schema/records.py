"""The lines of every file precaudit writes, as frozen types (design §4). JSON Schemas are generated from these."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from precaudit.errors import UserError, nearest
from precaudit.writing import whole

SCHEMA = 1
PROGRAM_CALL = (
    "call"  # the phase of records of other programs than the shipped decoder, whose points have names of theirs
)
# JSON has no NaN and no infinity: they are written as these strings.
# A run may be someone else's: what it counts and indexes by is bounded before anything is made of that size.
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Number = float | Literal["nan", "inf", "-inf"]


def number(x: Any) -> Number:
    """Return ``x`` as JSON can hold it."""
    value = float(x)
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def value(x: Number | None) -> float:
    """Return a number of a record as a float (NaN for none)."""
    return float("nan") if x is None else float(x)


def device_kind(device: str) -> str:
    """Return cpu, tpu or gpu of a run's device, which GPUs give by their maker's name."""
    first = device.replace(":", " ").lower().split(" ")[0]
    return first if first in ("", "cpu") else "tpu" if first.startswith("tpu") else "gpu"


FROM_JAXPR = "(emulated from the jaxpr)"  # ends the device of a run whose products take the passes asked for
# How a product is made: of operands in bfloat16 parts on a TPU's matrix unit, or in float32 on its vector unit; on a
# GPU of operands in TF32 parts, in float32, or of terms rounded to the result's format
Way = Literal[
    "1 pass", "3 passes", "6 passes", "float32", "float32, one operand bfloat16", "float32, both operands bfloat16",
    "1 TF32 pass", "3 TF32 passes", "rounded products",
]  # fmt: skip


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all records."""


class PromptRecord(Record, frozen=True):
    """A line of prompts.jsonl."""

    id: str
    text: str
    tokens: tuple[Index, ...]


class StepRecord(Record, frozen=True):
    """A line of steps.jsonl: one logits row. ``token`` was fed at ``position``; top-k is what it predicts next."""

    prompt: str
    phase: str
    step: Annotated[int, msgspec.Meta(gt=-(1 << 31), lt=1 << 31)]
    position: Index
    token: Index
    top_ids: tuple[Index, ...]
    top_logits: tuple[Number, ...]
    gap: Number
    logsumexp: Number


class Stats(Record, frozen=True, omit_defaults=False):
    """Of the finite values; ``nan`` and ``inf`` count the others."""

    min: Number
    max: Number
    mean: Number
    rms: Number
    nan: Count
    inf: Count


class PointRecord(Record, frozen=True, omit_defaults=False):
    """A line of points.jsonl: one recorded tensor. ``positions``: [first, end) or the list of rows recorded."""

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    point: str
    axes: tuple[str, ...]
    shape: tuple[Index, ...]
    dtype: str
    positions: tuple[Index, ...]
    rows: Literal["range", "list"]
    file: str
    key: str
    hash: str
    support: bool
    stats: Stats


class Requested(Record, frozen=True, omit_defaults=False):
    """What a run was asked to record; ``cache_hashes``: of every cache row at the steps between the first and last.

    ``row_sums``: points of which sums of the rows are recorded and not the rows (precaudit/numbers/row_sums.py).
    """

    prompts: tuple[str, ...]
    layers: tuple[Index, ...]
    points: tuple[str, ...]
    support: tuple[str, ...]
    phases: tuple[str, ...]
    positions: str | None
    every_logit: bool
    decode_steps: Index
    batch: Index
    pad: str
    tokens_from: str | None
    cache_hashes: bool = False
    row_sums: tuple[str, ...] = ()


class ModelRecord(Record, frozen=True, omit_defaults=False):
    """Which model a run is of; ``reference``: what the user named it by.

    ``allowed``: fields of its configuration that are not known and were passed over, as the user asked.
    """

    id: str
    reference: str
    sha256: str
    config: dict[str, Any]
    allowed: tuple[str, ...] = ()


class Products(Record, frozen=True, omit_defaults=False):
    """How many products a compiled program makes: on a TPU's matrix unit in 1, 3 and 6 passes, and its vector unit."""

    passes1: Count
    passes3: Count
    passes6: Count
    vector: Count


class Prediction(Record, frozen=True, omit_defaults=False):
    """Of a predicted program: its products without and with taps, and what rounding inside of fusions may change.

    ``moved``: points (of programs: lines) whose products the two make in other precisions, with these; ``inside``:
    the largest ‖rounded − not‖ / ‖rounded‖ of its outputs, bfloat16 results inside of fusions rounded and not.
    ``kernels``: Pallas kernels that ran in interpret mode, their products as a CPU makes them.
    """

    bare: Products
    captured: Products
    moved: tuple[str, ...] = ()
    inside: Number | None = None
    kernels: tuple[str, ...] = ()


class Neutrality(Record, frozen=True, omit_defaults=False):
    """Whether capturing left the logits bit for bit as the bare program's, at the first call of a compiled program.

    ``shape``: of its tokens [B, T]; in decode of its cache, [B, S]. ``apart``: ‖bare − captured‖ / ‖captured‖ of each
    prompt's logits. ``predicted``: of a TPU that was not there, None of a device that was. ``made``: how a TPU's
    compiler has the products of each point made with taps; empty where it was not read.
    """

    phase: str
    prompts: tuple[str, ...]
    bitwise: bool
    max_diff: Number
    step: Index = 0
    shape: tuple[Index, ...] = ()
    apart: tuple[Number, ...] = ()
    predicted: Prediction | None = None
    made: dict[str, tuple[Way, ...]] = msgspec.field(default_factory=dict)


class RunRecord(Record, frozen=True, omit_defaults=False):
    """run.json. ``finished`` is null while the run is being written and stays so when it is cut off."""

    schema: int
    id: str
    model: ModelRecord
    policy: dict[str, str]
    requested: Requested
    device: str
    device_count: Index
    versions: dict[str, str]
    xla_flags: str
    commit: str | None
    command: str
    started: str
    neutrality: tuple[Neutrality, ...] = ()
    warnings: tuple[str, ...] = ()
    program: Literal["shipped", "other"] = "shipped"
    bytes: Count = 0
    hashes: dict[str, str] = {}
    finished: str | None = None


class BatchRecord(Record, frozen=True, omit_defaults=False):
    """A line of batches.jsonl, which a run has until it is finished: a batch of prompts that is written whole.

    ``steps``, ``points``: bytes and hash of its lines in these files; ``bytes``: of its tensors; ``code``: hash of the
    source that ran it; ``fed``: hash of the tokens that were given, nothing where none were. ``neutrality`` and
    ``absent``: what the batch added to the run's.
    """

    prompts: tuple[str, ...]
    steps: tuple[Count, str]
    points: tuple[Count, str]
    bytes: Count
    code: str
    fed: str
    neutrality: tuple[Neutrality, ...] = ()
    absent: tuple[str, ...] = ()


class Worst(Record, frozen=True, omit_defaults=False):
    """The element with the largest absolute error, with its index and both values."""

    index: tuple[Index, ...]
    candidate: Number
    reference: Number


class Signed(Record, frozen=True, omit_defaults=False):
    """A signed statistic and the noise honest programs have in it (schema/metrics/residue.py)."""

    value: Number
    noise: Number


class Unexplained(Record, frozen=True, omit_defaults=False):
    """What the best honest emulation leaves: ‖c − ê‖ / ‖r‖, the same in unit roundoffs of the output's format.

    ``excess``: ‖c − ê‖ over what honest programs leave; ``gain``, ``mean``: signed ⟨c − ê, r⟩ / ⟨r, r⟩ and mean of
    c − ê; ``componentwise``: the largest ``|c − r|`` over its componentwise bound, with the element's index.
    """

    rel_l2: Number
    u: Number
    excess: Number | None = None
    gain: Signed | None = None
    mean: Signed | None = None
    componentwise: tuple[Number, tuple[Index, ...]] | None = None


class Distribution(Record, frozen=True, omit_defaults=False):
    """Next-token distributions, one value a position: ``kl`` = KL(reference ‖ candidate) in nats.

    ``kl_noise``: its mean over emulated-rounding runs; ``top1`` … ``top50``: the shared part of the k most likely;
    ``rank``: of the reference's top-1 in the candidate, 0 the first; ``logprob_error``: of the token chosen next, the
    candidate's own top-1; ``gap``: top-1 minus top-2 logit of the reference.
    """

    positions: tuple[Index, ...]
    kl: tuple[Number, ...]
    kl_noise: tuple[Number, ...] | None
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    top50: tuple[float, ...]
    rank: tuple[Index, ...]
    logprob_error: tuple[Number, ...]
    gap: tuple[Number, ...]


Scope = dict[str, tuple[Number, int]]


class Narrow(Record, frozen=True, omit_defaults=False):
    """A narrow format inside an operation that makes its values, where the textbook with float32 inside does not.

    ``error``: ‖c − r‖ / ‖r‖ from FP64 of the textbook's operation on the recorded inputs; ``wide``: the same of what
    float32 inside would make of them. ``says``: what is rounded, in words.
    """

    cause: str
    says: str
    error: Number
    wide: Number


class ErrorRecord(Record, frozen=True):
    """A line of errors.jsonl; ``unknown`` says why there are no numbers.

    Scopes hold the worst value of each metric with its index: a token's position, a head, a channel (head · K + k);
    ``excess``, ``gain`` and ``mean`` there are in units of their noise. ``excluded``: masked elements, which are in no
    number. ``elided``: what the best emulation does otherwise: places left unrounded, a point read as it was before it
    was rounded, another honest form. ``inherits``: a recorded point between inputs and result from which it closes; of
    sums, the first operation that was made again.
    ``costly``: the place whose rounding an ill-conditioned operation amplifies to most of its error. ``summed``: the
    format of 16 bits in which the backend summed a product, by which the record closes and no program asks for it.
    ``narrow``: the format inside that a program declares and its textbook does not have.
    ``unsteady``: draws that are left out of noise, many times as far off as the emulation: in them a comparison or the
    like turned, no rounding. ``lost``: how many whole numbers of positions, counts or indices the run holds as others.
    ``slices``: how many tokens, heads and channels the worst was chosen from. ``missing``: requested and not in the
    run. ``skipped``: in a branch that was not taken. ``origin``: the operation that makes what is not finite, in words.
    ``gain``: ⟨e, r⟩ / ⟨r, r⟩; ``mean``: of e, signed.
    ``mismatched``: elements of a cache, or of a stream that was handed on, whose bits differ from the rows written; at
    steps where caches are hashed (``dtype`` uint32, ``n`` rows) the rows that differ; of a program's sort, top-k or
    argmax the choices that are not those of the recorded values. ``rows``: which rows, as [first, end).
    """

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    point: str
    kind: Literal["forward", "local", "state", "accum", "weights", "pair", "formula", "product", "sums", "policy"]
    candidate: str
    reference: str
    dtype: str | None = None
    n: Count = 0
    nonfinite: Count = 0
    mae: Number | None = None
    max_diff: Number | None = None
    rel_l2: Number | None = None
    cosine: Number | None = None
    max_ulp: Count | None = None
    bits_lost: Number | None = None
    snr: Number | None = None
    gain: Number | None = None
    mean: Number | None = None
    excluded: Count = 0
    worst: Worst | None = None
    explained: dict[str, Number] | None = None
    elided: dict[str, tuple[str, ...]] | None = None
    inherits: str | None = None
    costly: str | None = None
    summed: str | None = None
    narrow: Narrow | None = None
    lost: Count = 0
    unsteady: Count = 0
    unexplained: Unexplained | None = None
    ratio: Number | None = None
    scopes: dict[str, Scope] | None = None
    slices: dict[str, Count] | None = None
    mismatched: Count | None = None
    rows: tuple[tuple[Index, Index], ...] | None = None
    distribution: Distribution | None = None
    noise: Number | None = None
    missing: str | None = None
    unknown: str | None = None
    skipped: str | None = None
    origin: str | None = None

    @property
    def numberless(self) -> str | None:
        """Why there are no numbers: missing, unknown or skipped; None where there are."""
        if self.skipped is not None:
            return f"not run: {self.skipped}"
        return self.unknown if self.missing is None else f"missing: {self.missing}"


class ProbeRecord(ErrorRecord, frozen=True, kw_only=True):
    """A line of probe.jsonl: scores that a device made in one way, against FP64 of the operands as they are.

    ``prompt``: the shape, as ``--shape`` takes it; ``phase``: the format of the operands; ``point``: the way and, of
    what a TPU's compiler would make, `` on`` its name; ``unknown``: what the device said when it refused. ``asked``:
    the arithmetic that the way names; ``made``: what the scores were made of, more than one name where they cannot be
    told apart. ``version``: of JAX, or of libtpu. ``seconds`` of a call and ``time``, its ratio to a call of ``first``
    in the same round: lower quartile, median, upper quartile. ``memory``: bytes of arguments, outputs and temporaries.
    ``unit``, ``passes``: of a TPU.
    """

    kind: Literal["product"]
    way: str
    version: str
    asked: str | None = None
    made: tuple[str, ...] = ()
    honoured: Literal["yes", "replaced", "undecided"] | None = None
    first: str | None = None
    seconds: tuple[Number, Number, Number] | None = None
    time: tuple[Number, Number, Number] | None = None
    memory: tuple[Count, Count, Count] | None = None
    target: str | None = None
    unit: Literal["matrix", "vector"] | None = None
    passes: Index | None = None


class PrefillDecodeRecord(Record, frozen=True):
    """A line of prefill_decode.jsonl: the same position seen by prefill (or rescore) and by decode.

    ``f64_against_top1``: FP64's top-1 of the first view where that has a formula of its own, since RoPE turned its rows
    by another length (precaudit/schema/lengths.py); ``f64_top1`` is decode's.
    """

    prompt: str
    against: Literal["prefill", "rescore"]
    step: Index
    position: Index
    prefill_top1: Index
    decode_top1: Index
    f64_top1: Index | None
    prefill_gap: Number
    decode_gap: Number
    f64_gap: Number | None
    match: bool
    f64_match: bool | None
    near_tie: bool | None
    kl: Number | None
    max_diff: Number | None
    prefill_last_top1: Index | None = None
    decode0_top1: Index | None = None
    f64_against_top1: Index | None = None

    @property
    def agree(self) -> bool | None:
        """Whether both views have the top-1 of FP64, each of its own where formulas differ; None where unknown."""
        if self.f64_match is None or self.f64_against_top1 is None:
            return self.f64_match and self.match
        return self.f64_match and self.prefill_top1 == self.f64_against_top1

    @property
    def finite(self) -> bool:
        """Whether no number of it is NaN, as those of logits that are NaN are."""
        return "nan" not in (self.prefill_gap, self.decode_gap, self.f64_gap, self.kl, self.max_diff)


class Selected(Record, frozen=True, omit_defaults=False):
    """A selection that was computed, resolved; ``formula``: with the program's FP64 shadow, at all its places."""

    prompts: tuple[str, ...]
    phases: tuple[str, ...]
    points: tuple[str, ...]
    layers: tuple[Index, ...]
    accum: tuple[str, ...]
    weights: bool
    formula: bool = False


class CompareRecord(Record, frozen=True, omit_defaults=False):
    """compare.json: what errors.jsonl was computed from, so that a later selection can reuse its rows.

    ``run``: hash of run.json; ``sigma``: rms logit error of the emulated policy.
    """

    schema: int
    precaudit: str
    run: str
    selections: tuple[Selected, ...] = msgspec.field(name="looks")
    sigma: Number | None
    notes: tuple[str, ...]
    hashes: dict[str, str]


R = TypeVar("R", bound=Record)
T = TypeVar("T", bound=msgspec.Struct)
_ENCODER = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """Return one JSON line, newline included."""
    return _ENCODER.encode(record) + b"\n"


def decode_lines(data: bytes, kind: type[R], where: str, tolerate_tail: bool = False) -> Iterator[R]:
    """Yield the records of JSONL ``data``; raises UserError naming the line and field that is wrong.

    ``tolerate_tail``: a last line without its newline (a run that was cut off) is left out.
    """
    decode = msgspec.json.Decoder(kind).decode
    lines = data.split(b"\n")
    if lines[-1] and tolerate_tail:
        lines.pop()
    return (decode_line(decode, line, where, i) for i, line in enumerate(lines, 1) if line)


def decode_line(decode: Callable[[bytes], R], line: bytes, where: str | Path, i: int) -> R:
    """Return the record that line ``i`` of a file holds; raises UserError naming file, line and field."""
    try:
        return decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}:{i}: {error}") from None


def read_record(path: Path, kind: type[R], what: str) -> R:
    """Return the record that a JSON file holds; raises UserError where it is not there or is not ``what``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not {what}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def of_table(raw: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Return a table of a user's TOML file as a record; raises UserError that begins with ``where``."""
    names = kind.__struct_fields__
    for key in raw:
        if key not in names:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, names)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from None


def read_lines(path: Path, kind: type[R]) -> list[R]:
    """Return every record of a JSONL file; raises UserError naming file, line and field."""
    return list(decode_lines(path.read_bytes(), kind, str(path)))


def read_layers(path: Path, layers: Iterable[int]) -> list[ErrorRecord]:
    """Return the error records of some layers and those outside layers; other lines are not parsed.

    The layer is looked for in the line's bytes as ``encode`` writes it, which cannot miss one.
    """
    wanted = [b'"layer":null,', *(b'"layer":%d,' % layer for layer in layers)]
    lines = path.read_bytes().split(b"\n")
    return list(decode_lines(b"\n".join(x for x in lines if any(w in x for w in wanted)), ErrorRecord, str(path)))


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records into a folder of ours, whole or not at all."""
    with whole(path, inside=True) as f:
        f.writelines(encode(r) for r in records)

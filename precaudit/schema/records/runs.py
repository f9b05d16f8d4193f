"""What a model's run holds: run.json, and the lines of prompts.jsonl, steps.jsonl, points.jsonl and batches.jsonl."""

from typing import Annotated, Any, Literal

import msgspec

from precaudit.schema.records.base import Count, Index, Number, Record
from precaudit.schema.records.devices import SplitSum, Way
from precaudit.schema.records.manifests import DumpRun, Manifest

# The phase of records of other programs than the shipped decoder, whose points have names of theirs; of the entry point
# ``decode`` it is ``decode call``.
PROGRAM_CALL = "call"


def call_of(entry: str) -> str:
    """Return the phase of records of a program's entry point."""
    return PROGRAM_CALL if entry == PROGRAM_CALL else f"{entry} {PROGRAM_CALL}"


def is_call(phase: str) -> bool:
    """Whether a record of this phase is of a program's call."""
    return phase.endswith(PROGRAM_CALL)


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
    """A line of points.jsonl: one recorded tensor. ``positions``: [first, end) or the list of rows recorded.

    Of programs and dumps: ``prompt`` is the case, ``step`` the call; axes without names and rows without positions are
    empty. ``layer``: of a program the step of its scans, counted through; ``key`` is stacked over these.
    """

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
    ``calls``: of an imported dump, the points of each call (``prefill 0``, ``decode 1``), which need not all be alike.
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
    calls: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


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
    compiler has the products of each point made with taps; empty where it was not read. ``split``: of several devices,
    the points whose products are made in parts that are rounded before they are added, and in which ways; None where
    the compiled program was not read.
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
    split: dict[str, tuple[SplitSum, ...]] | None = None


class RunRecord(Manifest, frozen=True, kw_only=True, omit_defaults=False, tag="model"):
    """A run of a model.

    ``device_count``: how many it runs on; ``mesh``: how many each axis has that the model was cut over; empty of one
    device. ``program``: what made the tensors: our decoder, it with other parts, or another framework, whose dump was
    ``imported``.
    """

    model: ModelRecord
    policy: dict[str, str]
    requested: Requested
    device_count: Index = 1
    neutrality: tuple[Neutrality, ...] = ()
    program: Literal["shipped", "other", "dump"] = "shipped"
    mesh: dict[str, Count] = msgspec.field(default_factory=dict)
    imported: DumpRun | None = None


class ShardRecord(Record, frozen=True, omit_defaults=False):
    """A line of shards/N.jsonl, which a run of several processes has until it is finished: what process N has written.

    ``of``: prompts, or the case of a program; ``bytes``: of the parts of tensors that it holds.
    """

    of: tuple[str, ...]
    bytes: Count


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

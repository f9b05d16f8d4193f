"""What diagnosis writes beside a run."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from precaudit.schema.frames import flat, frame, list_column, worst_columns
from precaudit.schema.records.base import Number, Record
from precaudit.schema.records.errors import Worst


class Share(Record, frozen=True, omit_defaults=False):
    """What one operation's own error contributes to a change in logits."""

    layer: int | None
    point: str
    share: Number


class Shares(Record, frozen=True, omit_defaults=False):
    """A line of shares.jsonl: ``change`` of an objective of a prompt's last row from ``fp64``, and what makes it.

    ``explained``: the sum of all shares; ``absolute``: of their sizes; the rest of ``change`` is not additive. ``run``:
    hash of run.json.
    """

    run: str
    prompt: str
    objective: str
    fp64: Number
    change: Number
    explained: Number
    absolute: Number
    shares: tuple[Share, ...]
    unknown: str | None = None

    @property
    def remainder(self) -> float:
        """|change − explained| / |change|."""
        change = float(self.change)
        return abs(change - float(self.explained)) / abs(change) if change else 0.0


class Remedy(Record, frozen=True, omit_defaults=False):
    """A line of remedies.jsonl: one part of the policy raised; pairs are (before, after).

    ``kl``: mean KL from FP64 in nats; ``rms``: of the logit error; ``margin``: mean size of the error of the top-1
    margin at prompts' ends; ``local``: relative own error of ``point`` over all layers (None: not told); ``flips``: of
    top-1 in ``positions``; ``gain``: the share of KL that is gone; ``time``, ``memory``: of prefill, ``decode_time``:
    of a decode step, after over before. ``ranges``: the least and the most of the paired calls that ``time`` and
    ``decode_time`` are medians of, by "prefill" and "decode"; ``device``: on which. ``run``: hash of run.json.
    """

    run: str
    part: str
    settings: dict[str, str]
    command: str
    code: str
    kl: tuple[Number, Number]
    rms: tuple[Number, Number]
    margin: tuple[Number, Number]
    point: str
    local: tuple[Number, Number] | None
    flips: tuple[int, int]
    positions: int
    gain: Number
    time: Number
    decode_time: Number
    memory: Number
    ranges: dict[str, tuple[Number, Number]] = msgspec.field(default_factory=dict)
    device: str = ""


class LineRemedy(Record, frozen=True, omit_defaults=False):
    """A line of lines.jsonl: a line of a program's source, or several together, in float32; pairs are (before, after).

    Emulated: ``size`` is the mean KL of the rows of ``output`` from FP64 in nats, or its relative distance
    (``measure``), over realisations of the program's rounding; ``all``: the same with every line in float32; ``flips``:
    of top-1 in ``rows``; ``gain``: the share of size that is gone, ``error`` its standard error; ``bytes``: that their
    results take more. ``real``: the size as the program ran, not emulated. ``run``: hash of run.json. ``calls``:
    how many were run one after another; ``products``: sources whose products a device makes of narrower parts of
    float32 operands, made in float32 here.
    """

    run: str
    output: str
    measure: Literal["kl", "distance"]
    sources: tuple[str, ...]
    text: tuple[str, ...]
    size: tuple[Number, Number]
    all: Number
    flips: tuple[int, int]
    rows: int
    gain: Number
    error: Number
    bytes: int
    real: Number | None = None
    calls: int = 1
    products: tuple[str, ...] = ()


class Differs(Record, frozen=True, omit_defaults=False):
    """A place where the program's FP64 shadow is not the reference; ``distance``: relative."""

    phase: str
    step: int
    layer: int | None
    point: str
    distance: Number


class FormulaRecord(Record, frozen=True, omit_defaults=False):
    """formula.json: where shadow and reference first part in each phase, of one prompt of the run with hash ``run``.

    ``unknown``: why it could not be told.
    """

    run: str
    prompt: str
    differs: tuple[Differs, ...]
    largest: Number
    unknown: str | None = None


class Kept(Record, frozen=True, omit_defaults=False):
    """kept.json: hashes of run.json, of the code, and of each file, all as they were when the file was written."""

    run: str
    code: str
    files: dict[str, str]


class Finding(Record, frozen=True, omit_defaults=False):
    """A line of findings.jsonl: one cause, where it shows first and where else, and what was measured of it.

    ``kind``: rounding, format, quantisation, semantics, state or unknown. ``explained`` and ``equal``: the share of the
    error the named cause reproduces, and of the elements bit for bit; ``second``: the next best and its share.
    ``shadow``: relative distance of the program's FP64 shadow from the reference where it first differs, None where it
    was not computed. ``positions``: how the error depends on the token's position, where it can be told.
    ``fails``: the number over its limit, and of which part of the tensor; ``worst``: the element of that part that is
    farthest off.
    """

    kind: Literal["rounding", "format", "quantisation", "semantics", "state", "unknown"]
    cause: str
    says: str
    layer: int | None
    point: str
    layers: tuple[int, ...]
    phases: tuple[str, ...]
    prompts: tuple[str, ...]
    records: int
    rel_l2: Number | None
    explained: Number | None
    equal: Number | None
    second: tuple[str, Number] | None
    worst: Worst | None
    shadow: Number | None = None
    fix: str = ""
    positions: str = ""
    fails: str = ""


def findings_frame(findings: Iterable[Finding]) -> Any:
    """Return findings as a pandas DataFrame, always with the same columns."""
    return frame(findings, (*flat(Finding), *map(list_column, ("layers", "phases", "prompts")), *worst_columns()))

"""What rollout says: its records, and limits on verl's metrics."""

from collections.abc import Sequence
from math import isnan
from typing import Literal, NamedTuple

from precaudit.checks.rollouts.mismatch import METRICS, SMALLER_IS_WORSE, Mismatch
from precaudit.errors import UserError, nearest
from precaudit.schema.records.base import Number, Record, value

ENGINE = "engine"
ANSWERS = "answers_difference"  # a limit on what Paired says of two policies' answers
Side = Literal["engine", "policy", "trainer", "fp64"]


class RolloutRecord(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="mismatch"):
    """A line of rollouts.jsonl: ``rollout`` against ``trainer`` over the whole file (id None) or one sequence of it.

    ``policy``: by whose prefill the side ``policy`` is scored, and under which rollouts of ours were drawn. ``worst``:
    of a sequence, the index of the generated token with the largest |Δ log p|, its id, and both values.
    """

    id: str | None
    policy: str
    rollout: Side
    trainer: Side
    mismatch: Mismatch
    worst: tuple[int, int, Number, Number] | None = None


class Limit(NamedTuple):
    """``metric`` may not be above (or, ``below``, under) ``value``."""

    metric: str
    value: float
    below: bool = False


class Held(NamedTuple):
    """What a limit said of the engine against a trainer: pass, fail, nonfinite or unknown."""

    trainer: Side
    limit: Limit
    found: float
    status: Literal["pass", "fail", "nonfinite", "unknown"]


def parse_limits(above: Sequence[str], below: Sequence[str]) -> tuple[Limit, ...]:
    """Return the limits written ``kl=1e-3``; raises UserError for what is no metric, no number, or the wrong way."""
    given = [("--fail-above", text, False) for text in above] + [("--fail-below", text, True) for text in below]
    return tuple(_parsed(*each) for each in given)


def _parsed(option: str, text: str, under: bool) -> Limit:
    name, _, written = text.partition("=")
    if name not in (*METRICS, ANSWERS):
        raise UserError(f"{option} {text}: no metric {name!r}{nearest(name, (*METRICS, ANSWERS))}")
    try:
        limit = float(written)
    except ValueError:
        limit = float("nan")
    if isnan(limit):
        raise UserError(f"{option} {text}: a number is wanted, such as {name}=1e-3")
    if smaller_is_worse(name) != under:
        raise UserError(f"{option} {text}: of {name}, {'larger' if under else 'smaller'} is worse")
    if name == ANSWERS and not -1 <= limit <= 1:
        raise UserError(f"{option} {text}: a share from -1 to 1 is wanted; 2 points fewer are -0.02")
    return Limit(name, limit, under)


def smaller_is_worse(metric: str) -> bool:
    """Whether a smaller value of a metric is worse."""
    return metric in (*SMALLER_IS_WORSE, ANSWERS)


def hold(record: RolloutRecord, limit: Limit) -> Held:
    """Return what a limit says of a record; a metric that is not defined passes none."""
    given: Number | None = getattr(record.mismatch, limit.metric)
    found = value(given)
    if given is None:
        return Held(record.trainer, limit, found, "unknown")
    if isnan(found):
        return Held(record.trainer, limit, found, "nonfinite")
    broken = found < limit.value if limit.below else found > limit.value
    return Held(record.trainer, limit, found, "fail" if broken else "pass")

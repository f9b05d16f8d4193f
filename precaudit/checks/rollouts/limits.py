"""What rollout says: a record a pair of sides."""

from typing import Literal

from precaudit.checks.rollouts.mismatch import Mismatch
from precaudit.schema.records.base import Number, Record

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

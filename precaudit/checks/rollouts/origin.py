"""Where a file of rollouts' records comes from: its first line, by which a baseline knows whether it still holds."""

import hashlib
from collections.abc import Iterable

from precaudit.checks.rollouts.limits import Side
from precaudit.judging.baselines import changed_keys
from precaudit.schema.policies import complete_policy
from precaudit.schema.records.base import Record


class RolloutRun(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="rollout"):
    """The first line of rollouts.jsonl: what was drawn or read, under which policies, and what it was held to.

    ``weights``: SHA-256 of the checkpoint's. ``policies``: {name: its settings}, those that ran; ``refused``: {name:
    why}; ``apart``: those whose loops drew other tokens. ``sides``: the pairs that every policy has a record of.
    ``trainer``: name, weights and settings of another trainer, empty without. ``prompts``: SHA-256 of all prompts'
    token ids, in any order; ``questions``: of the questions' answers, empty without. ``asked``: how tokens were drawn,
    or that they were read.
    """

    schema: int
    model: str
    weights: str
    policies: dict[str, dict[str, str]]
    refused: dict[str, str]
    apart: tuple[str, ...]
    sides: tuple[tuple[Side, Side], ...]
    trainer: dict[str, str]
    prompts: str
    questions: str
    asked: dict[str, str]
    device: str
    versions: dict[str, str]

    def differences(self, before: "RolloutRun") -> list[str]:
        """Return in words what else than schema, weights and device is another: policies, trainer, drawing, prompts."""
        found = []
        for name in sorted(before.policies.keys() & self.policies.keys()):
            found += changed_keys(
                f"policy {name}", complete_policy(before.policies[name]), complete_policy(self.policies[name])
            )
        found += changed_keys("trainer", before.trainer, self.trainer)
        found += changed_keys("sampled with", before.asked, self.asked)
        others = (what for what in ("prompts", "questions") if getattr(before, what) != getattr(self, what))
        return [*found, *(f"the {what} are others" for what in others)]


def digest(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts in any order; nothing of none."""
    found = sorted(texts)
    return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else ""

"""The part of ``precaudit rollout`` that says what makes log-probabilities differ."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from precaudit.cli._options import references, say

if TYPE_CHECKING:
    from precaudit.checks.rollouts.causes import Cause
    from precaudit.checks.rollouts.parity import Parity
    from precaudit.checks.rollouts.reading import Rollout
    from precaudit.progress import Advance
    from precaudit.recording.tracing.subject import Subject

Scored = tuple["Subject", "Parity", Sequence["Rollout"]]


def explained(scored: "Sequence[Scored]", given: dict[str, Any], temperature: float, tell: "Advance") -> "list[Cause]":
    """Return what makes the worst tokens of each subject's rollouts differ; nothing where --explain was not given."""
    if given["explain"] < 1:
        return []
    from precaudit.checks.rollouts.causes import causes, worst_of

    found = []
    with references(False) as cache:
        for subject, parity, rollouts in scored:
            chosen = worst_of(parity, rollouts, given["explain"])
            found += causes(subject, chosen, cache, temperature, tell)
    return found


def show(found: "Sequence[Cause]") -> None:
    """Print a sentence for each cause."""
    from precaudit.reports.causes import lines
    from precaudit.schema.policies import load_policy

    if found:
        say("")
        say("what makes the worst tokens differ between decode and a trainer's prefill:")
    for cause in found:
        for line in lines([cause], load_policy(cause.policy).settings()):
            say(line)


def code_of(found: "Sequence[Cause]", code: int) -> int:
    """Return the exit code with that of causes: 1 where records fail, 3 where none can be judged."""
    if code == 1 or any(c.verdict not in ("rounding", "unknown") for c in found):
        return 1
    return 3 if code == 3 or any(c.verdict == "unknown" for c in found) else code

"""The part of ``precaudit rollout`` that says what makes log-probabilities differ."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from precaudit.cli._options import references

if TYPE_CHECKING:
    from precaudit.checks.rollouts.causes import TokenCause
    from precaudit.checks.rollouts.parity import Parity
    from precaudit.checks.rollouts.reading import Rollout
    from precaudit.progress import Advance
    from precaudit.recording.tracing.subject import Subject

Scored = tuple["Subject", "Parity", Sequence["Rollout"]]


def explain_rollouts(
    scored: "Sequence[Scored]", given: dict[str, Any], temperature: float, tell: "Advance"
) -> "list[TokenCause]":
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


def exit_code_with_causes(found: "Sequence[TokenCause]", code: int) -> int:
    """Return the exit code with that of causes: 1 where records fail, 3 where none can be judged."""
    if code == 1 or any(c.verdict not in ("rounding", "unknown") for c in found):
        return 1
    return 3 if code == 3 or any(c.verdict == "unknown" for c in found) else code

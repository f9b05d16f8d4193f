"""Rollouts of our own: drawn under several policies, timed, and each held to a trainer and FP64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from precaudit.checks.rollouts.answers import status_under_limit
from precaudit.checks.rollouts.budgets import RolloutBudget
from precaudit.checks.rollouts.divergence import Divergence, first_divergences, judge_divergences
from precaudit.checks.rollouts.parity import Checks, Parity, score_parity
from precaudit.checks.rollouts.questions import Answers, Changed, HeldAnswers, Question, changed_answers, read_answers
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.timing import DrawVariant, How, Task, TimedVariant, Timing, time_variants
from precaudit.errors import UserError, enough_memory
from precaudit.progress import Advance, silent
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.policies import Policy


class Refusal(NamedTuple):
    """A policy that cannot run here, and why."""

    policy: str
    why: str


@dataclass(frozen=True)
class Drawn:
    """What was drawn: a Measured for every policy and loop, a Parity for every policy, the policies that cannot run.

    ``apart``: policies whose loops drew other tokens. ``divergences``: of every policy after the first, and which
    sequences it drew otherwise. ``answers``, ``changed``: where questions were asked, of every policy and of those
    after the first; ``held``: what limits say of the latter.
    """

    model: str
    temperature: float
    measured: tuple[TimedVariant, ...]
    parities: tuple[Parity, ...]
    refused: tuple[Refusal, ...]
    apart: tuple[str, ...]
    divergences: tuple[Divergence, ...] = ()
    answers: tuple[Answers, ...] = ()
    changed: tuple[Changed, ...] = ()
    held: tuple[HeldAnswers, ...] = ()

    @property
    def firsts(self) -> list[TimedVariant]:
        """Of every policy the loop that was named first."""
        found: dict[str, TimedVariant] = {}
        for m in self.measured:
            found.setdefault(m.timing.policy, m)
        return list(found.values())

    @property
    def timings(self) -> list[Timing]:
        """The timings."""
        return [m.timing for m in self.measured]

    @property
    def rollouts(self) -> list[tuple[str, Rollout]]:
        """Every policy's rollouts, of its first loop; ids begin with the policy where there are several."""
        named = [(m.timing.policy, r) for m in self.firsts for r in m.rollouts]
        return named if len(self.firsts) == 1 else [(p, replace(r, id=f"{p}/{r.id}")) for p, r in named]

    @property
    def exit_code(self) -> int:
        """1 where a parity's is, loops part or answers are worse; 3 where a policy or limit cannot be judged."""
        codes, held = [p.exit_code for p in self.parities], [h.status for h in self.held]
        if 1 in codes or self.apart or "fail" in held:
            return 1
        silent = any(a.unparsed == a.questions * a.n for a in self.answers)
        return 3 if 3 in codes or self.refused or silent or "unknown" in held else 0


def open_subjects(load: Callable[[Policy], Subject], policies: Sequence[Policy]) -> tuple[list[Subject], list[Refusal]]:
    """Return the subjects of policies, and those that cannot run; raises UserError where none can, or one is twice."""
    found: list[Subject] = []
    refused: list[Refusal] = []
    names = [p.name for p in policies]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--policy names {twice[0]} twice")
    for policy in policies:
        try:
            found.append(load(policy))
        except UserError as error:
            if len(policies) == 1:
                raise
            refused.append(Refusal(policy.name, str(error)))
    if not found:
        raise UserError(f"none of {len(refused)} policies can run: {refused[0].why}")
    return found, refused


def draw_all(
    subjects: Sequence[Subject],
    given: Sequence[Task],
    how: How,
    checks: Checks | None = None,
    refused: Sequence[Refusal] = (),
    tell: Advance = silent,
) -> Drawn:
    """Draw and time ``given`` under every subject and loop, and hold what each subject drew to ``checks``."""
    checks, loops = checks or Checks(), how.loops
    with enough_memory():
        measured = time_variants([DrawVariant(s, loop) for s in subjects for loop in loops], given, how, tell)
    firsts = measured[:: len(loops)]
    apart = [
        s.policy.name
        for i, s in enumerate(subjects)
        if len({tuple(r.tokens for r in m.rollouts) for m in measured[i * len(loops) : (i + 1) * len(loops)]}) > 1
    ]
    parted_ = _divergences(subjects, firsts, given, how, checks.exact)
    name, scored = subjects[0].checkpoint.name, how.sampling.scoring_temperature
    parities = [score_parity(s, m.rollouts, checks, scored, tell) for s, m in zip(subjects, firsts, strict=True)]
    return Drawn(name, scored, tuple(measured), tuple(parities), tuple(refused), tuple(apart), tuple(parted_))


def grade(
    found: Drawn,
    questions: Sequence[Question],
    decode: Callable[[tuple[int, ...]], str],
    limits: Sequence[RolloutBudget] = (),
) -> Drawn:
    """Return what was drawn with how many questions each policy answers; ``decode`` makes a text of token ids.

    ``limits``: on the difference of every policy after the first.
    """
    texts = []
    for m in found.firsts:
        said, n = [decode(r.tokens) for r in m.rollouts], len(m.rollouts) // len(questions)
        texts.append([said[i * n : (i + 1) * n] for i in range(len(questions))])
    names = [m.timing.policy for m in found.firsts]
    marks = [read_answers(name, questions, some) for name, some in zip(names, texts, strict=True)]
    pairs = [
        changed_answers(name, names[0], questions, some, texts[0])
        for name, some in zip(names[1:], texts[1:], strict=True)
    ]
    stated = [b.entry.limit for b in limits if b.entry.limit is not None]
    held = [HeldAnswers(c, limit, status_under_limit(c.paired, limit)) for limit in stated for c in pairs]
    return replace(found, answers=tuple(marks), changed=tuple(pairs), held=tuple(held))


def _divergences(
    subjects: Sequence[Subject], firsts: Sequence[TimedVariant], given: Sequence[Task], how: How, exact: bool
) -> list[Divergence]:
    """Return where every policy after the first parts from it."""
    found = []
    for s, m in zip(subjects[1:], firsts[1:], strict=True):
        some = first_divergences(s.policy.name, subjects[0].policy.name, m.rollouts, firsts[0].rollouts)
        numbered = [(t.number, r) for t, r in zip(given, m.rollouts, strict=True)]
        found += judge_divergences(some, numbered, (s, subjects[0]), how.sampling) if exact else some
    return found

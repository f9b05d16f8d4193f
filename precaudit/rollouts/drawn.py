"""Rollouts of our own: drawn under several policies, timed, and each held to a trainer and FP64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from precaudit.errors import UserError, enough_memory
from precaudit.policies import Policy
from precaudit.progress import Advance, silent
from precaudit.rollouts.generation import Loop
from precaudit.rollouts.limits import Limit
from precaudit.rollouts.parity import Parity, parity
from precaudit.rollouts.reading import Rollout
from precaudit.rollouts.timing import How, Measured, Task, Timing, Variant, measure
from precaudit.tracing.subject import Subject


class Refusal(NamedTuple):
    """A policy that cannot run here, and why."""

    policy: str
    why: str


@dataclass(frozen=True)
class Checks:
    """What drawn rollouts are held to: the policy's own prefill, ``trainer``'s, FP64's (``exact``), and limits."""

    trainer: Subject | None = None
    exact: bool = True
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """What was drawn: a Measured for every policy and loop, a Parity for every policy, the policies that cannot run.

    ``apart``: policies whose loops drew other tokens.
    """

    model: str
    temperature: float
    measured: tuple[Measured, ...]
    parities: tuple[Parity, ...]
    refused: tuple[Refusal, ...]
    apart: tuple[str, ...]

    @property
    def timings(self) -> list[Timing]:
        """The timings."""
        return [m.timing for m in self.measured]

    @property
    def rollouts(self) -> list[tuple[str, Rollout]]:
        """Every policy's rollouts, of its first loop; ids begin with the policy where there are several."""
        found: dict[str, Measured] = {}
        for m in self.measured:
            found.setdefault(m.timing.policy, m)
        alone = len(found) == 1
        return [(p, r if alone else replace(r, id=f"{p}/{r.id}")) for p, m in found.items() for r in m.rollouts]

    @property
    def exit_code(self) -> int:
        """1 where a parity's is or loops part, 3 where a policy cannot run or a limit's metric is not defined."""
        codes = [p.exit_code for p in self.parities]
        if 1 in codes or self.apart:
            return 1
        return 3 if 3 in codes or self.refused else 0


def opened(load: Callable[[Policy], Subject], policies: Sequence[Policy]) -> tuple[list[Subject], list[Refusal]]:
    """Return the subjects of policies, and those that cannot run; raises UserError where none can, or one is twice."""
    found: list[Subject] = []
    refused: list[Refusal] = []
    names = [p.name for p in policies]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--policies names {twice[0]} twice")
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


def drawn(
    subjects: Sequence[Subject],
    given: Sequence[Task],
    how: How,
    loops: Sequence[Loop] = ("while",),
    checks: Checks | None = None,
    refused: Sequence[Refusal] = (),
    tell: Advance = silent,
) -> Drawn:
    """Draw and time ``given`` under every subject and loop, and hold what each subject drew to ``checks``."""
    checks = checks or Checks()
    with enough_memory():
        measured = measure([Variant(s, loop) for s in subjects for loop in loops], given, how, tell)
    firsts = measured[:: len(loops)]
    apart = [
        s.policy.name
        for i, s in enumerate(subjects)
        if len({tuple(r.tokens for r in m.rollouts) for m in measured[i * len(loops) : (i + 1) * len(loops)]}) > 1
    ]
    parities = [
        parity(s, m.rollouts, checks.limits, how.sampling.scored, checks.exact, tell, checks.trainer)
        for s, m in zip(subjects, firsts, strict=True)
    ]
    name, scored = subjects[0].checkpoint.name, how.sampling.scored
    return Drawn(name, scored, tuple(measured), tuple(parities), tuple(refused), tuple(apart))

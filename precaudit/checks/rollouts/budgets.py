"""The [[rollout]] entries of budgets.toml: limits on a rollout's metrics, each with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from precaudit.checks.rollouts.frozen import FRACTIONS, SIZES, factor_of
from precaudit.checks.rollouts.limits import ANSWERS
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.written import Pair, Written
from precaudit.errors import UserError, nearest
from precaudit.judging.budgets import entries
from precaudit.schema.toml import of_table

RATCHETED = (*SIZES, *FRACTIONS)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[rollout]] table: ``limit`` of ``metric``, or ``ratchet``: a factor over the baseline's value.

    ``ratchet`` true: 2, of k3_kl 4. ``policies``: globs. ``rollout``, ``against``: the sides of the pair, any trainer
    unless said. The limit of answers_difference is a share, of every policy's answers less the first's, and less the
    baseline's of the same.
    """

    why: str
    metric: str
    policies: str | list[str] = "*"
    rollout: Literal["engine", "policy", "trainer"] = "engine"
    against: Literal["policy", "trainer", "fp64"] | None = None
    limit: float | None = None
    ratchet: float | bool | None = None


@dataclass(frozen=True)
class Budget:
    """An entry, and the policies that its globs name."""

    entry: Entry
    policies: frozenset[str]

    def matches(self, pair: Pair, metric: str) -> bool:
        """Whether a metric of a pair is under this budget."""
        e = self.entry
        sides = pair[1] == e.rollout and e.against in (None, pair[2])
        return metric == e.metric and pair[0] in self.policies and sides

    @property
    def factor(self) -> float | None:
        """The ratchet's factor; None of a limit."""
        r = self.entry.ratchet
        return None if r is None or r is False else factor_of(self.entry.metric) if r is True else float(r)


def read_rollout_budgets(path: Path, found: Written) -> tuple[Budget, ...]:
    """Read the [[rollout]] entries of budgets.toml; raises UserError, with the line, for one that matches nothing."""
    return tuple(_budget(f"{path}:{line}", raw, found) for line, raw in entries(path, "rollout"))


def _budget(where: str, raw: dict[str, Any], found: Written) -> Budget:
    entry = of_table(raw, Entry, where)
    if problem := _problem(entry):
        raise UserError(f"{where}: {problem}")
    globs = [entry.policies] if isinstance(entry.policies, str) else entry.policies
    known = (*found.origin.policies, *found.origin.refused)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in known):
            raise UserError(f"{where}: policies {glob!r} names none of {', '.join(known)}{nearest(glob, known)}")
    budget = Budget(entry, frozenset(name for name in known if any(fnmatchcase(name, glob) for glob in globs)))
    if absent := _absent(entry, found):
        raise UserError(f"{where}: {absent}")
    return budget


def _problem(e: Entry) -> str | None:
    """Return what is wrong with an entry."""
    ratchets = e.ratchet is not None and e.ratchet is not False
    if not e.why.strip():
        return "why is empty: say what this budget is for"
    if e.metric not in (*METRICS, ANSWERS):
        return f"unknown metric {e.metric!r}{nearest(e.metric, (*METRICS, ANSWERS))}"
    if (e.limit is not None) == ratchets:
        return "give one of limit, ratchet"
    if e.limit is not None and not abs(e.limit) < float("inf"):
        return f"limit = {e.limit} is impossible: a finite number is wanted"
    if e.metric == ANSWERS and e.limit is not None and not -1 <= e.limit <= 1:
        return f"limit = {e.limit} is impossible: a share from -1 to 1 is wanted"
    if ratchets and e.metric not in RATCHETED:
        return f"a ratchet on {e.metric}, which is no size that can grow: {', '.join(RATCHETED)} are"
    if not isinstance(e.ratchet, bool | None) and not 1 <= e.ratchet < float("inf"):
        return f"ratchet = {e.ratchet} is impossible: a factor of 1 or more"
    return "policies is empty: leave it out to mean all" if e.policies == [] else None


def _absent(e: Entry, found: Written) -> str | None:
    """Return why an entry can match nothing of a file."""
    if e.metric == ANSWERS:
        return None if found.answers else f"{ANSWERS} matches nothing: no questions were asked"
    if any(rollout == e.rollout and e.against in (None, trainer) for rollout, trainer in found.origin.sides):
        return None
    sides = ", ".join(f"{a} / {b}" for a, b in found.origin.sides)
    return f"{e.rollout} / {e.against or 'any'} matches nothing of {sides}"


def under(budgets: Sequence[Budget], pair: Pair, metric: str) -> list[Budget]:
    """Return the budgets that a metric of a pair is under."""
    return [b for b in budgets if b.matches(pair, metric)]

"""Limits, budgets and a baseline applied to records, one at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from precaudit.errors import UserError
from precaudit.judging.baselines import RunBaseline, frozen_place
from precaudit.judging.budgets import RunBudget, ratchet, stated_limit, under
from precaudit.judging.farthest import Sizes
from precaudit.judging.metrics import keeps_limit, metric_of
from precaudit.judging.pooled import ForwardPool
from precaudit.judging.rules import judge
from precaudit.judging.spilled import Spilled
from precaudit.judging.verdicts import STATUSES, Status, Verdict
from precaudit.recording.runs.unique import UniqueHashes
from precaudit.schema.digits import digits
from precaudit.schema.filed import without_collector
from precaudit.schema.limits import Limits
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ProductError

JUDGED = ("local", "forward", "state", "formula", "product", "sums", "policy")


def holds_all(_: ErrorRecord | Verdict) -> bool:
    """Look at all there is."""
    return True


@dataclass
class Rules:
    """Limits, budgets and a baseline, applied to one record at a time; counts what passes.

    ``holds``: what is looked at. Of the rest nothing is counted; its verdicts say what those looked at inherit.
    """

    limits: Limits
    budgets: tuple[RunBudget, ...] = ()
    baseline: RunBaseline | None = None
    stale: tuple[str, ...] = ()
    seen: UniqueHashes = field(default_factory=UniqueHashes)
    passed: int = 0
    free: int = 0  # products that no budget is of: they have no limit of their own
    ran: set[str] = field(default_factory=set)  # points with numbers
    places: dict[tuple[int | None, str], None] = field(default_factory=dict)
    stated: Mapping[str, float] = field(default_factory=dict)  # of rel_l2, by kind, beside whatever else judges it
    sizes: Sizes = field(default_factory=Sizes)
    pool: ForwardPool = field(default_factory=ForwardPool)
    holds: Callable[[ErrorRecord | Verdict], bool] = holds_all

    def apply(self, e: ErrorRecord, where: str) -> Verdict | None:
        """Return the record's verdict unless it passes or informs only; raises UserError for a second of one place."""
        if e.kind not in JUDGED:
            return None
        place = frozen_place(e)
        if not self.seen.add(place):
            raise UserError(
                f"{where}: a second {e.kind} record of {Place.of(e).text}; the file was put together wrongly"
            )
        held = self.holds(e)
        if held:
            self.places[e.layer, e.point] = None
        if e.skipped is None:
            self.ran.add(e.point)
        stated = under(self.budgets, e.kind, e.phase, e.layer, e.point)
        if isinstance(e, ProductError) and not stated:
            self.free += held
            return None
        if held:
            self.sizes.add(e)
        if held and not stated:
            self.pool.add(e)
        verdict = self._within(e, self._judge_by_budgets(e, stated) if stated else judge(e, self.limits))
        if verdict is not None and verdict.status == "pass":
            self.passed += held
            return None
        return verdict

    def of(self, errors: Iterable[ErrorRecord], where: str) -> Spilled:
        """Return the verdicts of records that do not pass; raises UserError as ``apply``."""
        with without_collector():
            return Spilled(v for e in errors if (v := self.apply(e, where)) is not None)

    def pooled_verdicts(self) -> list[Verdict]:
        """Return the verdicts on forward errors of all records together, of those that no budget is of."""
        return list(self.pool.verdicts(self.limits))

    def _within(self, e: ErrorRecord, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict, or where it passes that on a stated limit of the record's relative error."""
        limit = self.stated.get(e.kind)
        if limit is None or e.rel_l2 is None or verdict is None or verdict.status != "pass":
            return verdict
        size = value(e.rel_l2)
        if keeps_limit("rel_l2", size, limit):
            return verdict
        return Verdict.of(
            e,
            "fail",
            metric="rel_l2",
            scope="tensor",
            value=size,
            limit=limit,
            why=f"--limit {e.kind}={digits(limit, 6)}",
        )

    def _judge_by_budgets(self, e: ErrorRecord, its: Sequence[RunBudget]) -> Verdict | None:
        """Judge by budgets: a limit or ratchet stands in for the default rule, ``unexplained`` for its excess limit."""
        verdict = judge(e, self.limits)
        if verdict is None or verdict.status in ("missing", "nonfinite", "not run"):
            return verdict
        stated = [v for b in its if (v := self._stated_verdict(e, b)) is not None]
        if isinstance(e, ProductError) and verdict.status == "pass" and not stated:
            return None
        if verdict.status == "unknown":
            allowed = next((b for b in its if b.entry.unknown == "allow"), None)
            if allowed is not None:
                judged = [v for v in stated if v.status != "unknown"]
                stated = judged or [Verdict.of(e, "pass", why=allowed.entry.why)]
            elif e.rel_l2 is None:
                return verdict
        return min(stated, key=lambda v: STATUSES.index(v.status), default=verdict)

    def _stated_verdict(self, e: ErrorRecord, b: RunBudget) -> Verdict | None:
        entry = b.entry
        if entry.unknown is not None:
            return None
        if entry.unexplained is not None:
            if entry.scope != "tensor" and metric_of(e, "excess", entry.scope) is None:
                return Verdict.of(e, "unknown", text=f"the record has no excess at scope {entry.scope}", why=entry.why)
            found_by_rule = judge(e, self.limits.with_excess(entry.scope, entry.unexplained))
            return None if found_by_rule is None else msgspec.structs.replace(found_by_rule, why=entry.why)
        metric = entry.metric or "rel_l2"
        found = metric_of(e, metric, entry.scope)
        if found is None:
            return Verdict.of(e, "unknown", text=f"the record has no {metric} at scope {entry.scope}", why=entry.why)
        limit = stated_limit(b, bool(self.stale), lambda factor: self._ratchet(e, metric, factor))
        if isinstance(limit, tuple):
            return Verdict.of(e, limit[0], text=limit[1], why=entry.why)
        status: Status = "pass" if keeps_limit(metric, found[0], limit) else "fail"
        return Verdict.of(
            e, status, metric=metric, scope=entry.scope, value=found[0], limit=limit, index=found[1], why=entry.why
        )

    def _ratchet(self, e: ErrorRecord, metric: str, factor: float) -> float | None:
        """Return max(factor × baseline, 2 × pooled emulated error): noise alone must not break a ratchet."""
        line = self.baseline.lines.get(frozen_place(e)) if self.baseline is not None else None
        now, ratio = value(getattr(e, metric)), value(getattr(e, "ratio", None))
        return ratchet(getattr(line, metric, None), factor, 2 * now / ratio if ratio > 0 else 0.0)

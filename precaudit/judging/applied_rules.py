"""Limits, budgets and a baseline applied to records, one at a time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from precaudit.errors import UserError
from precaudit.judging.baselines import Baseline, place_of
from precaudit.judging.budgets import Budget, metric_of, select, within
from precaudit.judging.farthest import Sizes
from precaudit.judging.pooled import Pool
from precaudit.judging.rules import judge
from precaudit.judging.spilled import Spilled
from precaudit.judging.verdicts import STATUSES, Status, Verdict
from precaudit.recording.runs.unique import Seen
from precaudit.schema.filed import without_collector
from precaudit.schema.limits import Limits
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord

JUDGED = ("local", "forward", "state", "formula", "product", "sums", "policy")


@dataclass
class Rules:
    """Limits, budgets and a baseline, applied to one record at a time; counts what passes."""

    limits: Limits
    budgets: tuple[Budget, ...] = ()
    baseline: Baseline | None = None
    stale: tuple[str, ...] = ()
    seen: Seen = field(default_factory=Seen)
    passed: int = 0
    free: int = 0  # products that no budget is of: they have no limit of their own
    ran: set[str] = field(default_factory=set)  # points with numbers
    places: dict[tuple[int | None, str], None] = field(default_factory=dict)
    stated: Mapping[str, float] = field(default_factory=dict)  # of rel_l2, by kind, beside whatever else judges it
    sizes: Sizes = field(default_factory=Sizes)
    pool: Pool = field(default_factory=Pool)

    def apply(self, e: ErrorRecord, where: str) -> Verdict | None:
        """Return the record's verdict unless it passes or informs only; raises UserError for a second of one place."""
        if e.kind not in JUDGED:
            return None
        place = place_of(e)
        if not self.seen.add(place):
            raise UserError(
                f"{where}: a second {e.kind} record of {Place.of(e).text}; the file was put together wrongly"
            )
        self.places[e.layer, e.point] = None
        if e.skipped is None:
            self.ran.add(e.point)
        under = select(self.budgets, e) if self.budgets else []
        if e.kind == "product" and not under:
            self.free += 1
            return None
        self.sizes.add(e)
        if not under:
            self.pool.add(e)
        verdict = self._within(e, self._budgeted(e, under) if under else judge(e, self.limits))
        if verdict is not None and verdict.status == "pass":
            self.passed += 1
            return None
        return verdict

    def of(self, errors: Iterable[ErrorRecord], where: str) -> Spilled:
        """Return the verdicts of records that do not pass; raises UserError as ``apply``."""
        with without_collector():
            return Spilled(v for e in errors if (v := self.apply(e, where)) is not None)

    def pooled(self) -> list[Verdict]:
        """Return the verdicts on forward errors of all records together, of those that no budget is of."""
        return list(self.pool.verdicts(self.limits))

    def _within(self, e: ErrorRecord, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict, or where it passes that on a stated limit of the record's relative error."""
        limit = self.stated.get(e.kind)
        if limit is None or e.rel_l2 is None or verdict is None or verdict.status != "pass":
            return verdict
        size = value(e.rel_l2)
        if within("rel_l2", size, limit):
            return verdict
        return Verdict.of(
            e, "fail", metric="rel_l2", scope="tensor", value=size, limit=limit, why=f"--limit {e.kind}={limit:g}"
        )  # fmt: skip

    def _budgeted(self, e: ErrorRecord, under: Sequence[Budget]) -> Verdict | None:
        """Judge by budgets: a limit or ratchet stands in for the default rule, ``unexplained`` for its excess limit."""
        verdict = judge(e, self.limits)
        if verdict is None or verdict.status in ("missing", "nonfinite", "not run"):
            return verdict
        stated = [v for b in under if (v := self._stated(e, b)) is not None]
        if e.kind == "product" and verdict.status == "pass" and not stated:
            return None
        if verdict.status == "unknown":
            allowed = next((b for b in under if b.entry.unknown == "allow"), None)
            if allowed is not None:
                judged = [v for v in stated if v.status != "unknown"]
                stated = judged or [Verdict.of(e, "pass", why=allowed.entry.why)]
            elif e.rel_l2 is None:
                return verdict
        return min(stated, key=lambda v: STATUSES.index(v.status), default=verdict)

    def _stated(self, e: ErrorRecord, b: Budget) -> Verdict | None:
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
        limit = entry.limit
        if b.factor is not None:
            if self.stale:
                return Verdict.of(e, "stale", text="the baseline to ratchet from is stale", why=entry.why)
            limit = self._ratchet(e, metric, b.factor)
            if limit is None:
                return Verdict.of(e, "missing", text="the baseline has no value to ratchet from", why=entry.why)
        assert limit is not None
        status: Status = "pass" if within(metric, found[0], limit) else "fail"
        return Verdict.of(
            e, status, metric=metric, scope=entry.scope, value=found[0], limit=limit, index=found[1], why=entry.why
        )  # fmt: skip

    def _ratchet(self, e: ErrorRecord, metric: str, factor: float) -> float | None:
        """Return max(factor × baseline, 2 × pooled emulated error): noise alone must not break a ratchet."""
        line = self.baseline.lines.get(place_of(e)) if self.baseline is not None else None
        before = getattr(line, metric, None)
        if before is None or not math.isfinite(value(before)):
            return None
        now, ratio = value(getattr(e, metric)), value(e.ratio)
        return max(factor * value(before), 2 * now / ratio if ratio > 0 else 0.0)

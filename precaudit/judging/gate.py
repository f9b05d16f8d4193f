"""The verb ``gate``: judge a run's errors, or a file of them, against limits, budgets and a baseline."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Unpack, cast

from precaudit.errors import UserError, nearest
from precaudit.judging.applied_rules import Rules
from precaudit.judging.baselines import Drift, drift, read_run_baseline, stale, version_suspects
from precaudit.judging.budgets import Known, RunBudget, read_budgets, resolve_budgets
from precaudit.judging.expectations import Expected, expected_of
from precaudit.judging.expected import absent
from precaudit.judging.farthest import ways_made
from precaudit.judging.judgement import Judgement
from precaudit.judging.looks import look_by
from precaudit.judging.recalled import provenance_of, recall_any
from precaudit.judging.rules import judge_pair
from precaudit.judging.spilled import Spilled
from precaudit.judging.verdicts import STATUSES, Status, Verdict, inheriting, never_run
from precaudit.mirrors import takes_urls
from precaudit.recording.opening import AnyRun
from precaudit.recording.runs.written import Comparison
from precaudit.schema.filed import Filed, without_collector
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import Limits, default_limits
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord, ForwardError, PairError
from precaudit.schema.records.probe import ProbeRecord
from precaudit.schema.selection import Filters, FilterTexts

STATED = ("forward", "local")


@dataclass(frozen=True)
class Criteria:
    """What a run is judged by, as ``gate`` has it, and ``filters``: which of its verdicts are counted and shown."""

    budgets: Path | None = None
    baseline: Path | None = None
    across_devices: bool = False
    limits: Limits | None = None
    at_most: Mapping[str, float] = field(default_factory=dict)
    filters: Filters = field(default_factory=Filters)


@takes_urls
def gate(
    source: Path | str | Comparison[Any] | AnyRun,
    budgets: Path | str | None = None,
    baseline: Path | str | None = None,
    across_devices: bool = False,
    limits: Limits | None = None,
    at_most: Mapping[str, float] | None = None,
    **filters: Unpack[FilterTexts],
) -> Judgement:
    """Judge a compared run, or a file of error records. No JAX, no tensors.

    ``filters``: which of its verdicts count: ``layers="0,15:18"``, ``points="q,k"``, ``phases``, ``positions`` and
    ``prompt``, as of ``compare``.

    ``at_most``: the largest relative error from FP64 that passes, whatever explains it, of records of a kind: forward
    or local, such as ``{"forward": 0.1}``.

    ``budgets``, ``baseline``: the paths of a budgets.toml and of frozen errors. Raises UserError for what is no run,
    was not compared, or was altered, and for budgets or baselines that are not there or wrong.
    """
    budgets = None if budgets is None else path_of(budgets, "budgets")
    baseline = None if baseline is None else path_of(baseline, "baseline")
    of = Filters.of("gate", filters)
    return gate_selected(source, Criteria(budgets, baseline, across_devices, limits, at_most or {}, of))


def gate_selected(source: Path | str | Comparison[Any] | AnyRun, by: Criteria) -> Judgement:
    """Judge all of a run and return the verdicts that filters hold; raises UserError as ``gate``."""
    if isinstance(source, AnyRun):
        source = source.folder  # as it is on disk now
    if isinstance(source, Comparison) and source.against is not None:
        raise UserError(f"{source.folder} holds differences of two runs, which no limit is for: gate one of the runs")
    frozen = None if by.baseline is None else read_run_baseline(by.baseline)
    rules = Rules(by.limits or default_limits(), (), frozen, stated=checked_limits(by.at_most))
    if not isinstance(source, Comparison) and Path(source).is_file():
        if by.filters.options:
            raise UserError(f"{source} is a file of records, judged whole; leave out {by.filters.options[0]}")
        return _gate_file(Path(source), rules, by.budgets)
    found = source if isinstance(source, Comparison) else recall_any(source)
    look = look_by(found.run, by.filters)
    if look is not None:
        rules.holds = look.holds
    expected = expected_of(found)
    if by.budgets is not None:
        names = expected.names()
        read = read_budgets(by.budgets, names if expected.own_names else None)
        rules.budgets = resolve_budgets(read, by.budgets, expected.layers, names)
    return _judge_whole(found, expected, rules, by.across_devices)


def checked_limits(stated: Mapping[str, float]) -> dict[str, float]:
    """Return limits of relative errors by kind; raises UserError for a kind that has none, or what is no limit."""
    for kind, limit in stated.items():
        if kind not in STATED:
            raise UserError(f"limit {kind}={limit}: {kind!r} is no kind of relative error{nearest(kind, STATED)}")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < math.inf:
            raise UserError(f"limit {kind}={limit}: a relative error is a finite number, 0 or more, such as 0.1")
    return {kind: float(limit) for kind, limit in stated.items()}


def path_of(given: Path | str, name: str) -> Path:
    """Return a path that was given as a text, too; raises UserError, which names the argument, for anything else."""
    if not isinstance(given, str | PathLike):
        raise UserError(f"{name}= takes a path, not {type(given).__name__}")
    return Path(given)


def judge_records(
    name: str, records: Iterable[ErrorRecord], budgets: Sequence[RunBudget], more: Iterable[Verdict] = ()
) -> Judgement:
    """Judge records that are at hand by the default limits and budgets, with verdicts that were made elsewhere."""
    rules = Rules(default_limits(), tuple(budgets))
    verdicts = rules.of(records, name)
    verdicts.extend(rules.pooled_verdicts())
    given = list(more)
    rules.passed += sum(v.status == "pass" for v in given)
    verdicts.extend(v for v in given if v.status != "pass")
    return _judgement(name, verdicts, rules, (), ())


def _judge_whole(found: Comparison[Any], expected: Expected, rules: Rules, across_devices: bool) -> Judgement:
    """Judge all records of a compared run, and what is not there."""
    of = provenance_of(found.run)
    if rules.baseline is not None:
        rules.stale = tuple(stale(rules.baseline.record, of, across_devices))
    verdicts = rules.of(found.errors, str(found.folder / "errors.jsonl"))
    verdicts.extend(_of_pairs(rules, found.prefill_decode))
    verdicts.extend(chain(expected.missing(rules.seen), expected.disturbed(rules.limits)))
    more, told, drifted = _against(rules, found.errors, of.versions)
    verdicts.extend(chain(rules.pooled_verdicts(), more))
    settled = expected.settled(verdicts, found.errors)
    made = _judgement(found.run.record.id, settled, rules, [*expected.notes, *told], drifted)
    return _with_farthest(made, found, expected, rules)


def _with_farthest(made: Judgement, found: Comparison[Any], expected: Expected, rules: Rules) -> Judgement:
    farthest = rules.sizes.farthest(ways_made(n.made for n in found.run.record.neutrality))
    return replace(made, besides=expected.besides, sources=expected.sources, farthest=farthest)


def judge_found(found: Comparison[Any]) -> Judgement:
    """Judge the records of a comparison by the default limits, whatever else its run may hold. No JAX, no tensors."""
    rules, expected = Rules(default_limits()), expected_of(found)
    verdicts = rules.of(found.errors, str(found.folder / "errors.jsonl"))
    verdicts.extend(_of_pairs(rules, found.prefill_decode))
    verdicts.extend(chain(expected.disturbed(rules.limits), rules.pooled_verdicts()))
    settled = expected.settled(verdicts, found.errors)
    return _with_farthest(_judgement(found.run.record.id, settled, rules, expected.notes, ()), found, expected, rules)


def _against(
    rules: Rules, errors: Sequence[ErrorRecord], versions: dict[str, str]
) -> tuple[Iterator[Verdict], list[str], tuple[Drift, ...]]:
    """Return what a baseline adds: verdicts on what is absent or stale, a note on versions, and the largest growth."""
    b = rules.baseline
    if b is None:
        return iter(()), [], ()
    old = (Verdict(status="stale", kind="baseline", text=x) for x in rules.stale)
    told = version_suspects(b.record.versions, versions)
    return chain(absent(b.lines, rules.seen, str(b.path)), old), told, tuple(drift(b, errors))


def _of_pairs(rules: Rules, pairs: Iterable[PrefillDecodeRecord]) -> list[Verdict]:
    """Return the verdicts on positions seen twice that do not pass; those that do are counted."""
    found = [judge_pair(p) for p in pairs]
    rules.passed += sum(v.status == "pass" and rules.holds(v) for v in found)
    return [v for v in found if v.status != "pass"]


def _gate_file(path: Path, rules: Rules, budgets: Path | None) -> Judgement:
    """Judge a file of error records as it streams by."""
    with path.open("rb") as f:
        first = f.readline(1 << 16)
    if first.startswith(b'{"schema":'):
        raise UserError(f"{path} is a baseline, and no error records: gate RUN --baseline {path}")
    if b'"kind":"product"' in first and b'"shape":' not in first:
        again = "write it again: precaudit probe -o FILE"
        raise UserError(f"{path}: an earlier version of precaudit probe wrote it; {again}")
    filed = Filed(path, cast("type[ErrorRecord | ProbeRecord]", ERROR_KINDS | ProbeRecord), _same_lengths)
    if budgets is not None:
        places = {(e.point, e.layer, e.phase, e.kind) for e in map(_as_error, filed)}
        layers = 1 + max((layer for _, layer, *_ in places if layer is not None), default=0)
        known = Known(
            frozenset(point for point, *_ in places),
            frozenset(phase for *_, phase, _ in places),
            frozenset(kind for *_, kind in places),
        )
        own = not known.points <= POINTS.keys()
        rules.budgets = resolve_budgets(read_budgets(budgets, known if own else None), budgets, layers, known)
    with without_collector():
        each = (rules.apply(_as_error(e), f"{path}:{line}") for line, e in filed.with_lines())
        verdicts = Spilled(v for v in each if v is not None)
    if rules.baseline is not None:
        verdicts.extend(absent(rules.baseline.lines, rules.seen, str(rules.baseline.path)))
    free = f'{rules.free:,} products are under no budget: one of kind = "product" limits them'
    verdicts.extend(rules.pooled_verdicts())
    return _judgement(path.name, inheriting(verdicts), rules, [free] if rules.free else [], ())


def _as_error(e: ErrorRecord | ProbeRecord) -> ErrorRecord:
    return e.product() if isinstance(e, ProbeRecord) else e


def _same_lengths(e: ErrorRecord | ProbeRecord, where: str) -> None:
    """Raise UserError for a distribution whose lists cannot belong together."""
    d = e.distribution if isinstance(e, ForwardError | PairError) else None
    if d is not None and d.kl_noise is not None and not len(d.kl) == len(d.kl_noise) == len(d.positions):
        raise UserError(f"{where}: distribution: positions, kl and kl_noise are of different lengths")


def _judgement(name: str, verdicts: Iterable[Verdict], rules: Rules, notes: Iterable[str], drifted: Any) -> Judgement:
    found: Counter[Status] = Counter()

    def count_records() -> Iterator[Verdict]:
        for v in filter(rules.holds, never_run(verdicts, rules.ran)):
            found[v.status] += 1
            yield v

    kept = Spilled(count_records())
    found["pass"] += rules.passed
    tally: dict[Status, int] = {s: found[s] for s in STATUSES if found[s]}
    return Judgement(name, kept.in_order(), tally, tuple(notes), drifted, tuple(rules.places))

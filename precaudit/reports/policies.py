"""Runs of one model under several policies side by side: a row a policy, and what differs in sentences."""

import shlex
from collections.abc import Iterable, Sequence

from precaudit.judging.figures import forward_logits, largest, logits_figures, rank_number
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import STATUSES
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison
from precaudit.references.attribution import attribute
from precaudit.reports.cells import over_limit
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import short
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.policies import besides
from precaudit.schema.records.base import Count, Number, Record, json_number
from precaudit.schema.records.errors import ErrorRecord, ForwardError, LocalError


class PolicyRow(Record, frozen=True, omit_defaults=False):
    """A run of a policy against FP64; ``why``: it is not known, and the rest is empty.

    ``local``: the largest local error, at ``where``; ``excess``: the number of any that is farthest over its limit, in
    units of it; ``explained`` of ``operations`` local errors are rounding. ``logits``: the largest forward error;
    ``kl``: the largest KL from FP64; ``flips`` of ``positions`` have another top-1 than FP64, ``flip`` is the first.
    ``besides``: what makes its errors besides rounding, and is meant. ``stored_kl``: of integer weights, the largest KL
    from FP64 of the weights as they are stored.
    """

    policy: str
    run: str
    why: str | None = None
    local: Number | None = None
    where: str = ""
    explained: Count = 0
    operations: Count = 0
    logits: Number | None = None
    kl: Number | None = None
    flips: Count = 0
    positions: Count = 0
    verdict: str = ""
    excess: Number | None = None
    flip: str = ""
    besides: str = ""
    stored_kl: Number | None = None


def row_of(found: Comparison[Run], judgement: Judgement) -> PolicyRow:
    """Return the row of a compared and judged run."""
    local = [e for e in found.errors if isinstance(e, LocalError) and e.numberless is None]
    blames = [a for e in local if (a := attribute(e)) is not None]
    worst = max(local, key=lambda e: (e.nonfinite > 0, rank_number(e.rel_l2)), default=None)
    logits = forward_logits(found.errors, ForwardError)
    figures = logits_figures(logits)
    return PolicyRow(
        policy=found.run.record.policy["name"],
        run=found.run.folder.name,
        local=None if worst is None else "nan" if worst.nonfinite else worst.rel_l2,
        where="" if worst is None else worst.point if worst.layer is None else f"{worst.point} layer {worst.layer}",
        explained=sum(a.passes for a in blames),
        operations=len(blames),
        logits=figures.get("logits"),
        kl=figures.get("kl"),
        flips=int(figures.get("flips", 0)),
        positions=int(figures.get("positions", 0)),
        verdict=_verdict(judgement),
        excess=largest([json_number(over_limit(e)) for e in local]),
        flip=_first_flip(logits),
        besides=besides(found.run.record.policy),
    )


def _first_flip(logits: Iterable[ForwardError]) -> str:
    """Return where the first top-1 stands that is not FP64's: the prompt, the phase and the position."""
    for e in logits:
        for position, top in zip(e.distribution.positions, e.distribution.top1, strict=True) if e.distribution else ():
            if not top >= 1:
                return f"{e.prompt} {e.phase} t{position}"
    return ""


def _verdict(j: Judgement) -> str:
    worst = next((s for s in STATUSES if j.counts.get(s) and s not in ("pass", "not run")), None)
    if j.exit_code == 0:
        return "✓ pass"
    sign = "✗" if j.exit_code == 1 else "?"
    return f"{sign} nothing judged" if worst is None else f"{sign} {j.counts[worst]:,} {worst}"


COLUMNS = ("policy", "local", "at", "rounding", LOGITS, "KL", "flips", "verdict")
KEY = (
    "local: the largest error that an operation added, and where; rounding: how many it explains",
    f"{LOGITS}: the largest forward error from FP64 on the same tokens; KL: the largest, in nats",
    "flips: positions whose most likely token is not FP64's",
)


STORED_KL = "KL, stored"  # the column of ``stored_kl``
STORED = "KL, stored: the largest KL from FP64 of the weights as they are stored, of a policy with integer weights"


def row_texts(row: PolicyRow) -> tuple[str, ...]:
    """Return a row as text."""
    if row.why is not None:
        return (row.policy, *[""] * (len(COLUMNS) - 2), f"? {row.why}")
    explained = (
        f"all {row.operations:,}" if row.explained == row.operations else (f"{row.explained:,} of {row.operations:,}")
    )
    return (
        row.policy,
        short(row.local, "unknown"),
        row.where,
        explained if row.operations else "unknown",
        short(row.logits, "unknown"),
        short(row.kl, "unknown"),
        f"{row.flips:,} of {row.positions:,}" if row.positions else "unknown",
        row.verdict,
    )


def policy_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts, a row a policy."""
    return Table("", tuple(columns), tuple(tuple(row) for row in rows), (columns[0], columns[-1], "at"))


def policies_report(rows: Sequence[PolicyRow], folder: str, said: Sequence[str] = ()) -> Report:
    """Return the report of runs under several policies; ``said``: what differs between them."""
    columns, texts, key = list(COLUMNS), [list(row_texts(r)) for r in rows], list(KEY)
    if any(r.stored_kl is not None for r in rows):
        at, key = columns.index("KL") + 1, [*KEY, STORED]
        columns.insert(at, STORED_KL)
        for row, r in zip(texts, rows, strict=True):
            row.insert(at, short(r.stored_kl, ""))
    section = Section(tables=(policy_table(columns, texts),), lines=(*key, *(f"- {x}" for x in said)))
    return Report(
        _verdict_on(rows, folder), (section,), ending=("Records and a report are beside each run",), records=rows
    )


def _verdict_on(rows: Sequence[PolicyRow], folder: str) -> Headline:
    """Return the first sentence: which policies do not pass, or that all do."""
    failing = [r.policy for r in rows if r.verdict.startswith("✗")]
    open_ = [r.policy for r in rows if r.why is not None or r.verdict.startswith("?")]
    if failing:
        run = next(r.run for r in rows if r.policy == failing[0])
        return Headline(
            "✗",
            f"{len(failing)} of {len(rows)} policies fail: {', '.join(failing)}.",
            f"precaudit diagnose {shlex.quote(f'{folder}/{run}')}",
        )
    if open_ or not rows:
        return Headline("?", f"{len(open_)} of {len(rows)} policies cannot be judged: {', '.join(open_)}.")
    return Headline("✓", all_explained(rows))


def all_explained(rows: Sequence[PolicyRow]) -> str:
    """Return the sentence on policies that all pass, and which of them changes more than rounding."""
    more = "".join(f"; of {r.policy}, with {r.besides}" for r in rows if r.besides)
    return f"rounding explains every error of all {len(rows)} policies{more}."


def policy_differences(first: Comparison[Run], other: Comparison[Run]) -> list[str]:
    """Return in sentences what differs between a run and the first, which it is held against."""
    a, b = first.run.record, other.run.record
    names = f"{b.policy['name']} against {a.policy['name']}"
    said = [f"{names}: {_formats(a.policy, b.policy)}."]
    if a.model.sha256 != b.model.sha256:
        said.append(f"{names}: the weights are not the same.")
    mine, theirs = Recorded.of(first.run), Recorded.of(other.run)
    shared = [p for p in first.run.prompts if p in other.run.prompts]
    apart = [p for p in shared if mine.fed_tokens(p) != theirs.fed_tokens(p)]
    if apart or not shared:
        what = f"{len(apart)} of {len(shared)} prompts were fed other tokens" if shared else "no prompt is in both"
        return [*said, f"{names}: {what}; positions are not compared."]
    return [*said, f"{names}: {_flips(first, other)}"]


def _formats(a: dict[str, str], b: dict[str, str]) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for key in a:
        if key != "name" and a[key] != b.get(key):
            groups.setdefault((b.get(key, "?"), a[key]), []).append(key)
    if not groups:
        return "the policies are the same"
    return "; ".join(f"{', '.join(keys)} {x}, there {y}" for (x, y), keys in groups.items())


def _flips(first: Comparison[Run], other: Comparison[Run]) -> str:
    """Return at how many positions the most likely token differs, and with which of the two FP64 agrees there."""
    tops = [{(s.prompt, s.phase, s.position): s.top_ids[:1] for s in c.run.steps} for c in (first, other)]
    both = tops[0].keys() & tops[1].keys()
    apart = [key for key in both if tops[0][key] != tops[1][key]]
    text = f"the same tokens were fed; the most likely next token differs at {len(apart):,} of {len(both):,} positions"
    if not apart:
        return f"{text}."
    right = [_agreeing(c.errors) for c in (first, other)]
    known = [key for key in apart if all(key in r for r in right)]
    sides = " and ".join(
        f"{c.run.record.policy['name']} at {sum(r[key] for key in known)}"
        for c, r in zip((first, other), right, strict=True)
    )
    return f"{text}; FP64 agrees with {sides} of these."


def _agreeing(errors: Iterable[ErrorRecord]) -> dict[tuple[str, str, int], bool]:
    """Return of every position with logits whether its most likely token is FP64's."""
    found = {}
    for e in errors:
        if isinstance(e, ForwardError) and e.point == LOGITS and e.distribution is not None:
            for position, top in zip(e.distribution.positions, e.distribution.top1, strict=True):
                found[e.prompt, e.phase, position] = top >= 1
    return found

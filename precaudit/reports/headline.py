"""The sentence every command begins with: what is wrong and where, or that nothing is; and the command that helps."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import isfinite
from pathlib import Path

from precaudit.judging.farthest import Farthest
from precaudit.judging.judgement import Judgement
from precaudit.judging.pooled import METRICS as POOLED
from precaudit.judging.verdicts import HASHED, OVERFLOW, Status, Verdict
from precaudit.reports.judgement import NOTHING, not_finite, overflow_text
from precaudit.reports.report import Headline
from precaudit.schema.digits import apart, digits, percent, share_words
from precaudit.schema.places import LAST, point_text
from precaudit.schema.records.base import value
from precaudit.schema.records.runs import PROGRAM_CALL, is_call

AMONG = " in what was selected"  # where filters chose
LARGE = 0.1  # of the values themselves: from here on the first sentence says how far off they are
KINDS = ("formula", "state", "policy", "local", "sums", "forward")  # of one place, what says most first


def headline(j: Judgement, run: str, among: str = "") -> Headline:
    """Return the first sentence on a judgement of ``run``, a folder or a file of records.

    ``among``: what of it was looked at, where that is not all.
    """
    places: set[tuple[int | None, str]] = set()

    def note(v: Verdict) -> Verdict:
        places.add((v.layer, v.point))
        return v

    if (first := _first(map(note, of_status(j, "fail", "nonfinite")))) is not None:
        others = len(places) - 1
        rest = f" {others} more {'place fails' if others == 1 else 'places fail'}." if others else ""
        return Headline("✗", f"{place_text(first)}: {how_bad(first)}.{rest}", next_command(first, run))
    if (first := _first(of_status(j, "missing", "stale", "unknown"))) is not None:
        same = j.counts[first.status]
        told = first.text or "nothing is there"
        return Headline("?", f"{same:,} {first.status}: {place_text(first)}: {told}.", next_command(first, run))
    if (first := _first(of_status(j, "input suspect"))) is not None:  # filters leave out what fails before it
        same, cause = j.counts["input suspect"], "an operation before it fails, which filters leave out"
        return Headline("?", f"{same:,} input suspect: {place_text(first)}: {cause}.", next_command(first, run))
    passed = j.counts.get("pass", 0)
    if not passed:
        return Headline("?", f"nothing was judged: {NOTHING[j.of]}.")
    if j.of == "rollouts":
        return Headline("✓", f"all {passed:,} values that were judged keep their limits.")
    explains = f"rounding and {j.besides} explain" if j.besides else "rounding explains"
    far = j.farthest
    size = f"; {how_far(far, j.sources)}" if far is not None and far.whole >= LARGE else ""
    return Headline("✓", f"{explains} all {passed:,} errors that were judged{among}{size}.")


def how_far(far: Farthest, sources: Mapping[str, str]) -> str:
    """Return how far the farthest values are from FP64, and which operation adds most by itself."""
    told = f"{point_text(far.at)} is {percent(far.whole)} away from FP64"
    if far.cancelled:
        more = f" and {len(far.cancelled) - 1} more" if len(far.cancelled) > 1 else ""
        told += f", without {far.cancelled[0]}{more}, whose terms cancel"
    if far.made_at is None or not far.own:
        return told
    source = sources.get(far.made_at.point, "")
    line = f" ({source.rpartition('/')[2]})" if source else ""
    made = f", products in {' or '.join(far.ways)}" if far.ways else ""
    at = f"{point_text(far.made_at)}{line}{made}"
    return f"{told}; the largest error of one operation by itself is {percent(far.own)}: {at}"


def of_status(j: Judgement, *statuses: Status) -> Iterator[Verdict]:
    """Yield the verdicts of some statuses; none is looked at after the last."""
    return islice((v for v in j.verdicts if v.status in statuses), sum(j.counts.get(s, 0) for s in statuses))


def _first(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the first in the program; of a program whose order of points is not known, the first recorded.

    The call where it begins comes before the one where it is worst.
    """

    def key(v: Verdict) -> tuple[tuple[int, int], bool, int]:
        depth = v.depth if not is_call(v.phase) else (v.step, 0)
        return depth, v.phase != "prefill", KINDS.index(v.kind) if v.kind in KINDS else len(KINDS)

    return min(verdicts, key=key, default=None)


def place_text(v: Verdict) -> str:
    """Return the operation, layer and call a verdict is on, as people say it."""
    if not v.point:
        return f"prompt {v.prompt}" if v.prompt else v.kind or "the run"
    place = point_text(v)
    if is_call(v.phase):
        return f"{place}, case {v.prompt}" + (f", {v.phase} {v.step}" if v.step or v.phase != PROGRAM_CALL else "")
    return f"{place}, {v.phase}" if v.phase else place


def how_bad(v: Verdict) -> str:
    """Return what is wrong, in words and at most two numbers."""
    if v.status == "nonfinite":
        return "; ".join(filter(None, (v.text, not_finite(v))))
    found, limit = digits(v.value), digits(v.limit)
    if v.kind == "state" and v.metric == HASHED:
        return f"{value(v.value):,.0f} rows of what was read differ from what was written"
    if v.kind == "state" and is_call(v.phase):
        return f"{value(v.value):,.0f} choices are not those of the recorded values, by more than rounding"
    if v.kind == "sums" and not v.why:
        what = "the sum of a row" if v.scope == "token" else "sums of rows"
        return f"{what} of it differs from what its inputs give by {found} × the error of rounding (limit {limit})"
    if v.metric == OVERFLOW:
        return overflow_text(v)
    if v.metric == "lost":
        n = value(v.value)
        which = "1 whole number is stored as another" if n == 1 else f"{n:,.0f} whole numbers are stored as others"
        return f"{which}: its format does not have {'it' if n == 1 else 'them'}"
    if v.kind in ("state", "policy") and v.metric == "mismatched":
        return f"{value(v.value):,.0f} elements of what was read differ from what was written"
    if v.kind == "formula" and not v.why:
        return f"the formula is not the reference's: it differs by {digits(v.value)} without any rounding"
    if v.metric == "top1" or v.limit is None:
        return v.text or f"{v.metric} {found}"
    at = "" if v.scope in ("", "tensor") else f" of one {v.scope}"
    if v.why:
        over = "below" if value(v.value) < value(v.limit) else "over"
        found = apart(value(v.value), value(v.limit))
        return f"{v.metric}{at} is {found}, {over} its stated limit {limit}"
    if v.kind == "forward" and v.metric in ("ratio", "kl"):
        what = "KL from FP64" if v.metric == "kl" else "the error from FP64"
        return f"{what} is {found} × the error of rounding (limit {limit})"
    if v.metric in POOLED:
        what = "error" if v.metric == POOLED[0] else "gain"
        return f"the {what} from FP64 is {found} × the error of rounding (limit {limit}) {v.text}"
    limits = f"{v.metric}{at} {found}, limit {limit}"
    if v.kind == "policy":
        return f"not the result of the announced policy on its inputs ({limits})"
    if v.explained is None or not isfinite(value(v.explained)):
        return limits
    share = value(v.explained)
    # where the whole tensor's share reads as nearly all, what fails is one part of it
    found = share_words(share)
    return f"rounding explains {found} of the error ({limits})" if share < 0.9 else f"more than rounding ({limits})"


def next_command(v: Verdict, run: str) -> str:
    """Return the command that helps with a verdict that is no pass; none for a file, or what trace must mend."""
    if v.status == "missing" or (v.status != "stale" and Path(run).is_file()):
        return ""
    run = shlex.quote(run)
    if v.status in ("fail", "nonfinite", "input suspect"):
        return f"precaudit diagnose {run}"
    if v.status == "stale":
        return "precaudit baseline RUN -o FILE --accept --why TEXT"
    if is_call(v.phase):
        return f"precaudit compare {run}"
    narrowed = "" if v.depth[0] == LAST or v.layer is None else f" --layers {v.layer}"
    return f"precaudit compare {run}{narrowed} -v"

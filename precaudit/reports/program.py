"""A program's points and their errors as tables that fit a terminal."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, isfinite
from statistics import median

from precaudit.judging.rules import judge
from precaudit.judging.verdicts import STATUSES, Verdict
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.compared_programs import pairs_of
from precaudit.recording.runs.programs import EQUATIONS, OWN_SUMS, Opened, ProgramPoint
from precaudit.reports import fitting
from precaudit.reports.diagnosis import JUMP
from precaudit.reports.provenance import facts_of, subtitle
from precaudit.reports.provenance import title as title_of
from precaudit.reports.report import Headline, Report, Section
from precaudit.reports.summary import prefill_decode_sentence
from precaudit.reports.tables import prefill_decode_table
from precaudit.schema.digits import count_text, digits, rough, roundoffs, short
from precaudit.schema.emulations import SUMS
from precaudit.schema.filed import of_kinds
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import SAME
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import (
    AccumulationError,
    ErrorRecord,
    FormulaError,
    ForwardError,
    LocalError,
    PolicyError,
)

SHOWN = 24  # points, unless all are asked for
LEAST = 3  # steps of a point that tell how its error grows
COLUMNS = ("point", "format", "local", "in u", "unexplained", "bit-equal", "forward", "ratio", "verdicts", "at")


def program_report(
    opened: Opened,
    errors: Sequence[ErrorRecord],
    verdict: Headline | None = None,
    every: bool = False,
    verdicts: Iterable[Verdict] | None = None,
) -> Report:
    """Return the report of a program's run: for every point its largest errors over cases, calls and steps.

    ``verdicts``: of the gate, all that are no pass; else those of the records by the default rule.

    Without ``every`` a terminal shows, of many points, those that do not pass and the ones of which most is left.
    """
    its = None if verdicts is None else _by_point(verdicts)
    found, said = rows(opened, errors, its), tuple(program_sentences(opened, errors))
    said = (*_beside_rows(opened, its or {}), *said)
    order = sorted(range(len(found)), key=lambda i: _weight(found[i]))
    kept = sorted(order[: None if every else SHOWN])
    title = "The largest of each point: local, one operation on its recorded inputs; forward, the whole program"
    left = ("point", "format", "verdicts", "at")
    rest = len(found) - len(kept)
    more = (f"and {rest} more points, which pass (--all shows them)",) if rest else ()
    whole, part = (fitting.Table(title, COLUMNS, tuple(r), left) for r in (found, [found[i] for i in kept]))
    twice = prefill_decode_table(pairs_of(opened), every=every)
    others = () if twice is None else (twice,)
    sections = (
        Section(tables=(whole, *others), lines=said, only="pages"),
        Section(tables=(part, *others), lines=(*more, *said), only="terminal"),
    )
    r = opened.record
    return Report(
        verdict,
        sections,
        command="compare",
        title=title_of(r),
        subtitle=subtitle(r),
        facts=facts_of(r),
        records=errors,
        folds=True,
    )


def _weight(row: tuple[str, ...]) -> tuple[bool, float]:
    """Return the key of what is shown first: what does not pass, then what leaves most."""
    passes = all(part.endswith(" pass") for part in row[8].split(", "))
    return passes, -float(row[4].removesuffix(" u") or 0.0)


Counts = Mapping[tuple[str, str], Mapping[str, int]]  # by phase and point, how many have each status


def _by_point(verdicts: Iterable[Verdict]) -> dict[tuple[str, str], Counter[str]]:
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for v in verdicts:
        found[v.phase, v.point][v.status] += 1
    return found


def _row_keys(opened: Opened) -> set[tuple[str, str]]:
    every = [one.record for one in opened.entries]
    return {(r.phase, p.name) for r in every for p in (*r.judged_points, *r.outputs)}


def _beside_rows(opened: Opened, verdicts: Counts) -> Iterator[str]:
    """Say how many verdicts are on no row: of positions seen twice, of a point that is not there, of a case."""
    keys = _row_keys(opened)
    rest = sum((Counter(n) for key, n in verdicts.items() if key not in keys), Counter[str]())
    if rest:
        yield f"Verdicts on no row: {_in_words(rest)} (precaudit gate lists them)."


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[s]:,} {s}" for s in STATUSES if counts.get(s))


def rows(opened: Opened, errors: Sequence[ErrorRecord], verdicts: Counts | None = None) -> list[tuple[str, ...]]:
    """Return a row of ``COLUMNS`` for every point and output that has any; ``verdicts``: those that are no pass."""
    by_point: dict[tuple[str, str], _Seen] = defaultdict(_Seen)
    for e in errors:
        by_point[e.phase, e.point].add(e)
    every = [one.record for one in opened.entries]
    found = []
    for r in every:
        for p in (*r.judged_points, *r.outputs):
            if (key := (r.phase, p.name)) not in by_point and verdicts is not None and key not in verdicts:
                continue  # it was not looked at
            seen = _judged(by_point[key], verdicts, key)
            found.append(_row(p, seen, f"{r.entry} {p.name}" if len(every) > 1 else p.name))
    return found


def _judged(found: "_Seen", verdicts: Counts | None, key: tuple[str, str]) -> "_Seen":
    """Return what was seen of a point with the gate's verdicts on it, where there are any."""
    if verdicts is None:
        return found
    passed = {"pass": found.verdicts["pass"]} if found.verdicts.get("pass") else {}
    return replace(found, verdicts={**passed, **verdicts.get(key, {})})


@dataclass
class _Seen:
    """A point's records as they stream by: verdicts, and the largest of each number; None where there is none."""

    verdicts: dict[str, int] = field(default_factory=dict)
    known: int = 0
    equal: int = 0
    local: float | None = None
    left: float | None = None
    forward: float | None = None
    ratio: float | None = None

    def add(self, e: ErrorRecord) -> None:
        if (v := judge(e, default_limits())) is not None:
            self.verdicts[v.status] = self.verdicts.get(v.status, 0) + 1
        if isinstance(e, LocalError) and e.unexplained is not None:
            self.known, self.equal = self.known + 1, self.equal + (value(e.unexplained.rel_l2) == 0.0)
            self.local, self.left = _more(self.local, value(e.rel_l2)), _more(self.left, value(e.unexplained.u))
        if isinstance(e, ForwardError) and e.ratio is not None:
            self.forward, self.ratio = _more(self.forward, value(e.rel_l2)), _more(self.ratio, value(e.ratio))


def _more(before: float | None, x: float) -> float:
    return x if before is None or x > before else before


def program_sentences(opened: Opened, errors: Sequence[ErrorRecord]) -> Iterator[str]:
    """Yield what a reader should take away."""
    yield from opened.record.warnings
    every = made = closed = unsteady = 0
    turned: dict[str, None] = {}
    narrow: dict[str, LocalError] = {}
    for e in of_kinds(errors, LocalError):
        if e.skipped is None:
            every, made = every + 1, made + (e.unknown is None and e.missing is None)
            closed += e.unexplained is not None and value(e.unexplained.rel_l2) == 0.0
            unsteady += e.unsteady > 0
            turned |= {e.point: None} if e.unsteady else {}
            _keep_narrow(narrow, e)
    of = "" if made == every else f"of {every} "
    yield (
        f"{made} {of}operations recomputed from recorded inputs, as the program's equations round: "
        f"{closed} are equal bit for bit. Forward: from the program in FP64, call after call; "
        "ratio: over the error of its rounding."
    )
    yield from _accumulation_lines(errors)
    if (twice := prefill_decode_sentence(pairs_of(opened))) is not None:
        yield twice
    yield from _narrow_sums(narrow)
    if unsteady:
        yield (
            f"Noise of {unsteady} records excludes samples in which a choice changed, such as a "
            f"comparison: {', '.join(turned)}."
        )
    yield from _tokens(errors)
    yield from _formula(errors)
    yield from _announcement_lines(opened, errors)
    for n in (n for one in opened.entries for n in one.record.neutrality):
        if not n.bitwise:
            yield f"Taps changed the outputs of {n.case} by up to {n.max_diff}."


def _formula(errors: Sequence[ErrorRecord]) -> Iterator[str]:
    """Say what the program's FP64 shadow was held against, at how many points, and where it first is another."""
    known = other = 0
    points: set[str] = set()
    largest, name, first = 0.0, "", None
    for e in of_kinds(errors, FormulaError):
        if e.rel_l2 is not None:
            name, known, largest = name or e.reference.partition(":")[0], known + 1, max(largest, value(e.rel_l2))
            points.add(e.point)
            if not value(e.rel_l2) <= SAME:
                first, other = first or e, other + 1
    what = "your function" if name == "reference" else f"the reference implementation of {name}"
    if not known:
        yield "Formula: not checked; compare with --model PATH, --map FILE or --reference NAME."
        return
    compared = f"Formula: compared with {what} at {count_text(len(points), 'point')}; in FP64 the program"
    if first is None:
        yield f"{compared} agrees, to {short(largest)} in {known} places."
    else:
        yield (
            f"{compared} differs: first at "
            f"{first.point}{'' if first.layer is None else f', step {first.layer}'} "
            f"({first.reference.rpartition(':')[2]}), by {digits(first.rel_l2)}; {other} of {known} places differ. "
            "Next: precaudit diagnose"
        )


def _announcement_lines(opened: Opened, errors: Sequence[ErrorRecord]) -> Iterator[str]:
    """Say how many operations are what the announced policy makes of them, or that no map showed any."""
    announced = opened.record.policy
    if announced is None:
        return
    statuses = Counter(v.status for e in of_kinds(errors, PolicyError) if (v := judge(e, default_limits())) is not None)
    name, every = announced["name"], statuses.total()
    if not every:
        yield f"Policy {name} is announced and compared with nothing: give a names map (--map)."
        return
    held = every - statuses["not run"]
    off = held - statuses["pass"]
    told = f"{off} of {held} operations do not" if off else f"{held} operations"
    rest = f"; {statuses['not run']} more are not judged: the map shows too little" if held < every else ""
    yield f"Policy {name}: {told} follow it on the recorded inputs{rest}."


def _row(p: ProgramPoint, found: _Seen, name: str) -> tuple[str, ...]:
    """Return a point's row of the table, under a name."""
    told = _in_words(found.verdicts)
    u = FORMATS[p.dtype].unit_roundoff
    local, left, equal, forward, size = "", "", "", "", ""
    in_u = ""
    if found.local is not None and found.left is not None:
        local, in_u = short(found.local), digits(found.local / u)
        left, equal = f"{digits(found.left)} u", f"{found.equal} of {found.known}"
    if found.forward is not None and found.ratio is not None:
        forward, size = short(found.forward), digits(found.ratio)
    return name, p.dtype, local, in_u, left, equal, forward, size, told, p.source


def _accumulation_lines(errors: Sequence[ErrorRecord]) -> Iterator[str]:
    """Say what sums of products in each emulated format would leave at most, and where."""
    worst: dict[str, ErrorRecord] = {}
    for e in of_kinds(errors, AccumulationError):
        if e.rel_l2 is not None and (e.candidate not in worst or value(e.rel_l2) > value(worst[e.candidate].rel_l2)):
            worst[e.candidate] = e
    each = [f"{name.removeprefix(SUMS)} {short(e.rel_l2)} ({e.point})" for name, e in worst.items()]
    if each:
        yield f"Products summed in another format would have errors up to these; they name no cause: {', '.join(each)}."


def _keep_narrow(worst: dict[str, LocalError], e: LocalError) -> None:
    """Keep the record of a point that is added up in a narrow format and is farthest off."""
    if OWN_SUMS in (e.elided or {}).get(EQUATIONS, ()) and (
        e.point not in worst or value(e.rel_l2) > value(worst[e.point].rel_l2)
    ):
        worst[e.point] = e


def _narrow_sums(worst: Mapping[str, LocalError]) -> Iterator[str]:
    """Say which points are added up in a narrow format, what that costs, and what to change."""
    for e in sorted(worst.values(), key=lambda e: -value(e.rel_l2))[:3]:
        kind = FORMATS[e.dtype or "bfloat16"]
        wide = kind.itemsize > 2  # it is the format of a conversion after the sum
        off = "" if wide else f", {roundoffs(value(e.rel_l2) / kind.unit_roundoff)} u"
        yield (
            f"{e.point} is summed term by term in {'16 bits' if wide else e.dtype}: error {short(e.rel_l2)}{off}; "
            "sum in float32 (x.astype(jnp.float32) before it is broadcast, or before the sum) and round once."
        )
    if len(worst) > 3:
        yield f"So {'is 1 point' if len(worst) == 4 else f'are {len(worst) - 3} points'} more."


def _tokens(errors: Sequence[ErrorRecord]) -> Iterator[str]:
    """Say how often the output named logits has FP64's top-1, and how far its distributions are."""
    rows = same = known = 0
    largest = -inf
    for d in (e.distribution for e in of_kinds(errors, ForwardError) if e.distribution is not None):
        rows, same = rows + len(d.top1), same + sum(x == 1.0 for x in d.top1)
        finite = [x for k in d.kl if isfinite(x := value(k))]
        known, largest = known + len(finite), max([largest, *finite])
    if rows:
        said = f"; largest KL {short(largest)}" if known else ""
        lost = f"; {rows - known} have none: logits are NaN or infinite" if known < rows else ""
        yield f"Logits: top-1 is FP64's in {same} of {rows} rows{said}{lost}."


def growth_sentences(errors: Sequence[ErrorRecord]) -> list[str]:
    """Return how the error of each point grows over its steps, jumps first, then the one that grows most."""
    sizes: dict[str, dict[tuple[int, int], array[float]]] = defaultdict(lambda: defaultdict(lambda: array("d")))
    for e in of_kinds(errors, ForwardError):
        if e.rel_l2 is not None and not e.nonfinite:
            name, _, occurrence = e.point.partition("#")
            sizes[name][int(occurrence or 0), e.layer or 0].append(value(e.rel_l2))
    told, stepped = [], {e.point.partition("#")[0] for e in of_kinds(errors, ForwardError) if e.layer is not None}
    for name, steps in sizes.items():
        each = [median(x) for _, x in sorted(steps.items())]
        if len(each) < LEAST or not each[0]:
            continue
        at = [f"{i} (× {rough(b / a)})" for i, (a, b) in enumerate(pairwise(each), 1) if a and b > JUMP * a]
        what = "step" if name in stepped else "occurrence"
        jumps = f", with a jump at {what} {', '.join(at)}" if at else ", without a jump"
        first, last = short(each[0]), short(each[-1])
        says = f"{name} has an error of {first} at its first {what}, {last} at its last of {len(each)}"
        told.append((not at, -each[-1] / each[0], f"{says} (relative, median){jumps}"))
    return [x[2] for x in sorted(told)]

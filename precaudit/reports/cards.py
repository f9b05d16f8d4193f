"""What a session shows of runs, errors, verdicts and findings: a few lines, or a small table in a notebook."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from precaudit.judging.rules import judge
from precaudit.judging.verdicts import STATUSES, Verdict, counts
from precaudit.reports.escaping import terminal
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place, spans
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord

if TYPE_CHECKING:
    from precaudit.checks.gradients.check import Checked
    from precaudit.checks.probing.probe import Probed
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.diagnosis.evidence.records import Finding
    from precaudit.diagnosis.programs import Diagnosed
    from precaudit.judging.judgement import Judgement
    from precaudit.recording.dumps.runs import Imported
    from precaudit.recording.programs.program import Program
    from precaudit.recording.runs.programs import Opened, ProgramErrors
    from precaudit.recording.runs.reader import Run
    from precaudit.recording.runs.written import Comparison
    from precaudit.recording.tracing.repeat import Repeat
    from precaudit.recording.tracing.subject import Subject
    from precaudit.references.comparison.between import Between

WIDE, NAMES, WORST = 110, 4, 3  # characters of a line, names that are listed, verdicts and findings that are shown
STYLE = "text-align:left"


class Card(NamedTuple):
    """A title, facts by name, and rows below them."""

    title: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[str, ...] = ()


def text(x: Any) -> str:
    """Return a value as ten lines of text at most."""
    card = _card(x)
    lines = [card.title, *(f"  {name}: {told}" for name, told in card.facts), *(f"  - {row}" for row in card.rows)]
    return "\n".join(_short(terminal(line)) for line in lines)


def html(x: Any) -> str:
    """Return a value as a small HTML table."""
    card = _card(x)
    head = f'<tr><th colspan="2" style="{STYLE}">{_cell(card.title)}</th></tr>'
    facts = [
        f'<tr><td style="{STYLE}">{_cell(name)}</td><td style="{STYLE}">{_cell(told)}</td></tr>'
        for name, told in card.facts
    ]
    rows = [f'<tr><td colspan="2" style="{STYLE}">{_cell(row)}</td></tr>' for row in card.rows]
    return f"<table>{''.join((head, *facts, *rows))}</table>"


def _card(x: Any) -> Card:
    """Return the card of our class that a value is of, whatever a subclass is called."""
    ours = (kind.__name__ for kind in type(x).__mro__ if kind.__module__.partition(".")[0] == "precaudit")
    return next(CARDS[name] for name in ours if name in CARDS)(x)


def _cell(text: str) -> str:
    return escape(_short(terminal(text), 2 * WIDE))


def _short(line: str, most: int = WIDE) -> str:
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _named(names: Sequence[str]) -> str:
    """Return how many there are and the first few."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{len(names)}: {', '.join(names[:NAMES])}{more}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _run(run: "Run") -> Card:
    r, asked = run.record, run.record.requested
    cut = "" if r.finished else " (cut off)"
    return Card(
        f"Run {r.id} of {r.model.id}, policy {r.policy.get('name', '')}, {r.device}{cut}",
        (
            ("prompts", _named(asked.prompts)),
            ("layers", f"{spans(asked.layers)} of {r.model.config.get('layers', '?')}"),
            ("points", _named(asked.points)),
            ("phases", f"{', '.join(asked.phases)}; {asked.decode_steps} decode steps"),
            ("tensors", f"{len(run.points):,}, {_size(r.bytes)}"),
            ("folder", str(run.folder)),
        ),
    )


def _opened(run: "Opened") -> Card:
    r = run.record
    return Card(
        f"Run {r.id} of the program {r.program or '(unnamed)'}, {r.device}",
        (
            ("cases", f"{_named(r.cases)}; {r.calls} calls each"),
            ("points", _named([p.name for p in r.judged])),
            ("outputs", _named([p.name for p in r.outputs]) if r.outputs else "none is named"),
            ("tensors", _size(r.bytes)),
            ("folder", str(run.folder)),
        ),
    )


def _imported(run: "Imported") -> Card:
    r = run.record
    cases = list(dict.fromkeys([t.prompt for t in r.tensors] or r.tokens))
    facts = (("cases", _named(cases)), ("tensors", f"{len(r.tensors):,}"), ("folder", str(run.folder)))
    return Card(f"Run {r.id}, imported from {r.source}", facts)


def _kinds(errors: Iterable[ErrorRecord]) -> str:
    return ", ".join(f"{n:,} {kind}" for kind, n in Counter(e.kind for e in errors).most_common()) or "none"


def _tally(verdicts: Iterable[Verdict]) -> str:
    return ", ".join(f"{n:,} {status}" for status, n in counts(verdicts).items())


def _verdict(v: Verdict) -> str:
    """Return a verdict in a line: what, where, and the number that is over its limit."""
    told = v.text
    if v.metric and v.value is not None and v.limit is not None:
        told = f"{v.metric} {value(v.value):.3g} at {v.scope or 'tensor'}, limit {value(v.limit):.3g}"
    return f"{v.status}: {Place.of(v).text} [{v.kind}] {told}".rstrip()


def _judged(title: str, errors: Sequence[ErrorRecord], more: Iterable[tuple[str, str]]) -> Card:
    """Return the card of error records, each by the default rule."""
    found = [v for e in errors if (v := judge(e, default_limits())) is not None]
    bad = [v for v in found if v.status not in ("pass", "not run")]
    bad.sort(key=lambda v: (STATUSES.index(v.status), v.depth))
    facts = [("records", _kinds(errors))]
    facts += [("by default limits", _tally(found) or "nothing to judge"), *more]
    return Card(title, tuple(facts), _worst([_verdict(v) for v in bad]))


def _worst(lines: Sequence[str]) -> tuple[str, ...]:
    more = (f"and {len(lines) - WORST:,} more",) if len(lines) > WORST else ()
    return (*lines[:WORST], *more)


def _comparison(found: "Comparison") -> Card:
    r = found.run.record
    if found.against is not None:
        return _pairs(f"Run {r.id} against run {found.against.record.id}", found.errors, found.notes)
    pairs = found.prefill_decode
    same = ("prefill and decode", f"top-1 equal at {sum(p.match for p in pairs)} of {len(pairs)} positions")
    return _judged(f"Errors of run {r.id}", found.errors, [*([same] if pairs else []), *_notes(found.notes)])


def _notes(notes: Sequence[str]) -> list[tuple[str, str]]:
    return [("notes", f"{len(notes)}: {notes[0]}")] if notes else []


def _program_errors(errors: "ProgramErrors") -> Card:
    return _judged(f"Errors of run {errors.opened.record.id}", errors, ())


def _between(found: "Between") -> Card:
    return _pairs(f"Two runs, records in {found.folder}", found.errors, found.notes)


def _pairs(title: str, errors: Sequence[ErrorRecord], notes: Sequence[str]) -> Card:
    """Return the card of a run against another: how many tensors differ, and the farthest."""
    known = [e for e in errors if e.numberless is None]
    differ = [e for e in known if e.nonfinite or value(e.rel_l2) != 0.0]
    facts = [("records", _kinds(errors)), ("differ", f"{len(differ):,} of {len(known):,} tensors")]
    if len(known) < len(errors):
        facts.append(("without numbers", f"{len(errors) - len(known):,}"))
    far = sorted(differ, key=lambda e: (-e.nonfinite, -value(e.rel_l2)))
    told = [f"{Place.of(e).text}: {value(e.rel_l2):.2g} off{', NaN or infinity' * bool(e.nonfinite)}" for e in far]
    return Card(title, (*facts, *_notes(notes)), _worst(told))


def _judgement(j: "Judgement") -> Card:
    tally = ", ".join(f"{n:,} {status}" for status, n in j.counts.items()) or "nothing was judged"
    facts = [("verdicts", tally), ("exit code", str(j.exit_code)), *_notes(j.notes)]
    return Card(f"Judgement of {j.name}", tuple(facts), _worst([_verdict(v) for v in j.verdicts]))


def _findings(title: str, findings: Sequence["Finding"], unknown: Sequence[str], more: tuple[str, str]) -> Card:
    n = len(findings)
    facts = [("findings", str(n) if n else "none"), more]
    if unknown:
        facts.append(("unknown", f"{len(unknown)}: {unknown[0]}"))
    return Card(title, tuple(facts), _worst([_finding(f) for f in findings]))


def _finding(f: "Finding") -> str:
    where = f.point if f.layer is None else f"layer {f.layer} {f.point}"
    return f"{f.kind} at {where}: {f.says}"


def _diagnosis(found: "Diagnosis") -> Card:
    judged = ("judged", f"{found.judged:,} records")
    return _findings(f"Diagnosis of run {found.compared.run.record.id}", found.findings, found.unknown, judged)


def _diagnosed(found: "Diagnosed") -> Card:
    explained = ("explained by rounding", f"{found.explained:,} records")
    return _findings("Diagnosis of a program's run", found.findings, found.unknown, explained)


def _program(p: "Program") -> Card:
    name = getattr(p.call, "__name__", type(p.call).__name__)
    facts = [("cases", _named(list(p.cases))), ("calls", str(p.steps + 1))]
    return Card(f"Program {name}", (*facts, ("outputs", str(p.outputs or "none is named"))))


def _subject(s: "Subject") -> Card:
    c = s.config
    facts = (("layers", str(c.layers)), ("parameters", f"{c.parameters / 1e6:,.1f} M"), ("device", str(s.device)))
    return Card(f"{s.checkpoint.name}, policy {s.policy.name}", facts)


def _repeat(r: "Repeat") -> Card:
    same = f"all {r.tensors:,} tensors are bit-identical" if r.first is None else f"{r.differing:,} tensors differ"
    first = () if r.first is None else (("first", Place.of(r.first).text),)
    return Card(f"Run {r.run.record.id}, recorded once more: {same}", (*first, ("folder", str(r.run.folder))))


def _checked(c: "Checked") -> Card:
    told = ", ".join(f"{n} {status}" for status, n in c.counts.items())
    facts = (("cases", _named(c.cases)), ("arrays", told or "none"), ("exit code", str(c.exit_code)))
    return Card(f"Kernel {c.name} and its reference against FP64", facts, c.conclusions[:WORST])


def _probed(p: "Probed") -> Card:
    shapes = list(dict.fromkeys(r.prompt for r in p.records))
    taken = sum(r.unknown is None for r in p.records)
    replaced = sum(r.honoured == "replaced" for r in p.records)
    facts = (
        ("shapes", _named(shapes)), ("products", f"{taken:,} of {len(p.records):,} are taken"),
        ("replaced", f"{replaced:,}"), ("exit code", str(p.exit_code)),
    )  # fmt: skip
    bad = () if p.judgement is None else p.judgement.verdicts[:WORST]
    return Card(f"Products of attention scores on {p.device}", facts, tuple(map(_verdict, bad)))


CARDS: dict[str, Callable[[Any], Card]] = {
    "Run": _run, "Opened": _opened, "Imported": _imported, "Comparison": _comparison, "Between": _between,
    "ProgramErrors": _program_errors, "Judgement": _judgement, "Diagnosis": _diagnosis, "Diagnosed": _diagnosed,
    "Program": _program, "Subject": _subject, "Repeat": _repeat, "Checked": _checked,
    "Probed": _probed,
}  # fmt: skip

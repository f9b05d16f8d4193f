"""What a session shows of runs, errors, verdicts and findings: a few lines, or a small table in a notebook."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from precaudit.diagnosis.sameness.records import SameFormula
from precaudit.judging.gate import judge_found
from precaudit.judging.judgement import Judgement
from precaudit.numbers.bytes_text import bytes_text
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.served import ServedModel
from precaudit.recording.runs.bits import Repeat
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison
from precaudit.reports.escaping import terminal_line
from precaudit.reports.judgement import tally, verdict_message
from precaudit.reports.sameness import parting_text, worst_case
from precaudit.schema.digits import digits
from precaudit.schema.places import Place, spans
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord

if TYPE_CHECKING:
    from precaudit.checks.gradients.check import Checked
    from precaudit.checks.probing.probe import Probed
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.diagnosis.evidence.records import Finding
    from precaudit.diagnosis.programs import Diagnosed
    from precaudit.recording.tracing.subject import Subject

WIDE, NAMES, WORST = 110, 4, 3  # characters of a line, names that are listed, verdicts and findings that are shown
STYLE = "text-align:left"


class Card(NamedTuple):
    """A title, facts by name, and rows below them."""

    title: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[str, ...] = ()


def card_text(x: object) -> str:
    """Return a value as ten lines of text at most."""
    card = card_of(x)
    lines = [card.title, *(f"  {name}: {told}" for name, told in card.facts), *(f"  - {row}" for row in card.rows)]
    return "\n".join(_short(terminal_line(line)) for line in lines)


def card_table(x: object) -> str:
    """Return a value as a small HTML table."""
    card = card_of(x)
    head = f'<tr><th colspan="2" style="{STYLE}">{_cell(card.title)}</th></tr>'
    facts = [
        f'<tr><td style="{STYLE}">{_cell(name)}</td><td style="{STYLE}">{_cell(told)}</td></tr>'
        for name, told in card.facts
    ]
    rows = [f'<tr><td colspan="2" style="{STYLE}">{_cell(row)}</td></tr>' for row in card.rows]
    return f"<table>{''.join((head, *facts, *rows))}</table>"


@singledispatch
def card_of(x: object) -> Card:
    """Return the card of a value by its type; those of types that load JAX are known once one of them is shown."""
    _register_others()
    made = card_of.dispatch(type(x))
    if made is card_of.dispatch(object):
        raise TypeError(f"{type(x).__name__} has no card")
    return made(x)


def _cell(text: str) -> str:
    return escape(_short(terminal_line(text), 2 * WIDE))


def _short(line: str, most: int = WIDE) -> str:
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _names_text(names: Sequence[str]) -> str:
    """Return how many there are and the first few."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{len(names)}: {', '.join(names[:NAMES])}{more}"


@card_of.register
def _run(run: Run) -> Card:
    r, asked = run.record, run.record.requested
    cut = "" if r.finished else " (cut off)"
    return Card(
        f"Run {r.id} of {r.model.id}, policy {r.policy.get('name', '')}, {r.device}{cut}",
        (
            ("prompts", _names_text(asked.prompts)),
            ("layers", f"{spans(asked.layers)} of {r.model.config.get('layers', '?')}"),
            ("points", _names_text(asked.points)),
            ("phases", f"{', '.join(asked.phases)}; {asked.decode_steps} decode steps"),
            ("tensors", f"{len(run.points):,}, {bytes_text(r.bytes)}"),
            ("folder", str(run.folder)),
        ),
    )


@card_of.register
def _program_run_card(run: Opened) -> Card:
    r = run.record
    return Card(
        f"Run {r.id} of the program {r.program or '(unnamed)'}, {r.device}",
        (
            ("cases", f"{_names_text(r.cases)}; {r.every_calls} each"),
            ("points", _names_text([p.name for p in r.judged_points])),
            ("outputs", _names_text([p.name for p in r.outputs]) if r.outputs else "none is named"),
            ("tensors", bytes_text(r.bytes)),
            ("folder", str(run.folder)),
        ),
    )


@card_of.register
def _import_card(run: Imported) -> Card:
    r = run.record
    cases = list(dict.fromkeys([t.prompt for t in r.tensors] or r.tokens))
    facts = (("cases", _names_text(cases)), ("tensors", f"{len(r.tensors):,}"), ("folder", str(run.folder)))
    return Card(f"Run {r.id}, imported from {r.source}", facts)


def _kinds(errors: Iterable[ErrorRecord]) -> str:
    return ", ".join(f"{n:,} {kind}" for kind, n in Counter(e.kind for e in errors).most_common()) or "none"


def _judgement_card(title: str, errors: Sequence[ErrorRecord], j: Judgement, more: Iterable[tuple[str, str]]) -> Card:
    """Return the card of error records: what the gate says of them."""
    facts = (("records", _kinds(errors)), ("verdicts", tally(j)), *more)
    return Card(title, facts, _worst([verdict_message(v) for v in j.verdicts if v.status != "not run"]))


def _worst(lines: Sequence[str]) -> tuple[str, ...]:
    more = (f"and {len(lines) - WORST:,} more",) if len(lines) > WORST else ()
    return (*lines[:WORST], *more)


@card_of.register(Comparison)
def _comparison(found: Comparison[Any]) -> Card:
    r = found.run.record
    if found.against is not None:
        return _pairs(f"Run {r.id} against run {found.against.record.id}", found.errors, found.notes)
    pairs = found.prefill_decode
    title = f"Errors of run {r.id}"
    same = ("prefill and decode", f"top-1 equal at {sum(p.match for p in pairs)} of {len(pairs)} positions")
    return _judgement_card(title, found.errors, judge_found(found), [*([same] if pairs else []), *_notes(found.notes)])


def _notes(notes: Sequence[str]) -> list[tuple[str, str]]:
    return [("notes", f"{len(notes)}: {notes[0]}")] if notes else []


def _pairs(title: str, errors: Sequence[ErrorRecord], notes: Sequence[str]) -> Card:
    """Return the card of a run against another: how many tensors differ, and the farthest."""
    known = [e for e in errors if e.numberless is None]
    differ = [e for e in known if e.nonfinite or value(e.rel_l2) != 0.0]
    facts = [("records", _kinds(errors)), ("differ", f"{len(differ):,} of {len(known):,} tensors")]
    if len(known) < len(errors):
        facts.append(("without numbers", f"{len(errors) - len(known):,}"))
    far = sorted(differ, key=lambda e: (-e.nonfinite, -value(e.rel_l2)))
    told = [
        f"{Place.of(e).text}: differs by {digits(e.rel_l2, 2)}{', NaN or infinity' * bool(e.nonfinite)}" for e in far
    ]
    return Card(title, (*facts, *_notes(notes)), _worst(told))


@card_of.register
def _judgement(j: Judgement) -> Card:
    facts = [("verdicts", tally(j)), ("exit code", str(j.exit_code)), *_notes(j.notes)]
    return Card(f"Judgement of {j.name}", tuple(facts), _worst([verdict_message(v) for v in j.verdicts]))


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


def _diagnosis_card(found: "Diagnosed") -> Card:
    explained = ("explained by rounding", f"{found.explained:,} records")
    return _findings("Diagnosis of a program's run", found.findings, found.unknown, explained)


@card_of.register
def _program(p: Program) -> Card:
    name = getattr(p.call, "__name__", type(p.call).__name__)
    each = [str(p.steps + 1), *(f"then {e.steps + 1} of {entry}" for entry, e in p.then.items())]
    facts = [("cases", _names_text(list(p.cases))), ("calls", ", ".join(each))]
    return Card(f"Program {name}", (*facts, ("outputs", str(p.outputs or "none is named"))))


@card_of.register
def _model(model: ServedModel) -> Card:
    s = cast("Subject", model)
    c = s.config
    facts = (("layers", str(c.layers)), ("parameters", f"{c.parameters / 1e6:,.1f} M"), ("device", str(s.device)))
    return Card(f"{s.checkpoint.name}, policy {s.policy.name}", facts)


@card_of.register
def _repeat_card(r: Repeat) -> Card:
    same = f"all {r.tensors:,} tensors are bit-identical" if r.where is None else f"{r.differing:,} tensors differ"
    first = () if r.where is None else (("first", r.where),)
    return Card(f"Run {r.run.record.id}, recorded once more: {same}", (*first, ("folder", str(r.run.folder))))


def _gradcheck_card(c: "Checked") -> Card:
    told = ", ".join(f"{n} {status}" for status, n in c.counts.items())
    facts = (("cases", _names_text(c.cases)), ("arrays", told or "none"), ("exit code", str(c.exit_code)))
    return Card(f"Kernel {c.name} and its reference against FP64", facts, c.conclusions[:WORST])


def _probe_card(p: "Probed") -> Card:
    shapes = list(dict.fromkeys(r.shape for r in p.records))
    taken = sum(r.unknown is None for r in p.records)
    replaced = sum(r.honoured == "replaced" for r in p.records)
    facts = (
        ("shapes", _names_text(shapes)),
        ("products", f"{taken:,} of {len(p.records):,} are taken"),
        ("replaced", f"{replaced:,}"),
        ("exit code", str(p.exit_code)),
    )
    bad = () if p.judgement is None else p.judgement.verdicts[:WORST]
    return Card(f"Products of attention scores on {p.device}", facts, tuple(map(verdict_message, bad)))


@card_of.register
def _sameness_card(found: SameFormula) -> Card:
    worst = worst_case(found.cases)
    facts = (("case", worst.case), ("exit code", str(found.exit_code)))
    return Card(f"{' and '.join(worst.programs)} {worst.says}", facts, tuple(map(parting_text, worst.partings)))


def _register_others() -> None:
    """Register the cards of values that no session without JAX holds, or whose modules take long to import."""
    from precaudit.checks.gradients.check import Checked
    from precaudit.checks.probing.probe import Probed
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.diagnosis.programs import Diagnosed

    cards: dict[type, Any] = {
        Diagnosis: _diagnosis,
        Diagnosed: _diagnosis_card,
        Checked: _gradcheck_card,
        Probed: _probe_card,
    }
    for kind, made in cards.items():
        card_of.register(kind)(made)

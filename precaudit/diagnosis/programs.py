"""Findings of a program's run: formulas that are not the textbook's, by name, and segments that nothing explains."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import msgspec

from precaudit.diagnosis.beside import beside_textbook, combine
from precaudit.diagnosis.caches import name_cache
from precaudit.diagnosis.diagnose import check_objective
from precaudit.diagnosis.entry_views import view_findings
from precaudit.diagnosis.evidence.effects import Effects, effects
from precaudit.diagnosis.evidence.held import StatedCause, held_cause
from precaudit.diagnosis.evidence.inside import formats_inside, inside_findings, inside_sentence
from precaudit.diagnosis.evidence.records import Finding, findings_frame
from precaudit.diagnosis.named import UNNAMED, NamedOperation
from precaudit.diagnosis.naming import name_formula
from precaudit.diagnosis.padding_read import padding_read
from precaudit.diagnosis.unwritten import unwritten
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.interpreters.jaxpr.shadow import CannotLift, refusal
from precaudit.judging.looks import Look
from precaudit.judging.pooled import METRICS, pooled_verdicts
from precaudit.judging.programs import absent_cases, suspect, unpaired_views, was_compared, with_indices
from precaudit.judging.rules import judge, judge_pair
from precaudit.judging.verdicts import OVERFLOW, Verdict, never_run
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance, silent
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.loading import program_of
from precaudit.recording.programs.program import OUTPUT_LOGITS, Program
from precaudit.recording.runs.compared_programs import marks_of, pairs_of, program_errors
from precaudit.recording.runs.programs import Opened
from precaudit.references.alignment.textbook import beside_model
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.comparison.programs import compare_program
from precaudit.references.entry_textbooks import entry_textbooks
from precaudit.references.formula import Shown, read_shown, with_slots
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.mutations.declared import place_names
from precaudit.references.names_map import Names
from precaudit.references.textbook.pieces import Execution
from precaudit.references.traced.forward import Chains, NotChained, recorded_calls
from precaudit.schema.brief import Brief
from precaudit.schema.digits import digits
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place, calls_text
from precaudit.schema.records.base import json_number, value
from precaudit.schema.records.errors import ErrorRecord, LocalError
from precaudit.schema.records.lines import write_lines


class FailedOperation(NamedTuple):
    """An operation that is not the textbook's: the verdict on it, what shows it, and the cause."""

    verdict: Verdict
    pair: Pair
    named: NamedOperation


@dataclass(frozen=True, repr=False)
class Diagnosed(Brief):
    """The findings of a program's run in its order, what was not told, and how many records rounding explains.

    ``notes``: what is not as the textbook has it and within rounding, with its price; no finding.
    """

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    explained: int
    effects: Effects = field(default_factory=Effects)
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 a finding stands, 3 something is unknown or nothing was judged, 0 otherwise."""
        return 1 if self.findings else 3 if self.unknown or not self.explained else 0

    def frame(self) -> Any:
        """Return the findings as a pandas DataFrame, always with the same columns."""
        return findings_frame(self.findings)


def diagnose_program(
    opened: Opened,
    program: Program | str | None = None,
    tell: Advance = silent,
    objective: str | None = None,
    look: Look | None = None,
    model: str | None = None,
) -> Diagnosed:
    """Return the findings of a program's run, and write them beside it; compares it first where that was not done.

    ``look``: of some layers, points and cases alone; ``model``: held against the textbook of that model, by values.
    ``objective``: also what changed its outputs, and what its lines gain in float32; of logits as ``shares`` takes it.
    Raises UserError for an objective that is none, or where the program or its textbook's files are others than those
    that were traced and compared.
    """
    if objective is not None:
        outputs = (p for one in opened.entries for p in one.record.outputs)
        logits = next((p for p in outputs if p.name == OUTPUT_LOGITS), None)
        check_objective(objective, logits.shape[-1] if logits is not None and logits.shape else 0)
    program, names = beside_model(opened, program, None, model, tell)
    asked, holds = None if names is None else names.record(), None if look is None else look.holds
    if not was_compared(opened, asked, holds=holds):
        compare_program(opened, program, names, Execution(tell=tell), holds=holds)
    errors = program_errors(opened)
    judged = never_run(
        (v for e in errors if (v := judge(e, default_limits())) is not None),
        {e.point for e in errors if e.skipped is None},
    )
    verdicts = list(with_indices(suspect([*judged, *pooled_verdicts(errors, default_limits())], errors), opened))
    passed = sum(v.status == "pass" for v in verdicts)
    if look is not None:
        verdicts, errors = list(filter(look.holds, verdicts)), look.of(errors)
        passed = sum((v := judge(e, default_limits())) is not None and v.status == "pass" for e in errors)
    bad = [v for v in verdicts if v.status in ("fail", "nonfinite")]
    known = Names.of(given) if (given := marks_of(opened).names) else None
    off = ("fail", "nonfinite", "input suspect")
    formula = [v for v in verdicts if v.kind == "formula" and v.status in off]
    findings: list[Finding] = []
    noted: list[str] = []
    for one in _entries(opened, program, known):
        phase = one.opened.record.phase
        its = [e for e in errors if e.phase == phase]
        broken, wrong = ([v for v in every if v.phase == phase] for every in (bad, formula))
        named = list(_against(wrong)) if known is None else _beside(one, wrong, broken, tell)
        inside, points = formats_inside(its), one.opened.record.points
        segments = [f for f in _segments(one.opened, broken, its) if not any(_explains(n, f) for n in named)]
        findings += [*(n.finding for n in named), *segments, *inside_findings(inside, points)]
        noted += [inside_sentence(narrow, points) for narrow in inside if not narrow.beyond]
    pairs = pairs_of(opened) if look is None else []
    findings += view_findings(opened, pairs, findings, partial(program_of, opened, program))
    passed += sum(judge_pair(p).status == "pass" for p in pairs)
    if bad and not findings:
        worst = bad[0]
        single = [v for v in bad if v.metric not in METRICS]
        what = f"{len(single)} {worst.kind} records fail" if single else f"{worst.kind} errors fail {worst.text}"
        says = f"{what}, and no recorded operation or formula does"
        findings = [finding(StatedCause("unknown", UNNAMED, says), worst.point, bad, worst.rel_l2)]
    write_lines(opened.folder / "findings.jsonl", findings)
    unknown = [v for v in verdicts if v.status in ("unknown", "missing")]
    unknown += unpaired_views(opened) if look is None else ()
    unknown += [v for v in absent_cases(opened) if look is None or look.holds(v)]
    told = (f"{len(unknown)} records are unknown, first {_where(unknown[0])}: {unknown[0].text}",) if unknown else ()
    effect = Effects() if objective is None else _effects(opened, program, objective, tell)
    return Diagnosed(tuple(findings), told, passed, effect, tuple(noted))


def _where(v: Verdict) -> str:
    return v.point or f"case {v.prompt}"


class Part(NamedTuple):
    """An entry point of a run, its program with taps, and the textbook beside which causes are looked for."""

    opened: Opened
    of: OfRun | None = None
    book: MappedTextbook | None = None


def _entries(opened: Opened, program: Program | str | None, names: Names | None) -> Iterator[Part]:
    """Yield the entry points of a run, with their programs and textbooks where causes are looked for beside these."""
    if names is None:
        yield from (Part(one) for one in opened.entries)
        return
    found = program_of(opened, program)
    entries = traced_entries(opened, found)
    books = entry_textbooks(names, entries, found)
    yield from (Part(one.opened, one, book) for one, book in zip(entries, books, strict=True))


def _effects(opened: Opened, program: Program | str | None, objective: str, tell: Advance) -> Effects:
    """Return what changed the outputs and what would help; not told where the program may not or cannot be run."""
    try:
        last = traced_entries(opened, program_of(opened, program))[-1]
        with without_mesh():
            return effects(*last, objective, tell)
    except UserError as error:
        return Effects(unknown=str(error))


def _segments(opened: Opened, bad: Sequence[Verdict], errors: Sequence[ErrorRecord]) -> Iterator[Finding]:
    """Yield one finding for every point whose own segment leaves more than its equations' rounding."""
    points = {p.name: p for p in opened.record.points}
    source, calls = {name: p.source for name, p in points.items()}, opened.record.calls
    known = {Place.of(e): t for e in of_kinds(errors, LocalError) if (t := held_cause(e, points[e.point])) is not None}
    exactly = {Place.of(e) for e in of_kinds(errors, LocalError) if e.fp64_too}
    found: dict[str, list[Verdict]] = {}
    for v in bad:
        if v.kind == "local" and v.metric != "price":
            found.setdefault(v.point, []).append(v)
    for point in dict.fromkeys(v.point for v in bad if v.kind == "state"):
        its = [v for v in bad if v.kind == "state" and v.point == point]
        off = sum(int(value(v.value or 0.0)) for v in its)
        says = f"{off:,} choices are not those of the recorded values, by more than rounding: {point}"
        yield finding(StatedCause("state", "another choice", says), point, its, None, calls)
    for point, its in found.items():
        arises = next((v for v in its if v.metric in ("nonfinite", OVERFLOW) and v.text), None)
        if arises is not None:
            kind: Any = "semantics" if arises.place in exactly else "format"
            why = StatedCause(kind, arises.text.partition(":")[0], arises.text)
            yield finding(why, point, its, arises.rel_l2, calls)
            continue
        if (cause := next((known[v.place] for v in its if v.place in known), None)) is not None:
            yield finding(cause, point, its, its[0].rel_l2, calls)
            continue
        worst = max(its, key=lambda v: value(v.value) if v.value is not None else float("inf"))
        at = list(worst.index) if isinstance(worst.index, tuple) else worst.index
        limit = "" if worst.limit is None else f" of at most {digits(worst.limit)}"
        says = (
            "it has NaN or infinity, and no operation was found that makes it"
            if worst.status == "nonfinite"
            else f"its equations' rounding does not explain {worst.metric} {digits(worst.value or 0.0)}{limit} "
            f"{f'of the {worst.scope}' if at is None else f'at {worst.scope} {at}'}, from recorded inputs"
        )
        why = StatedCause("unknown", UNNAMED, f"{says} ({source.get(point, '')})")
        yield finding(why, point, its, worst.rel_l2, calls)


class Shows(NamedTuple):
    """A finding, and the places of the program, point and step, whose values show it."""

    finding: Finding
    places: frozenset[tuple[str, int | None]] = frozenset()


def _explains(named: Shows, segment: Finding) -> bool:
    """Whether a cause that is named beside the textbook is what a segment without one fails by."""
    return named.finding.cause != UNNAMED and (segment.point, segment.layer) in named.places


def _against(formula: Sequence[Verdict]) -> Iterator[Shows]:
    """Yield one finding for every formula record that leaves a reference of the user's first."""
    for v in formula:
        if v.status != "input suspect":
            says = "in FP64 the program differs from the reference; its formula is not known"
            yield Shows(finding(StatedCause("semantics", UNNAMED, says), v.point, [v], v.rel_l2))


def _beside(part: Part, formula: Sequence[Verdict], bad: Sequence[Verdict], tell: Advance) -> list[Shows]:
    """Return what an entry point does otherwise than the textbook, in its formulas and in what it recorded."""
    assert part.of is not None
    assert part.book is not None
    (opened, found, made), book = part.of, part.book
    with without_mesh():
        causes = list(_name_operations(opened, book, Chains(found, made), formula, tell))
    return [Shows(f, _places(book, f)) for f in combine(causes, beside_textbook(opened, book, bad))]


def _places(book: MappedTextbook, f: Finding) -> frozenset[tuple[str, int | None]]:
    whole, layers = POINTS[f.point].whole, {f.layer, *f.layers}
    its = (p for p in book.pairs if POINTS[p.point].whole == whole and p.layer in layers)
    return frozenset((p.shown.name, p.step) for p in its)


def _name_operations(
    opened: Opened, book: MappedTextbook, chains: Chains, formula: Sequence[Verdict], tell: Advance
) -> Iterator[Finding]:
    """Yield one finding for every cause of operations that are not the textbook's on the program's own inputs."""
    causes: dict[str, list[FailedOperation]] = {}
    for i, case in enumerate(dict.fromkeys(v.prompt for v in formula)):
        tell(i, len(opened.record.cases), f"{case}: causes")
        beside = with_slots(opened, book, case, read_shown(opened, book, case, _exact(opened, chains, case)))
        known: dict[Pair, NamedOperation | None] = {}
        for v in (v for v in formula if v.prompt == case):
            pair = next((p for p in book.pairs if (p.shown.name, p.step) == (v.point, v.layer)), None)
            if pair is None:
                raise UserError(f"{book.where}: the map is not the one compare had: it has no {v.point!r}")
            if pair not in known:
                known[pair] = _cause(book, beside, pair, v)
            if (one := known[pair]) is not None:
                causes.setdefault(one.cause, []).append(FailedOperation(v, one.pair or pair, one))
    for its in causes.values():
        first = its[0]
        says = f"{first.named.says}: {place_names([c.pair for c in its])}"
        made_finding = finding(
            StatedCause(first.named.kind, first.named.cause, says),
            first.pair.point,
            [c.verdict for c in its],
            first.verdict.rel_l2,
            opened.record.calls,
        )
        layers = tuple(sorted({c.pair.layer for c in its if c.pair.layer is not None}))
        explained = json_number(1 - first.named.left**2)
        yield msgspec.structs.replace(made_finding, layer=first.pair.layer, layers=layers, explained=explained)


def _cause(book: MappedTextbook, beside: Shown, pair: Pair, v: Verdict) -> NamedOperation | None:
    """Return what makes the program's values of a cache or an operation; None where the textbook does."""
    suspect = v.status == "input suspect"
    if pair in beside.caches:
        return name_cache(book, beside, pair, suspect, v.prompt)
    stated = unwritten(book, beside, pair) or padding_read(book, beside, pair)
    return stated or name_formula(book, beside, pair, suspect)


def finding(why: StatedCause, point: str, its: Sequence[Verdict], rel_l2: object, calls: int = 1) -> Finding:
    """Return a finding that verdicts rest on; ``calls``: of the run, which of them it is in is said."""
    says = ", ".join(filter(None, (why.says, calls_text((v.step for v in its), calls))))
    return msgspec.convert(
        {
            "kind": why.kind,
            "cause": why.cause,
            "says": says,
            "layer": its[0].layer,
            "point": point,
            "layers": tuple(sorted({v.layer for v in its if v.layer is not None})),
            "phases": tuple(dict.fromkeys(v.phase for v in its)),
            "prompts": tuple(dict.fromkeys(v.prompt for v in its)),
            "records": len(its),
            "rel_l2": rel_l2,
            "explained": None,
            "equal": None,
            "second": None,
            "worst": None,
        },
        Finding,
    )


def _exact(opened: Opened, chains: Chains, case: str) -> list[Mapping[str, Array]]:
    """Return every call's FP64 values of a case, as far as the program goes in FP64."""
    found: list[Mapping[str, Array]] = []
    try:
        with jax.enable_x64(True):
            for reference in chains.calls(recorded_calls(opened, case), drawn=0):
                found.append(reference.exact)  # what came before an exception is kept
    except (CannotLift, NotImplementedError, NotChained) as error:
        if not found:
            raise UserError(
                f"{opened.folder}: {case}: no call in FP64 any more: {refusal(error)}; compare again"
            ) from None
    return found

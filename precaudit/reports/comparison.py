"""The report of a comparison: for a terminal one screen of evidence, for a page every layer and point."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison
from precaudit.reports.diagnosis import findings_section
from precaudit.reports.differences import difference_sentences
from precaudit.reports.fitting import Table
from precaudit.reports.gathered import Gathered
from precaudit.reports.headline import headline
from precaudit.reports.program import program_report
from precaudit.reports.provenance import facts_of, subtitle, title
from precaudit.reports.report import Headline, Report, Section
from precaudit.reports.summary import comparison_sentences
from precaudit.reports.tables import (
    accumulation,
    detail,
    pair_by_point,
    pair_table,
    prefill_decode_table,
    reported_table,
)
from precaudit.reports.tokens import quote_tokens, top_tokens
from precaudit.reports.worst import by_point, explained_by, largest, matrices, top1_disagreements
from precaudit.schema.filed import of_kinds
from precaudit.schema.places import Place
from precaudit.schema.records.errors import PairError

if TYPE_CHECKING:
    from precaudit.recording.opening import AnyRun

LEGEND = "d decode step, r rescore position, t position, h head. What a word means: precaudit explain excess"
NOTES = 3  # the rest are counted
TIES = 5  # positions listed where views part


def comparison_report(
    found: Comparison[Run], verdict: Headline | None = None, verbose: bool = False, every: bool = False
) -> Report:
    """Return the report of a comparison: the worst layers of each point, what differs, sentences.

    ``verbose``: a line a layer and point with all its sizes; ``every``: all layers, all notes.
    """
    pairs = found.prefill_decode
    other = pairs if every else top1_disagreements(pairs)[: None if verbose else TIES]
    names = quote_tokens(found.run, top_tokens(other))
    return _report(found, verdict, verbose, every, prefill_decode_table(other, names, every))


def comparison_page(found: Comparison[Run], verdict: Headline | None = None) -> Report:
    """Return the report of a comparison with everything there is."""
    return _report(found, verdict, True, True, prefill_decode_table(found.prefill_decode))


def recalled_report(found: Gathered, verbose: bool = False, every: bool = False, page: bool = False) -> Report:
    """Return the report of all that is written beside a run; ``page``: with everything there is."""
    verdict = headline(found.judgement, str(found.folder), found.among)
    if found.program is not None:
        made = program_report(found.program, found.errors, verdict, verbose or every, found.judgement.verdicts)
    elif page:
        made = replace(comparison_page(found.compared), headline=verdict)
    else:
        made = comparison_report(found.compared, verdict, verbose, every)
    return replace(made, sections=(*made.sections, findings_section(found.findings or ())))


def _report(
    found: Comparison[Run], verdict: Headline | None, verbose: bool, every: bool, views: Table | None
) -> Report:
    r, errors = found.run.record, found.errors
    facts, notes, ending = facts_of(r), _notes(found.notes, verbose or every), [LEGEND]
    if found.against is not None:
        against, ending = found.against.record, []
        facts = (*facts, ("against", f"run {against.id}, policy {against.policy['name']}"))
        tables: list[Table | None] = [pair_table(errors) if verbose or every else pair_by_point(errors)]
        said = difference_sentences(of_kinds(errors, PairError))
    else:
        tables = [by_point(errors), *(matrices(errors) if every else []), views]
        tables += [accumulation(errors), detail(errors)] if verbose else []
        said = [explained_by(errors), largest(errors), *comparison_sentences(errors, found.prefill_decode, verbose)]
    section = Section(tables=tuple(t for t in tables if t is not None), lines=tuple(f"- {x}" for x in said if x))
    return Report(
        verdict,
        (section,),
        notes,
        tuple(ending),
        command="compare",
        title=title(r),
        subtitle=subtitle(r),
        facts=facts,
        records=errors,
        folds=True,
    )


def between_report(found: "Comparison[AnyRun]", verdict: Headline | None = None, every: bool = False) -> Report:
    """Return the report of one run against another of any kind: the worst of each layer and point, what is missing."""
    tables = [pair_table(found.errors) if every else pair_by_point(found.errors)] if found.errors else []
    lines = []
    if off := sum(e.nonfinite > 0 for e in found.errors):
        where = Place.of(next(e for e in found.errors if e.nonfinite)).text
        lines.append(f"✗ {off} of {len(found.errors)} tensors have NaN or infinity, first {where}")
    if whys := Counter(e.numberless for e in found.errors if e.numberless is not None):
        said = ", ".join(f"{n} {why}" for why, n in whys.most_common(3))
        lines.append(f"{whys.total()} of {len(found.errors)} without numbers: {said}")
    reported = (reported_table(found.beside),) if found.beside else ()
    sections = (Section(tables=tuple(tables), lines=tuple(lines)), Section(tables=reported))
    return Report(verdict, sections, _notes(found.notes, True), records=found.errors, folds=True)


def _notes(notes: Sequence[str], every: bool) -> tuple[str, ...]:
    told = [f"note: {note}" for note in (notes if every else notes[:NOTES])]
    more = len(notes) - len(told)
    return (*told, *([f"note: and {more} more (--all shows them)"] if more else []))

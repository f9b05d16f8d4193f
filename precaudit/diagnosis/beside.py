"""Operations of a program that fail beside its textbook, each named as those of a model's run are."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from precaudit.diagnosis.evidence.caches import FOREIGN
from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.named import UNNAMED
from precaudit.diagnosis.replayed import by_operation, finding_of, follows, merge_findings
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import Verdict, inheriting
from precaudit.numbers.threads import one_blas_thread
from precaudit.recording.runs.programs import Opened
from precaudit.references.announced import policy_errors
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.mutations.declared import place_names
from precaudit.references.mutations.variants import Variant
from precaudit.references.viewed import Viewed, view_case
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.graphs.point import Point
from precaudit.schema.limits import default_limits
from precaudit.schema.places import calls_text
from precaudit.schema.records.errors import ErrorRecord

BROKEN = ("fail", "nonfinite")
NO_NAME = (UNNAMED, FOREIGN)
At = tuple[str, int | None]  # a program's point and the step of its scans


@np.errstate(all="ignore")  # what is not finite has its own status
def beside_textbook(opened: Opened, book: MappedTextbook, verdicts: Sequence[Verdict]) -> list[Finding]:
    """Return the findings of operations that break a policy, are not the textbook's, or make what is not finite."""
    found: list[Finding] = []
    known: dict[str, list[Variant]] = {}
    judged = [v for v in verdicts if v.kind in ("policy", "formula") or (v.kind, v.status) == ("local", "nonfinite")]
    for case in dict.fromkeys(v.prompt for v in judged):
        its = {(v.point, v.layer) for v in judged if v.prompt == case}
        view = view_case(opened, book, case)
        records, bad = _failing(view, book, _failing_pairs(book, its))
        with one_blas_thread():
            for _, group in by_operation(bad):
                one = finding_of(view, book.model, group, records, known, None)
                if not follows(one, found):
                    found.append(_of_program(one, view, (case, opened.record.phase), group))
    return merge_findings(found)


def combine(formulas: Sequence[Finding], replayed: Sequence[Finding]) -> list[Finding]:
    """Return one finding for what both tell of an operation.

    A formula is named from values without rounding, so that its name stands, but where it has none, or where the
    recorded values show in which part of attention it lies, or that it read a cache that holds something else. That of
    a part or a cache stands, too, where it comes before all of these.
    """
    kept = list(replayed)
    found = []
    for f in formulas:
        same = [r for r in kept if _same_operation(f, r)]
        better = [r for r in same if r.cause not in NO_NAME and (f.cause == UNNAMED or _finer(POINTS[r.point]))]
        if f.cause != UNNAMED and _finer(POINTS[f.point]) and all(_comes_first(f, r) for r in better):
            better = []
        kept = [r for r in kept if r not in same or r in better]
        if not better:
            found.append(f)
    return [*found, *kept]


def _comes_first(formula: Finding, replayed: Finding) -> bool:
    """Whether a formula is found at a point before that of what was replayed."""
    order = list(POINTS)
    return order.index(formula.point) < order.index(replayed.point)


def _finer(of: Point) -> bool:
    return of.state or of.within is not None


def _same_operation(formula: Finding, replayed: Finding) -> bool:
    """Whether what was replayed is the operation of a formula, or the cache that it reads."""
    a, b = POINTS[formula.point], POINTS[replayed.point]
    same = a.whole == b.whole or (b.state and POINTS[a.whole].reads_keys)
    same = same or (formula.cause == replayed.cause and formula.cause not in NO_NAME)  # q and k are told together
    return same and bool({*formula.layers, formula.layer} & {*replayed.layers, replayed.layer})


def _failing_pairs(book: MappedTextbook, failing: Collection[At]) -> set[Pair]:
    """Return the operations that fail, in a part or whole, with the parts and the caches that the program shows."""
    its = [p for p in book.pairs if (p.shown.name, p.step) in failing]
    whole = {(p.layer, POINTS[p.point].whole) for p in its}
    read = {p.layer for p in its if POINTS[p.point].attends}
    same = (p for p in book.pairs if (p.layer, POINTS[p.point].whole) in whole)
    return {*same, *(p for p in book.pairs if POINTS[p.point].state and p.layer in read)}


def _failing(
    view: Viewed, book: MappedTextbook, asked: Collection[Pair]
) -> tuple[dict[tuple[object, ...], ErrorRecord], list[Verdict]]:
    """Return the local records of pairs under the view's policy, and what of them stands for itself."""
    records: dict[tuple[object, ...], ErrorRecord] = {}
    bad: list[Verdict] = []
    for pair, place in view.places():
        for e in policy_errors(view, book.model, place) if pair in asked else ():
            v = judge(e, default_limits())
            if v is not None and v.status in BROKEN:
                records[(v.kind, *v.place)] = e
                bad.append(v)
    return records, [v for v in inheriting(bad) if v.status in BROKEN]


def _of_program(f: Finding, view: Viewed, at: tuple[str, str], group: Sequence[Verdict]) -> Finding:
    """Return a finding in the words of the program: its case and phase (``at``), points and lines, calls if apart."""
    pair, calls = view.pairs[f.layer, f.point], view.requested.decode_steps + 1
    says = ", ".join(filter(None, (f"{f.says}: {place_names([pair])}", calls_text((v.step for v in group), calls))))
    return msgspec.structs.replace(f, phases=at[1:], prompts=at[:1], says=says)

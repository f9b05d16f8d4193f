"""Operations of a program that fail beside its textbook, each named as those of a model's run are."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.named import UNNAMED
from precaudit.diagnosis.replayed import by_operation, finding_of, follows, merged
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import Verdict, inheriting
from precaudit.numbers.threads import one_blas_thread
from precaudit.recording.runs.programs import Opened
from precaudit.references.announced import policy_errors
from precaudit.references.mapped import Pair, Textbook
from precaudit.references.mutations.declared import where
from precaudit.references.mutations.variants import Variant
from precaudit.references.viewed import Viewed, viewed
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.graphs.point import Point
from precaudit.schema.limits import default_limits
from precaudit.schema.places import calls_text
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.runs import PROGRAM_CALL

BROKEN = ("fail", "nonfinite")
At = tuple[str, int | None]  # a program's point and the step of its scans


@np.errstate(all="ignore")  # what is not finite has its own status
def beside_textbook(opened: Opened, book: Textbook, verdicts: Sequence[Verdict]) -> list[Finding]:
    """Return the findings of operations that break an announced policy, or whose formula is not the textbook's."""
    found: list[Finding] = []
    known: dict[str, list[Variant]] = {}
    for case in dict.fromkeys(v.prompt for v in verdicts if v.kind in ("policy", "formula")):
        its = {(v.point, v.layer) for v in verdicts if v.prompt == case and v.kind in ("policy", "formula")}
        view = viewed(opened, book, case)
        records, bad = _failing(view, book, _asked(book, its))
        with one_blas_thread():
            for _, group in by_operation(bad):
                one = finding_of(view, book.model, group, records, known, None)
                if not follows(one, found):
                    found.append(_of_program(one, view, case, group))
    return merged(found)


def combined(formulas: Sequence[Finding], replayed: Sequence[Finding]) -> list[Finding]:
    """Return one finding for what both tell of an operation.

    A formula is named from values without rounding, so that its name stands, but where it has none, or where the
    recorded values show in which part of attention it lies, or that it read a cache that holds something else.
    """
    kept = list(replayed)
    found = []
    for f in formulas:
        same = [r for r in kept if _same_operation(f, r)]
        better = [r for r in same if r.cause != UNNAMED and (f.cause == UNNAMED or _finer(POINTS[r.point]))]
        kept = [r for r in kept if r not in same or r in better]
        if not better:
            found.append(f)
    return [*found, *kept]


def _finer(of: Point) -> bool:
    return of.state or of.within is not None


def _same_operation(formula: Finding, replayed: Finding) -> bool:
    """Whether what was replayed is the operation of a formula, or the cache that it reads."""
    a, b = POINTS[formula.point], POINTS[replayed.point]
    same = a.whole == b.whole or (b.state and POINTS[a.whole].reads_keys)
    return same and bool({*formula.layers, formula.layer} & {*replayed.layers, replayed.layer})


def _asked(book: Textbook, failing: Collection[At]) -> set[Pair]:
    """Return the pairs that fail, and where attention does, the parts and the caches of it that the program shows."""
    its = [p for p in book.pairs if (p.shown.name, p.step) in failing]
    whole = {(p.layer, p.point) for p in its}
    read = {p.layer for p in its if POINTS[p.point].reads_keys}
    parts = (p for p in book.pairs if (p.layer, POINTS[p.point].within) in whole)
    return {*its, *parts, *(p for p in book.pairs if POINTS[p.point].state and p.layer in read)}


def _failing(
    view: Viewed, book: Textbook, asked: Collection[Pair]
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


def _of_program(f: Finding, view: Viewed, case: str, group: Sequence[Verdict]) -> Finding:
    """Return a finding in the words of the program: its case, its points and lines, its calls where they are apart."""
    pair, calls = view.pairs[f.layer, f.point], view.requested.decode_steps + 1
    says = ", ".join(filter(None, (f"{f.says}: {where([pair])}", calls_text((v.step for v in group), calls))))
    return msgspec.structs.replace(f, phases=(PROGRAM_CALL,), prompts=(case,), says=says)

"""A bisection in a terminal and on pages: which changes it was, how sure that is, and a row a trial."""

from collections.abc import Sequence

from precaudit.diagnosis.bisection.records import Bisection, BisectionTrial
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import short
from precaudit.schema.records.base import Number, value

BESIDE = ("kl", "flips")  # figures that a row shows beside the one that the test is about
SHOWN = 12  # changes that a row names
HEADS = {"cause": "B's changes", "cure": "as in A", "first": "up to"}  # what a row names of a trial
HLO = "compiled: operations that differ in number; of that line, or of the whole where the line is the same."
KEY = ("times: how often a trial ran; s: seconds of all of them",)
PROOFS = {
    "smallest": "no smaller set does",
    "1-minimal": "1-minimal: without any one of these it does not; a smaller set of others was not ruled out",
    "open": "some decisive trials could not be judged: it may be fewer, or others",
    "adjacent": "the state before it is good; whether the answer also changes elsewhere was not tested",
}


def bisect_report(found: Bisection, trials: Sequence[BisectionTrial], folder: str) -> Report:
    """Return the report of a bisection and its trials."""
    asked = found.asked
    rows = tuple(_row(found, t) for t in trials)
    columns = (HEADS[found.find], "answer", *_figure_names(found), "times", "s")
    table = Table("", columns, rows, (HEADS[found.find], "answer"))
    facts = (
        ("A", f"{asked.good}: good{_figure(found, found.good)}"),
        ("B", f"{asked.bad}: bad{_figure(found, found.bad)}"),
        ("test", f"{asked.test}, against {'FP64' if asked.against == 'fp64' else 'A'}"),
        ("trials", f"{found.trials}, {found.made} of them ran now, {found.unknown} could not be judged"),
    )
    return Report(
        Headline("?" if found.proof == "open" else "✓", f"{_sentence(found)}{_proof(found)}."),
        (
            Section("What was asked", facts=facts),
            Section("Trials", tables=(table,), lines=KEY),
            Section("Where they part", lines=_parting(found), tables=_compiled(found)),
        ),
        notes=tuple(f"note: {n}" for n in found.notes),
        ending=(f"Trials: {folder}/trials.jsonl; what was found: {folder}/bisect.json",),
        command="bisect",
        title=f"{asked.subject} by {asked.by}",
        records=[found, *trials],
    )


def _parting(found: Bisection) -> tuple[str, ...]:
    """Return where a good and a bad state part first, and whether their compiled programs differ there."""
    p = found.parted
    if p is None:
        return ()
    layer = "" if p.layer is None else f", layer {p.layer}"
    at = f"{p.point} ({p.source})" if p.source else p.point
    said = f"Records part first at {at}, {p.where}{layer}: {short(p.size, '')} of its size."
    if found.hlo:
        return (said, HLO)
    return (said, "The compiled programs are the same: what runs them differs, or what they read.")


def _compiled(found: Bisection) -> tuple[Table, ...]:
    """Return a row an operation of which the compiled programs of both states have not the same number."""
    rows = tuple((x.what, str(x.good), str(x.bad)) for x in found.hlo)
    return (Table("", ("compiled", "good", "bad"), rows, ("compiled",)),) if rows else ()


def _proof(found: Bisection) -> str:
    """Return how sure it is that no set is smaller, after a semicolon; nothing where one change does it."""
    plain = found.proof == "smallest" and len(found.sets[0]) == 1
    return "" if plain else f"; {PROOFS[found.proof]}"


def _sentence(found: Bisection) -> str:
    asked, first = found.asked, found.sets[0]
    named = ", ".join(first)
    if found.find == "first":
        return (
            f"{named} is the first that breaks {asked.test}"
            if len(first) == 1
            else (f"one of {len(first)}, {first[0]} to {first[-1]}, breaks {asked.test}")
        )
    verb = "break" if found.find == "cause" else "mend"
    does = f"{verb}s {asked.test}"
    of = f"of {len(asked.changes)} that differ"
    if len(found.sets) > 1:
        return f"each of {len(found.sets)} {of} {does} alone: {'; '.join(', '.join(s) for s in found.sets)}"
    if len(first) == 1:
        return f"{named} alone, {of}, {does}"
    return f"{named} together, {len(first)} {of}, {verb} {asked.test}"


def _figure(found: Bisection, trial: BisectionTrial) -> str:
    x = trial.figures.get(found.figure)
    return "" if x is None or found.figure in ("verdict", "exit") else f", {found.figure} {_text(x)}"


def _row(found: Bisection, t: BisectionTrial) -> tuple[str, ...]:
    answer = t.answer if t.why is None else f"{t.answer}: {t.why}"
    figures = [_text(t.figures.get(name)) for name in _figure_names(found)]
    return (
        state_text(found.find, found.asked.changes, t.changes),
        answer,
        *figures,
        str(len(t.answers)),
        f"{value(t.seconds):.1f}",
    )


def _text(x: Number | None) -> str:
    """Return a figure as text: a count whole, others in two digits."""
    return f"{value(x):.0f}" if x is not None and value(x).is_integer() else short(x, "")


def state_text(find: str, every: tuple[str, ...], changes: tuple[str, ...]) -> str:
    """Return what a trial is of: the changes made, those not made where a cure is looked for, or the last of a row."""
    if not changes or changes == every:
        return "A" if not changes else "B"
    if find == "first":
        return changes[-1]
    named = changes if find == "cause" else tuple(c for c in every if c not in changes)
    return ", ".join(named if len(named) <= SHOWN else (*named[: SHOWN - 1], f"{len(named) - SHOWN + 1} more"))


def _figure_names(found: Bisection) -> tuple[str, ...]:
    """Return the figures that rows show: the test's, and others that both ends have."""
    there = found.good.figures.keys() & found.bad.figures.keys()
    named = () if found.figure in ("exit", "verdict") else (found.figure,)
    return (*named, *(name for name in BESIDE if name in there and name != found.figure))

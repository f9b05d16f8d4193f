"""Two trainings in a terminal and on pages: rounding, chaos or drift, where they part, and how that grows."""

from collections.abc import Sequence

from precaudit.diagnosis.training.conclusion import FORMULA, shown_steps, times_grown
from precaudit.diagnosis.training.records import Group, Training, TrainingTensor
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Mark, Report, Section
from precaudit.schema.digits import digits, short
from precaudit.schema.records.base import value

GROUPS: tuple[Group, ...] = ("loss", "gradient", "parameters", "moments")
FASTER = 4.0  # times as much as members grow: not their growth alone
SAME = 1e-9  # relative, in FP64: no formula differs
KEY = ("A–B: how far B is from A, relative to A; members: how far correct makings of A are from each other at most.",)


def training_report(found: Training, records: Sequence[TrainingTensor], folder: str) -> Report:
    """Return the report of two trainings."""
    facts = (
        ("A", found.good),
        ("B", found.bad),
        ("steps", f"{found.steps}, from one state"),
        ("members", f"{found.members} correct makings of A's steps, and A's run"),
    )
    groups = [g for g in GROUPS if any(x.group == g for x in found.growth)]
    lacking = [g for g in GROUPS if g not in groups]
    lines = (*_sentences(found, groups), *((f"No tensor is named as {', '.join(lacking)}.",) if lacking else ()))
    return Report(
        Headline(_mark(found), _sentence(found)),
        (
            Section("What was asked", facts=facts),
            Section("What parts them", lines=lines),
            Section("Growth", tables=(_table(found, groups),), lines=KEY),
        ),
        notes=tuple(f"note: {n}" for n in found.notes),
        ending=(f"Every tensor: {folder}/training.jsonl; what was found: {folder}/training.json",),
        command="bisect",
        title=f"{found.subject}, {found.steps} steps",
        records=[found, *records],
    )


def _mark(found: Training) -> Mark:
    if found.word == "unknown" or (found.formula is not None and found.word != "drift"):
        return "?"
    return "✗" if found.word == "drift" else "✓"


def _sentence(found: Training) -> str:
    """Return the first sentence: what B is to A."""
    over = f"over {found.steps} steps"
    if found.word == "unknown":
        return f"B cannot be compared with A: {found.why}."
    if found.word == "same":
        return f"Same: B has A's bits {over}."
    if found.word == "drift" and found.first is not None:
        much = f"{_times(found.first)} the difference of correct ways to compute A (limit {digits(found.limit, 6)})"
        return f"Drift: B departs from A in step {found.first.step} at {_at(found.first)}, {much}."
    much = (
        f"at most {digits(found.worst)} × the difference of correct ways to compute A (limit {digits(found.limit, 6)})"
    )
    what = "Chaos" if found.word == "chaos" else "Rounding"
    said = f"{what}: B is {much} {over}"
    if found.formula is not None:
        return (
            f"{said}; but in FP64 {_at(found.formula)} differs by {short(found.formula.exact, '')}: a formula differs."
        )
    return f"{said}."


def _sentences(found: Training, groups: Sequence[Group]) -> list[str]:
    """Return where they part, by what, and what it grows to."""
    said = []
    if found.first is not None:
        said.append(_why(found.first))
        if found.first.formats is not None:
            said.append(f"There A holds {found.first.formats[0]}, B {found.first.formats[1]}.")
    if found.parted is not None and found.parted != found.first:
        said.append(f"The first that differs at all: step {found.parted.step}, {_at(found.parted)}.")
    since = 1 if found.first is None else found.first.step
    for group in groups:
        grown = times_grown(found.growth, group, since)
        if grown is not None:
            mine, theirs = grown
            faster = f"{'faster than' if mine > FASTER * theirs else 'no faster than'} rounding does"
            said.append(
                f"{group.capitalize()}: from step {since} on A–B grows {digits(mine)} ×, members {digits(theirs)} ×: "
                f"{faster}."
            )
    if found.aside:
        said.append(f"Other things in A and B by FP64, and not judged: {', '.join(found.aside)}.")
    if found.lacking:
        more = f" and {len(found.lacking) - 5} more" if len(found.lacking) > 5 else ""
        said.append(f"Not on both sides in one shape: {', '.join(found.lacking[:5])}{more}.")
    return said


def _why(first: TrainingTensor) -> str:
    """Return whether a formula differs where B leaves A, or its rounding."""
    if first.exact is None:
        return "Whether a formula differs is not known: FP64 of A or B is not there, or not finite."
    off = value(first.exact)
    if off <= SAME:
        return "In FP64 A and B are the same there: no formula differs, B rounds more."
    if off > max(FORMULA, 0.5 * value(first.size)):
        return f"In FP64 they are {short(first.exact, '')} apart there, too: a formula differs."
    return f"In FP64 they are {short(first.exact, '')} apart there, and {short(first.size, '')} as they ran."


def _at(x: TrainingTensor) -> str:
    where = {"point": x.name, "output": x.name, "state": f"the state's {x.name}"}[x.where]
    return f"{where} ({x.source})" if x.source else where


def _times(x: TrainingTensor) -> str:
    return f"{digits(x.ratio)} ×" if value(x.ratio) < float("inf") else "infinitely many times"


def _table(found: Training, groups: Sequence[Group]) -> Table:
    """Return a row a step, and of every group how far B is from A and members from each other."""
    by = {(g.step, g.group): g for g in found.growth}
    columns = ("step", *(f"{g} {x}" for g in groups for x in ("A–B", "members")))
    rows = []
    for step in shown_steps(found.steps):
        row = [str(step)]
        for g in groups:
            one = by.get((step, g))
            row += ["", ""] if one is None else [short(one.size, ""), short(one.spread, "")]
        rows.append(tuple(row))
    return Table("", columns, tuple(rows), ("step",))

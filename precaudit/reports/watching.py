"""What ``watch`` says: the functions that a script jitted, and the runs of their calls."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from precaudit.recording.watching.calls import LOWERED
from precaudit.recording.watching.records import SeenFunction, SeenScript
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import count_text, short

COLUMNS = ("function", "at", "calls", "compiled", "shapes", "equations", "floats", "seconds")
SHOWN = 20  # functions
HAVING = 3  # shapes that are shown


def watch_report(
    command: Sequence[str], code: int, seen: SeenScript | None, functions: Sequence[SeenFunction], runs: Sequence[Path]
) -> Report:
    """Return the report of a watched command, whose own exit code is its own; ``runs``: what was recorded of it."""
    if seen is None:
        said = f"{command[0]} ended (exit code {code}) before it could be said what it jitted"
        left = [f"{r}: was recorded. Next: precaudit compare {r} --rerun" for r in runs]
        headline = Headline("?", f"{said}: it was killed, or ended by os._exit.")
        return Report(headline, ending=tuple(left), command="watch")
    called = [f for f in functions if f.calls]
    shown = [_row(f) for f in called[:SHOWN]]
    notes = [f"note: {n}" for n in seen.notes]
    notes += [
        f"note: {f.name} ({_short_place(f.place)}): {why}"
        for f in functions
        for why in f.unseen
        if f.calls or LOWERED in why
    ]
    if rest := len(called) - len(shown):
        notes.append(f"and {rest} more functions")
    table = Table("jitted functions that were called", COLUMNS, tuple(shown), ("function", "at", "shapes", "floats"))
    ran = [
        f"{r.folder}: {r.calls}, {count_text(r.points, 'point')}. Next: precaudit "
        + (f"gate {r.folder}" if r.compared else f"compare {r.folder} --rerun")
        for r in seen.runs
    ]
    return Report(
        None,
        (Section("Functions", tables=(table,), lines=() if shown else ("No jitted function was called.",)),),
        tuple(notes),
        tuple(ran),
        command="watch",
        title=" ".join(command),
        records=list(functions),
    )


def _row(f: SeenFunction) -> tuple[str, ...]:
    return (
        f.name,
        _short_place(f.place),
        str(f.calls),
        str(f.compiled),
        "; ".join(_shapes(f.shapes)),
        str(f.equations or "?"),
        ", ".join(f.formats),
        short(f.seconds),
    )


def _shapes(shapes: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield what of each shape is no parameter's: its last arguments."""
    for s in shapes[:HAVING]:
        last = ", ".join(x.replace("float", "f").replace("int", "i") for x in s[-HAVING:])
        yield ("…, " if len(s) > HAVING else "") + last
    if len(shapes) > HAVING:
        yield f"{len(shapes) - HAVING} more"


def _short_place(place: str) -> str:
    file, _, line = place.rpartition(":")
    return f"{Path(file).name}:{line}" if file else "?"

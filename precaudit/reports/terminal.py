"""The report on a terminal."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from precaudit.places import Place
from precaudit.reports.escaping import terminal
from precaudit.reports.summary import sentences
from precaudit.reports.tables import Table, detail, outside, overview, pair_table, prefill_decode, reported_table
from precaudit.runs.written import Comparison

if TYPE_CHECKING:
    from precaudit.between import Between

FEW_LAYERS = 4  # up to here every layer and point is shown in full


def show(comparison: Comparison, console: Any, verbose: bool = False) -> None:
    """Print notes, sentences and tables; ``verbose`` (or few layers): every layer and point with all its sizes."""
    from rich.markup import escape

    for note in comparison.notes:
        console.print(f"[bold red]{escape(terminal(note))}[/]", soft_wrap=True)
    errors, pairs = comparison.errors, comparison.prefill_decode
    if comparison.against is not None:
        _print(pair_table(errors), console)
        return
    few = len({e.layer for e in errors if e.layer is not None and e.kind == "local"}) <= FEW_LAYERS
    tables: list[Table | None] = [detail(errors)] if few or verbose else [*overview(errors), outside(errors)]
    for table in [*tables, prefill_decode(pairs)]:
        if table is not None:
            _print(table, console)
    console.print("Places: prompt, d decode step or r rescore position, t position, h head.", style="dim")
    for sentence in sentences(errors, pairs):
        console.print(f"- {escape(terminal(sentence))}")


def show_between(found: "Between", console: Any) -> None:
    """Print what one run is against another of any kind: notes, the worst of every layer and point, what is missing."""
    from rich.markup import escape

    for note in found.notes:
        console.print(f"[bold red]{escape(terminal(note))}[/]", soft_wrap=True)
    if found.errors:
        _print(pair_table(found.errors), console)
    if off := [e for e in found.errors if e.nonfinite]:
        where = escape(terminal(Place.of(off[0]).text))
        console.print(f"[bold red]{len(off)} of {len(found.errors)} tensors hold NaN or infinity, first {where}[/]")
    if lacking := [e for e in found.errors if e.numberless is not None]:
        whys = Counter(e.numberless for e in lacking)
        said = ", ".join(f"{n} {why}" for why, n in whys.most_common(3))
        console.print(f"{len(lacking)} of {len(found.errors)} without numbers: {escape(terminal(said))}")
    if found.beside:
        _print(reported_table(found.beside), console)


def _print(table: Table, console: Any) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    out = RichTable(
        title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for name in table.columns:
        out.add_column(name, justify="left" if name in table.left else "right", no_wrap=name != table.columns[-1])
    for row in table.rows:
        out.add_row(*(escape(terminal(cell)) for cell in row))
    console.print(out)

"""``precaudit same``: whether two programs are one formula."""

import click

from precaudit.cli._options import Delivery, deliver, progress_bar, report_options


@click.command()
@click.argument("one", metavar="PROGRAM|MODEL|RUN")
@click.argument("other", metavar="PROGRAM|MODEL|RUN|DUMP")
@click.option(
    "--rows",
    type=click.IntRange(0),
    metavar="N",
    help="The row of the longer output that the shorter begins at [found in FP64].",
)
@click.option(
    "--prompt",
    "--case",
    "cases",
    multiple=True,
    metavar="IDS",
    help="Only these cases of both: ID[,ID]; may be given again.",
)
@report_options("records")
def command(one: str, other: str, rows: int | None, cases: tuple[str, ...], to: Delivery) -> int:
    """Say whether two programs are one formula.

    Two entry points of one program will do. Both run in FP64 on cases with the same names, and outputs with one
    name are compared row by row: a decode's call t with row t of a full forward. If they are one formula, it says
    how far each is from FP64 as it ran; if not, at which point they first differ. Their code runs.

    PROGRAM is FILE.py:NAME, or FILE.py:NAME@ENTRY. MODEL is a checkpoint, named as in trace: the shipped decoder, whose
    prefill reads the tokens of the other's calls. RUN is a watched run, whose command runs again. DUMP is a file or
    folder of .npz, .npy or .safetensors of the same case. Each tensor is looked for among the program's FP64 values, in
    any layout and under any name.

    Exit code 0: one formula, they differ by rounding. 1: not one formula. 3: it cannot be decided.
    """
    from precaudit.reports.sameness import sameness_report
    from precaudit.schema.selection import names_in
    from precaudit.workflows.same import same

    named = tuple(name for text in cases for name in names_in(text, "case"))
    with progress_bar("loading JAX") as advance:
        found = same(one, other, rows=rows, cases=named or None, progress=advance)
    deliver(sameness_report(found.cases), to)
    return found.exit_code

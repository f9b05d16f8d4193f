"""``precaudit watch``: a script run unedited, what it jitted, and calls of it audited."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import SCREEN, Delivery, filter_options, given_options, report_options, write, write_pages

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
@click.option("--function", metavar="NAME[:FILE]", help="Record calls of this jitted function.")
@click.option("--calls", metavar="N,N:N", help="Which of its calls, from 0; -1: the last [the first of every shape].")
@filter_options("layers", "points", "positions")
@click.option("--most", metavar="BYTES", help="Record no more than this, such as 8GB.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="RUN", help="The run's folder."
)
@click.option(
    "--model", metavar="PATH", help="The model it is: compare the calls with its reference implementation, too."
)
@click.option("--gate", is_flag=True, help="Judge the run, and exit with its verdict.")
@click.option("--no-compare", is_flag=True, help="Record alone.")
@click.option("--force", is_flag=True, help="Write over a run that is there.")
@report_options(records=None)
@click.option(
    "--functions",
    "functions_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the functions here, as JSONL; stdout is the script's own.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    words: tuple[str, ...],
    filters: "Filters",
    to: Delivery,
    functions_file: Path | None,
    **given: Any,
) -> int:
    """Run COMMAND as it is and say which functions it jitted.

    COMMAND: python SCRIPT.py, python -m MODULE, or a console script. Its output and its exit code are its own. The
    report goes to stderr when it has ended. With --function calls are recorded, each group when its last call has
    ended, and compared with FP64 at the script's end. The run is like one of ``trace``. The script's code runs, as
    it would without this.

    Exit code: the script's; where that is 0, with --gate the verdict's, and 3 where no call could be recorded.
    """
    from precaudit.cli._judged import Judged, deliver_judgement
    from precaudit.cli._options import console
    from precaudit.errors import UserError
    from precaudit.reports import pages
    from precaudit.reports.terminal import print_line, print_report
    from precaudit.reports.watching import watch_report
    from precaudit.workflows.watch import watch

    compared, function = not given["no_compare"], given["function"]
    if given["model"] is not None and not compared:
        raise UserError("watch: --model is what calls are compared with; leave out --no-compare")
    if given["gate"] and (function is None or not compared):
        raise UserError("watch: --gate judges calls that are compared: give --function NAME and -o RUN")
    if function is None:
        names = given_options(context)
        of_calls = ("calls", "layers", "points", "positions", "most", "model", "output")
        if other := [names[name] for name in of_calls if name in names]:
            raise UserError(f"watch: {', '.join(other)}: of which function? Give --function NAME")
    found = watch(
        words,
        function=function,
        calls=given["calls"],
        output=given["output"],
        layers=filters.layers,
        points=filters.points,
        positions=filters.positions,
        most=given["most"],
        compare=compared,
        model=given["model"],
        diagnose=given["gate"],
        force=given["force"],
    )
    report = watch_report(words, found.code, found.seen, found.functions, found.runs)
    if to.markdown == SCREEN:
        click.echo(pages.as_markdown(report), nl=False, err=True)
    else:
        print_report(report, console(stderr=True))
    write_pages(report, to)
    if functions_file is not None:
        write(functions_file, "".join(pages.as_json(report)))
    if found.seen is None:
        return found.code or 3
    if found.code or function is None:
        return found.code
    if not found.runs or not given["gate"]:
        return 0 if found.runs else 3
    from precaudit.judging.gate import gate as judge

    codes = []
    for run in found.seen.runs:
        codes.append(deliver_judgement(judge(Path(run.folder)), run.folder, Judged()))
        for line in ("", "Diagnosis:", *run.diagnosis) if run.diagnosis else ():
            print_line(line, console())
    return max(codes, key=(0, 3, 1).index)

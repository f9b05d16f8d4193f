"""``precaudit watch``: a script run unedited, what it jitted, and calls of it audited."""

from pathlib import Path

import click

from precaudit.cli._options import write


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
@click.option("--function", metavar="NAME[:FILE]", help="Record calls of this jitted function.")
@click.option("--calls", metavar="N,N:N", help="Which of its calls, from 0; -1: the last [the first of every shape].")
@click.option("--layers", metavar="LIST", help="Steps of its scans, such as 0,15:18.")
@click.option("--points", metavar="LIST", help="Names of points.")
@click.option("--positions", metavar="LIST", help="Which of these calls are recorded, one after another: last:4.")
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
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the functions here, as JSONL.",
)
def command(
    words: tuple[str, ...],
    function: str | None,
    calls: str | None,
    layers: str | None,
    points: str | None,
    positions: str | None,
    most: str | None,
    output: Path | None,
    model: str | None,
    gate: bool,
    no_compare: bool,
    force: bool,
    json_file: Path | None,
) -> int:
    """Run COMMAND as it is and say which functions it jitted.

    COMMAND: python SCRIPT.py, python -m MODULE, or a console script. Its output and its exit code are its own. The
    report goes to stderr when it has ended. With --function calls are recorded, each group when its last call has
    ended, and compared with FP64 at the script's end. The run is like one of ``trace``. The script's code runs, as
    it would without this.

    Exit code: the script's; where that is 0, with --gate the verdict's, and 3 where no call could be recorded.
    """
    from precaudit.cli._judged import deliver_judgement
    from precaudit.cli._options import console
    from precaudit.errors import UserError
    from precaudit.reports import pages
    from precaudit.reports.terminal import print_line, print_report
    from precaudit.reports.watching import watch_report
    from precaudit.workflows.watch import watch

    if model is not None and no_compare:
        raise UserError("watch: --model is what calls are compared with; leave out --no-compare")
    if gate and (function is None or no_compare):
        raise UserError("watch: --gate judges calls that are compared: give --function NAME and -o RUN")
    if function is None and (
        other := [
            name
            for name, x in (
                ("--calls", calls),
                ("--layers", layers),
                ("--points", points),
                ("--positions", positions),
                ("--most", most),
                ("--model", model),
                ("-o", output),
            )
            if x is not None
        ]
    ):
        raise UserError(f"watch: {', '.join(other)}: of which function? Give --function NAME")
    found = watch(
        words,
        function=function,
        calls=calls,
        output=output,
        layers=layers,
        points=points,
        positions=positions,
        most=most,
        compare=not no_compare,
        model=model,
        diagnose=gate,
        force=force,
    )
    report = watch_report(words, found.code, found.seen, found.functions, found.runs)
    print_report(report, console(stderr=True))
    if json_file is not None:
        write(json_file, "".join(pages.as_json(report)))
    if found.seen is None:
        return found.code or 3
    if found.code or (function is None and not gate):
        return found.code
    if not found.runs or not gate:
        return 0 if found.runs else 3
    from precaudit.judging.gate import gate as judge

    codes = []
    for run in found.seen.runs:
        codes.append(deliver_judgement(judge(Path(run.folder)), run.folder, None, None))
        for line in ("", "Diagnosis:", *run.diagnosis) if run.diagnosis else ():
            print_line(line, console())
    return max(codes, key=(0, 3, 1).index)

"""``precaudit compare``: errors of a run against FP64, emulations, or another run."""

from pathlib import Path

import click

from precaudit.cli._options import cache_option, console, narrowed, progress_bar, references, say, selection_options


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("against", type=click.Path(path_type=Path), required=False)
@selection_options
@click.option("--accum", default="float16,bfloat16,float32", show_default=True, metavar="FORMATS",
              help="Accumulation to emulate; float16/128 rounds once per 128 terms; none: no emulation.")  # fmt: skip
@click.option("--formula", is_flag=True, help="Compare the program's FP64 shadow with the reference, too (JAX).")
@click.option("--model", metavar="PATH", help="Where the weights lie now.")
@click.option("--program", metavar="FILE.py:NAME", help="The program of a run of one, whose code is run.")
@click.option("--partial", is_flag=True, help="Open a run that was cut off.")
@cache_option
@click.option("-v", "--verbose", is_flag=True, help="Every layer and point with all its sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print the error records as JSONL instead of tables.")
def command(
    run: Path,
    against: Path | None,
    layers: str | None,
    points: str | None,
    phases: str | None,
    prompt: str | None,
    accum: str,
    formula: bool,
    model: str | None,
    program: str | None,
    partial: bool,
    no_cache: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Compare RUN with FP64 and emulations; with a second run AGAINST, RUN is the candidate.

    Writes errors.jsonl, prefill_decode.jsonl and report.md beside the run. Filters show less, and compute only what is
    not there yet.
    """
    from precaudit.comparison.compare import Options, compare
    from precaudit.errors import UserError
    from precaudit.programs.runs import is_program_run
    from precaudit.reports import markdown, terminal
    from precaudit.store import open_run
    from precaudit.writing import write_whole

    if is_program_run(run):
        given: dict[str, object] = {"--layers": layers, "--points": points, "--phases": phases, "--prompt": prompt}
        given |= {"--model": model, "--formula": formula or None, "--partial": partial or None, "AGAINST": against}
        if other := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{run} is of a program and compared whole; leave out {', '.join(other)}")
        _program(run, program, as_json)
        return
    accums = () if accum == "none" else tuple(a.strip() for a in accum.split(",") if a.strip())
    opened = open_run(run, partial)
    asked = narrowed(opened.record.requested, layers, points, phases, prompt)
    with progress_bar() as advance, references(no_cache) as cache:
        options = Options(accum=accums, model=model, partial=partial, cache=cache, formula=formula)
        found = compare(opened, against, asked, options, advance)
    if asked is None:
        write_whole(found.folder / "report.md", markdown.render(found))
    if as_json:
        from precaudit.records import encode

        for record in found.errors:
            click.echo(encode(record), nl=False)
        return
    terminal.show(found, console(), verbose)
    say(f"Records: {found.folder}/errors.jsonl" + (f"; report: {found.folder}/report.md" if asked is None else ""))


def _program(run: Path, program: str | None, as_json: bool) -> None:
    """Compare a run of a program with its own segments."""
    from precaudit.programs.comparing import compare
    from precaudit.programs.runs import open_program_run
    from precaudit.reports import program as report

    opened = open_program_run(run)
    with progress_bar() as advance:
        errors = compare(opened, reference=program, tell=advance)
    if as_json:
        from precaudit.records import encode

        for record in errors:
            click.echo(encode(record), nl=False)
        return
    report.show(opened, errors, console())
    say(f"Records: {run}/errors.jsonl. Next: precaudit gate {run}")

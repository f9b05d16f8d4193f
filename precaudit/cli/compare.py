"""``precaudit compare``: errors of a run against FP64, emulations, or another run."""

from pathlib import Path
from typing import Any

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
@click.option(
    "--reference",
    metavar="FILE.py:NAME",
    help="A function of (params, *inputs) that returns {point: FP64 array}: the formula of a run of a program.",
)
@click.option(
    "--map",
    "names",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A names map of a program: its formula is held against the textbook of a family.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Its config.json; by default the map's name with .json, else config.json beside it.",
)
@click.option("--family", metavar="NAME", help="The family, where config.json has no model_type.")
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
    reference: str | None,
    names: Path | None,
    config: Path | None,
    family: str | None,
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
    from precaudit.dumps.runs import is_imported
    from precaudit.errors import UserError
    from precaudit.reports import markdown, terminal
    from precaudit.runs.programs import is_program_run
    from precaudit.store import open_run
    from precaudit.writing import write_whole

    kinds = [kind(x) for x in (run, against) if x is not None for kind in (is_program_run, is_imported)]
    if any(kinds) and against is not None:
        given: dict[str, object] = {"--layers": layers, "--points": points, "--phases": phases, "--prompt": prompt}
        given |= {"--model": model}
        given |= {"--program": program, "--reference": reference, "--map": names, "--config": config}
        if other := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{run} and {against} are compared whole; leave out {', '.join(other)}")
        _between(run, against, as_json)
        return
    if is_imported(run):
        raise UserError(f"{run} was imported and holds no program: precaudit compare {run} RUN")
    if is_program_run(run):
        given = {"--layers": layers, "--points": points, "--phases": phases, "--prompt": prompt}
        given |= {"--model": model, "--formula": formula or None, "--partial": partial or None}
        if other := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{run} is of a program and compared whole; leave out {', '.join(other)}")
        _program(run, program, _reference(reference, names, config, family), as_json)
        return
    own = {"--program": program, "--reference": reference, "--map": names, "--config": config, "--family": family}
    if other := [name for name, value in own.items() if value is not None]:
        raise UserError(f"{run} is no run of a program; leave out {', '.join(other)}")
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


def _reference(reference: str | None, names: Path | None, config: Path | None, family: str | None) -> Any:
    """Return what a program's formula is held against: a function of the user's, the textbook, or nothing."""
    from precaudit.errors import UserError
    from precaudit.programs.loading import load_function
    from precaudit.references.mapped import Names

    if names is None and (config is not None or family is not None):
        raise UserError("--config and --family belong to a names map: --map FILE")
    if names is None:
        return None if reference is None else load_function(reference)
    if reference is not None:
        raise UserError("give --reference or --map, not both")
    beside = names.with_suffix(".json")
    return Names(names, config or (beside if beside.is_file() else names.parent / "config.json"), family)


def _between(run: Path, against: Path, as_json: bool) -> None:
    """Hold a run against another, of which one is a program's or imported."""
    from precaudit.between import compare_runs
    from precaudit.reports import terminal

    with progress_bar() as advance:
        found = compare_runs(run, against, advance)
    if as_json:
        from precaudit.records import encode

        for record in found.errors:
            click.echo(encode(record), nl=False)
        return
    terminal.show_between(found, console())
    say(f"Records: {found.folder}/errors.jsonl")


def _program(run: Path, program: str | None, reference: Any, as_json: bool) -> None:
    """Compare a run of a program with its own segments."""
    from precaudit.comparison.programs import compare
    from precaudit.reports import program as report
    from precaudit.runs.programs import open_program_run
    from precaudit.writing import write_whole

    opened = open_program_run(run)
    with progress_bar() as advance:
        errors = compare(opened, program, reference, tell=advance)
    write_whole(run / "report.md", report.render(opened, errors))
    if as_json:
        from precaudit.records import encode

        for record in errors:
            click.echo(encode(record), nl=False)
        return
    report.show(opened, errors, console())
    say(f"Records: {run}/errors.jsonl; report: {run}/report.md. Next: precaudit gate {run}")

"""``precaudit compare``: errors of a run against FP64, emulations, or another run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import (
    FILTERS,
    Delivery,
    cache_option,
    deliver,
    filter_options,
    leave_out,
    progress_bar,
    references,
    report_options,
    selection_of_filters,
)
from precaudit.cli._sketching import compare_sketched
from precaudit.cli._workers import computes_apart, memory_lines, other_processes

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters

OF_PROGRAM = ("program", "reference", "names", "config")
WHO = ("jobs", "scheduler", "memory")  # computes
# What is of no use, by what RUN is or an option asks for, and why.
LEFT_OUT = {
    "runs": (
        "{run} is a folder of runs, compared whole",
        (*FILTERS, *OF_PROGRAM, "family", "policy", "partial", "rerun"),
    ),
    "pair": (
        "{run} and {against} are compared whole",
        ("formula", "model", "policy", *OF_PROGRAM, "family", "partial", "rerun"),
    ),
    "sketches": (
        "{run} keeps no tensors",
        (*FILTERS, "formula", "model", "policy", *OF_PROGRAM, "family", "partial", "rerun", *WHO, "accum"),
    ),
    "recorded": ("{run} was not imported, and says its policy itself", ("policy",)),
    "program": ("{run} is of a program", ("formula",)),
    "rerun": ("--rerun runs the command of {run} again", (*OF_PROGRAM, *WHO)),
    "textbook": ("--model says what it is compared with", ("config", "reference")),
    "decoder": ("{run} is no run of a program", (*OF_PROGRAM, "family", "rerun")),
}


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("against", type=click.Path(path_type=Path), required=False)
@filter_options()
@click.option(
    "--accum",
    default="float16,bfloat16,float32",
    show_default=True,
    metavar="FORMATS",
    help="Accumulation to emulate; float16/128 rounds once per 128 terms; none: no emulation.",
)
@click.option(
    "--formula", is_flag=True, help="Evaluate the program in FP64 and compare that with the reference, too (JAX)."
)
@click.option(
    "--model",
    metavar="PATH",
    help="Where the weights are. A program is compared with this model's reference implementation, "
    "a dump with FP64 of these weights.",
)
@click.option(
    "--policy", metavar="NAME|FILE", help="For a dump, with --model: the formats that the other framework computes in."
)
@click.option("--program", metavar="FILE.py:NAME", help="The program that a run is of; its code runs.")
@click.option(
    "--reference",
    metavar="FILE.py:NAME",
    help="A function of parameters and inputs that returns {point: FP64 array}: the formula of a run of a program.",
)
@click.option(
    "--map",
    "names",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A names map of a program: its formula is compared with the reference implementation of a family.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Its config.json; by default the map's name with .json, else config.json beside it.",
)
@click.option("--family", metavar="NAME", help="The family, where config.json has no model_type.")
@click.option("--partial", is_flag=True, help="Open a run that was cut off.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes of this machine that compute FP64 and records; 1: threads.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="The cluster that computes them, tcp://HOST:PORT of a dask scheduler; it is trusted ([cluster]).",
)
@click.option("--memory", metavar="BYTES", help="The most that each process of --jobs may hold, such as 4GB.")
@click.option("--rerun", is_flag=True, help="For a watched run: run its command again to compare; its code runs.")
@cache_option
@click.option("--all", "every", is_flag=True, help="Every layer as a column.")
@click.option("-v", "--verbose", is_flag=True, help="Every layer and point with all its sizes.")
@report_options("error records")
@click.pass_context
def command(
    context: click.Context, /, run: Path, against: Path | None, filters: "Filters", to: Delivery, **given: Any
) -> None:
    """Compare RUN with FP64 and emulations, or with another run.

    With a second run, AGAINST, RUN is judged and AGAINST is its reference. An imported dump is compared with another
    run, or with FP64 of the model that --model names.

    For a folder of runs, which trace --policy A,B -o FOLDER writes, each is compared with FP64: a row for each policy.

    Writes errors.jsonl, prefill_decode.jsonl and report.md beside the run. Filters show less, and compute only what is
    not there yet.
    """
    from precaudit.errors import UserError
    from precaudit.numbers.bytes_text import bytes_of
    from precaudit.recording.runs.folders import NO_TENSORS
    from precaudit.recording.runs.kinds import kind_of
    from precaudit.recording.runs.sketched import is_sketched
    from precaudit.references.comparison.compare import CompareOptions
    from precaudit.workflows.several import runs_in

    def check(*kinds: str) -> None:
        for why, names in (LEFT_OUT[kind] for kind in kinds):
            leave_out(context, names, why.format(run=run, against=against))

    accum, model, policy = given["accum"], given["model"], given["policy"]
    accums = () if accum == "none" else tuple(a.strip() for a in accum.split(",") if a.strip())
    options = CompareOptions(
        accum=accums,
        model=model,
        partial=given["partial"],
        formula=given["formula"],
        jobs=given["jobs"],
        scheduler=given["scheduler"],
        memory=bytes_of(given["memory"], "--memory"),
    )
    shown = Shown(filters, to, given["verbose"], given["every"], given["no_cache"], options)
    if against is None and runs_in(run):
        check("runs")
        return _policies(run, options, given["no_cache"], to)
    if is_sketched(run):
        if against is None:
            raise UserError(NO_TENSORS.format(folder=run))
        check("sketches")
        return compare_sketched(run, against, to)
    kind = kind_of(run)
    if against is not None and {kind, kind_of(against)} & {"program", "dump"}:
        check("pair")
        return _between(run, against, shown)
    if kind == "program":
        rerun, names = given["rerun"], given["names"]
        check("recorded", "program", *(["rerun"] if rerun else ["textbook"] if model is not None else []))
        if rerun:
            from precaudit.workflows.watch import rerun as run_again

            run_again(run, accums, model)
        own = rerun or model is None
        its = _reference(given["reference"], names, given["config"], given["family"]) if own else (model, names)
        return _program(run, given["program"], its, accums, shown)
    if kind is not None:
        check(*([] if kind == "dump" else ["recorded"]), "decoder")
    return _decoder(run, against, policy, options, shown)


@dataclass(frozen=True)
class Shown:
    """What is shown of a comparison, how much of it, and where it goes."""

    filters: "Filters"
    to: Delivery
    verbose: bool
    every: bool
    no_cache: bool
    options: Any


def _decoder(run: Path, against: Path | None, policy: str | None, options: Any, shown: Shown) -> None:
    """Compare a run of a model, or a dump as one, with FP64 or with another run; with filters, some of it."""
    from precaudit.judging.gate import Criteria, gate_selected
    from precaudit.recording.opening import open_any
    from precaudit.recording.runs.reader import Run
    from precaudit.references.comparison.compare import compare
    from precaudit.reports.comparison import comparison_page, comparison_report
    from precaudit.reports.headline import AMONG, headline
    from precaudit.reports.pages import as_markdown
    from precaudit.workflows.dumped_model import dump_as_run
    from precaudit.writing import write_whole

    opened = open_any(run, options.partial, held=against is None)
    if not isinstance(opened, Run):
        with progress_bar() as advance:
            opened = dump_as_run(run, options.model, policy, advance)
    asked = selection_of_filters(opened.record.requested, shown.filters)
    with progress_bar() as advance, references(shown.no_cache) as cache:
        found = compare(opened, against, asked, replace(options, cache=cache, held=False), advance)
    if against is not None:
        verdict = _apart(found.errors, run, against)
    else:  # with what an earlier --formula found of it
        said = gate_selected(run, Criteria(filters=shown.filters))
        verdict = headline(said, str(run), "" if asked is None else AMONG)
    if asked is None:
        write_whole(found.folder / "report.md", as_markdown(comparison_page(found, verdict), 1, None), inside=True)
    report = comparison_report(found, verdict, shown.verbose, shown.every)
    where = f"Records: {found.folder}/errors.jsonl" + (f"; report: {found.folder}/report.md" if asked is None else "")
    return deliver(
        replace(report, ending=(*report.ending, *memory_lines(found.peaks, options.memory), where)), shown.to
    )


def _policies(folder: Path, options: Any, no_cache: bool, to: Delivery) -> None:
    """Compare every run in a folder, and print a row a policy."""
    from precaudit.reports.policies import policies_report
    from precaudit.workflows.several import compare_policies

    with progress_bar() as advance, references(no_cache) as cache:
        rows, said = compare_policies(folder, replace(options, cache=cache), advance)
    deliver(policies_report(rows, str(folder), said), to)


def _reference(reference: str | None, names: Path | None, config: Path | None, family: str | None) -> Any:
    """Return what a program's formula is held against: a function of the user's, the textbook, or nothing."""
    from precaudit.errors import UserError
    from precaudit.recording.programs.loading import load_function
    from precaudit.references.names_map import names_of

    if names is not None and reference is not None:
        raise UserError("give --reference or --map, not both")
    return names_of(names, config, family) or (None if reference is None else load_function(reference))


def _between(run: Path, against: Path, shown: Shown) -> None:
    """Compare a run with another, of which one is a program's or imported; with filters, some of it."""
    from precaudit.judging.looks import look_by, selected
    from precaudit.recording.opening import open_any
    from precaudit.references.comparison.between import compare_runs
    from precaudit.reports.comparison import between_report

    with progress_bar() as advance, other_processes(shown.options) as by:
        opened = open_any(run, held=False)
        look = look_by(opened, shown.filters)
        found = compare_runs(run, against, advance, held=False, by=by)
    found = found if look is None else selected(found, look)
    report = between_report(found, _apart(found.errors, run, against), shown.every or shown.verbose)
    deliver(
        replace(
            report, ending=(*memory_lines(found.peaks, shown.options.memory), f"Records: {found.folder}/errors.jsonl")
        ),
        shown.to,
    )


def _apart(pairs: Any, run: Path, against: Path) -> Any:
    """Return the first sentence on a run against another, by the records of both against FP64 where there are any."""
    import shlex

    from precaudit.errors import UserError
    from precaudit.judging.gate import gate
    from precaudit.judging.recalled import recall_any
    from precaudit.recording.runs.kinds import kind_of
    from precaudit.recording.runs.reader import Run
    from precaudit.reports.differences import difference_verdict

    known: list[Any] = []
    lacking, asked, weights = [], None, dict[tuple[str, ...], str]()
    for folder in (run, against):
        try:
            found = recall_any(folder)
            known.append(found.errors)
        except (UserError, OSError):
            known.append(None)
            lacking.append(folder)
            continue
        if isinstance(found.run, Run):
            made, stored = found.run.record, found.run.record.policy["weights"]
            name = made.model.id if stored == "as-stored" else f"{made.model.id} in {stored}"
            weights[made.model.sha256, stored] = name
            points = set(made.requested.points)
            asked = points if asked is None else asked & points
    differ = f"the runs are of different weights ({'; '.join(weights.values())})" if len(weights) > 1 else ""
    for folder in (x for x in (run, against) if kind_of(x) == "dump" and x not in lacking):
        if gate(folder).exit_code == 1:  # of which it is not known otherwise whose weights it is of
            differ = differ or f"{folder} does not pass against FP64 of its model: precaudit gate {folder}"
    of_dump = " --model PATH" if lacking and kind_of(lacking[0]) == "dump" else ""
    helps = f"precaudit compare {shlex.quote(str(lacking[0]))}{of_dump}" if lacking else ""
    return difference_verdict(pairs, known[0], known[1], helps, asked, differ)


def _program(run: Path, program: Any, reference: Any, accum: tuple[str, ...], shown: Shown) -> None:
    """Compare a run of a program with its own segments; with filters, some of it, where that was not done before."""
    from precaudit.judging.gate import Criteria, gate_selected
    from precaudit.judging.looks import look_by, selected
    from precaudit.judging.programs import was_compared
    from precaudit.recording.programs.loading import program_of
    from precaudit.recording.runs.compared_programs import recall_program
    from precaudit.recording.runs.programs import open_program_run
    from precaudit.references.alignment.textbook import model_names
    from precaudit.references.comparison.programs import compare_program
    from precaudit.references.names_map import Names
    from precaudit.references.textbook.pieces import Execution
    from precaudit.reports.headline import AMONG, headline
    from precaudit.reports.pages import as_markdown
    from precaudit.reports.program import program_report
    from precaudit.writing import write_whole

    opened = open_program_run(run, partial=shown.options.partial)
    look, code = look_by(opened, shown.filters), program is not None
    if isinstance(reference, tuple):
        loaded = program_of(opened, program)
        with progress_bar() as advance:
            reference = model_names(opened, loaded, *reference, tell=advance)
        program = program if computes_apart(shown.options) else loaded
    names = reference.record() if isinstance(reference, Names) else None
    own = reference is not None and names is None  # a function, of which nothing tells that it is the same
    there, holds = opened.record.watched is not None, None if look is None else look.holds  # whose program is gone
    if (there or look) and not code and not own and was_compared(opened, names, accum, holds):
        found = recall_program(opened)
    else:
        with progress_bar() as advance, other_processes(shown.options) as by:
            found = compare_program(opened, program, reference, Execution(by, advance), accum, holds)
    part = found if look is None else selected(found, look)
    said = gate_selected(run, Criteria(filters=shown.filters))
    verdict = headline(said, str(run), "" if look is None else AMONG)
    if look is None:
        page = program_report(opened, part.errors, verdict, verdicts=said.verdicts)
        write_whole(run / "report.md", as_markdown(page, 1, None), inside=True)
    where = f"Records: {run}/errors.jsonl" + (f"; report: {run}/report.md" if look is None else "")
    every = shown.every or shown.verbose
    report = program_report(opened, part.errors, verdict, every, said.verdicts)
    return deliver(replace(report, ending=(*memory_lines(found.peaks, shown.options.memory), where)), shown.to)

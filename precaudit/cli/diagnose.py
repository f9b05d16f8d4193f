"""``precaudit diagnose``: which operation is wrong, why, and how sure that is."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import (
    Delivery,
    cache_option,
    deliver,
    filter_options,
    leave_out,
    progress_bar,
    references,
    report_options,
    say,
    selection_of_filters,
)
from precaudit.cli._runs import RunFolder

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters

INVARIANCES = ("batches", SHARDING := "sharding")  # what may be run another way; the first where nothing is said


class _Words(click.Command):
    """A command whose ``--invariance`` may stand alone: what follows is its word only where it is one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give an option that stands alone its first word."""
        follows = [*args[1:], ""]
        alone = (a == "--invariance" and b not in INVARIANCES for a, b in zip(args, follows, strict=True))
        given = [f"{a}={INVARIANCES[0]}" if lone else a for a, lone in zip(args, alone, strict=True)]
        return super().parse_args(ctx, given)


@click.command(cls=_Words)
@click.argument("run", type=RunFolder())
@filter_options()
@click.option("--partial", is_flag=True, help="Open a run that was cut off.")
@cache_option
@click.option(
    "--model", metavar="PATH", help="Where the weights are; a program is compared with their reference implementation."
)
@click.option("--program", metavar="FILE.py:NAME", help="The program that a run is of; its code runs.")
@click.option("--rerun", is_flag=True, help="For a watched run: run its command again; its code runs.")
@click.option(
    "--lift",
    multiple=True,
    metavar="NAME=MODULE:FUNCTION",
    help="FP64 meaning of a primitive or Pallas kernel; imports and runs the code named.",
)
@click.option(
    "--invariance",
    type=click.Choice(INVARIANCES),
    metavar="[sharding]",
    help="Run the prompts in other batches, paddings, buckets, unrolled; sharding: on meshes.",
)
@click.option("--mesh", metavar="NAME=N[,NAME=N]", help="With --invariance sharding: which mesh, by default the run's.")
@click.option(
    "--objective",
    default="margin",
    show_default=True,
    metavar="margin|kl|logprob[:TOKEN]",
    help="What shares in logits are of; logprob: of FP64's top-1, or of a token id.",
)
@click.option("-v", "--verbose", is_flag=True, help="Every finding with its numbers, and error growth over layers.")
@report_options("findings")
@click.pass_context
def command(context: click.Context, /, run: Path, filters: "Filters", to: Delivery, **given: Any) -> int:
    """Find the cause of what rounding does not explain in RUN.

    Compares it first if that was not done.

    Writes findings.jsonl beside the run. Exit code 0: rounding explains all. 1: a finding stands. 3: only unknown, or
    nothing was judged.
    """
    from precaudit.diagnosis.diagnose import diagnose, lift_subject
    from precaudit.errors import UserError
    from precaudit.recording.runs.kinds import kind_of
    from precaudit.recording.runs.reader import open_run
    from precaudit.references.comparison.compare import CompareOptions
    from precaudit.reports.diagnosis import diagnosis_report
    from precaudit.reports.headline import AMONG

    kind, model, mesh, partial = kind_of(run), given["model"], given["mesh"], given["partial"]
    if kind == "program":
        leave_out(context, ("lift", "invariance", "mesh"), f"{run} is of a program")
        if given["rerun"]:
            return _rerun(run, model)
        return _program(run, filters, to, given)
    if kind is not None:
        leave_out(context, ("program", "rerun"), f"{run} is no run of a program")
    opened = open_run(run, partial)
    on_meshes = _on_meshes(opened, model, mesh) if given["invariance"] == SHARDING else None
    if mesh is not None and on_meshes is None:
        raise UserError("--mesh goes with --invariance sharding")
    asked = selection_of_filters(opened.record.requested, filters)
    with progress_bar() as advance, references(given["no_cache"]) as cache:
        options = CompareOptions(accum=(), model=model, partial=partial, cache=cache)
        subject = lift_subject(opened, None, options, _meanings(given["lift"]))
        found = diagnose(opened, asked, options, advance, subject, given["objective"])
        deliver(diagnosis_report(found, given["verbose"], "" if asked is None else AMONG), to)
        codes = {found.exit_code}
        if on_meshes is not None:
            codes.add(_across(found, on_meshes, model, cache, to.as_json))
        elif given["invariance"]:
            codes.add(_invariant(found, model, to.as_json))
    return 1 if 1 in codes else max(codes)


def _rerun(run: Path, model: str | None) -> int:
    """Have a watched run compared and diagnosed in the process of its command."""
    from precaudit.cli._options import console
    from precaudit.judging.gate import gate
    from precaudit.reports.headline import headline
    from precaudit.reports.terminal import print_line
    from precaudit.workflows.watch import rerun

    found = rerun(run, model=model, diagnose=True)
    judged = gate(run)
    for line in found.diagnosis or headline(judged, str(run)).lines:
        print_line(line, console())
    return judged.exit_code


def _program(run: Path, filters: "Filters", to: Delivery, given: dict[str, Any]) -> int:
    """Print what a program's run shows: findings, what changed its outputs, and what its lines gain in float32."""
    from precaudit.diagnosis.programs import diagnose_program
    from precaudit.judging.looks import look_by
    from precaudit.recording.runs.compared_programs import program_errors
    from precaudit.recording.runs.programs import open_program_run
    from precaudit.reports.headline import AMONG
    from precaudit.reports.program_diagnosis import program_diagnosis_report

    with progress_bar() as advance:
        opened = open_program_run(run, partial=given["partial"])
        look = look_by(opened, filters)
        objective = None if look else given["objective"]
        found = diagnose_program(opened, given["program"], advance, objective, look, given["model"])
    errors = program_errors(opened)
    shown = errors if look is None else look.of(errors)
    deliver(program_diagnosis_report(found, shown, given["verbose"], "" if look is None else AMONG), to)
    return found.exit_code


def _meanings(items: tuple[str, ...]) -> dict[str, Any]:
    """Import the functions named; raises UserError where one is not there."""
    from importlib import import_module

    from precaudit.errors import UserError

    found = {}
    for item in items:
        name, _, where = item.partition("=")
        module, _, function = where.partition(":")
        try:
            found[name] = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"--lift {item!r}: {error}; write NAME=MODULE:FUNCTION") from None
    return found


def _on_meshes(opened: Any, model: str | None, given: str | None) -> dict[Any, Any]:
    """Return {mesh: the run's program on it}, the run's weights not read yet; none where it is another program."""
    from precaudit.diagnosis.evidence.sharding import other_meshes
    from precaudit.recording.tracing.predicting import asked_device
    from precaudit.recording.tracing.subject import program_of
    from precaudit.schema.meshes import parse_mesh, recorded_mesh

    meshes = other_meshes(recorded_mesh(opened.record.mesh), None if given is None else parse_mesh(given))
    device = asked_device(opened.record.device)
    largest_first = sorted(meshes, key=lambda mesh: -mesh.devices)  # what is lacking is told of that
    subjects = {mesh: program_of(opened, device, model, mesh) for mesh in largest_first}
    return {mesh: subjects[mesh] for mesh in meshes if subjects[mesh] is not None}


def _across(found: Any, subjects: dict[Any, Any], model: str | None, cache: Path, as_json: bool) -> int:
    """Print what other meshes change; return 1 where something is broken, 3 where that is not known."""
    from precaudit.diagnosis.evidence.sharding import across_meshes
    from precaudit.recording.runs.recorded import Recorded
    from precaudit.references.comparison.compare import CompareOptions
    from precaudit.reports.mesh import across_report
    from precaudit.schema.meshes import recorded_mesh
    from precaudit.schema.records.errors import ERROR_KINDS
    from precaudit.schema.records.lines import read_lines

    if not subjects:
        say("Sharding: unknown: the program is not the shipped decoder", err=as_json)
        return 3
    recorded = Recorded.of(found.compared.run)
    every = read_lines(recorded.run.folder / "errors.jsonl", ERROR_KINDS)  # of this selection and earlier ones
    options = CompareOptions(accum=(), model=model, cache=cache)
    with progress_bar() as advance:
        ways = across_meshes(recorded, every, list(subjects), subjects.pop, options, advance)
    report = across_report(ways, recorded_mesh(recorded.run.record.mesh))
    for line in report.lines if as_json else ():
        say(line, err=True)
    if not as_json:
        deliver(report)
    return report.exit_code


def _invariant(found: Any, model: str | None, as_json: bool) -> int:
    """Print what running the prompts another way changes; return 1 where something is broken, 3 without a program."""
    from precaudit.errors import UserError
    from precaudit.recording.runs.recorded import Recorded
    from precaudit.references.textbook.formula import recorded_program
    from precaudit.reports.diagnosis import invariances
    from precaudit.schema.records.devices import device_kind
    from precaudit.schema.records.lines import read_lines

    recorded = Recorded.of(found.compared.run)
    device = device_kind(recorded.run.record.device)
    try:
        subject, lacks = recorded_program(recorded, where=model)(device), "the program is not the shipped decoder"
    except UserError:
        subject, lacks = None, f"needs {device}"
    if subject is None:
        say(f"Invariance: unknown: {lacks}", err=as_json)
        return 3
    from precaudit.diagnosis.evidence.invariance import invariance
    from precaudit.schema.records.errors import ERROR_KINDS

    with progress_bar() as advance:
        every = read_lines(recorded.run.folder / "errors.jsonl", ERROR_KINDS)  # of this selection and earlier ones
        ways = invariance(recorded, subject, every, advance)
    for line in invariances(ways):
        say(line, err=as_json)
    statuses = {w.status for w in ways}
    return 1 if "broken" in statuses else 3 if "unknown" in statuses else 0

"""``precaudit lint``: what a program's text says of its precision, on a TPU that need not be there."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import (
    Delivery,
    deliver,
    filter_options,
    given_options,
    leave_out,
    policy_names,
    progress_bar,
    report_options,
    say,
)
from precaudit.cli._runs import RunFolder

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters


@click.command()
@click.argument("subject", required=False)
@click.option("--tpu", metavar="v5e:2x2", help="Compile for this TPU; needs the extra tpu, and no TPU.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "gpu", "tpu"]),
    default="cpu",
    show_default=True,
    help="Without --tpu: read the program for it.",
)
@click.option(
    "--mesh", metavar="NAME=N[,NAME=N]", help="With --tpu: cut a model over its chips, and list what they exchange."
)
@click.option("--policy", metavar="A,B", help="Formats of a model's parts, names or files; each is linted [bf16].")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@filter_options("phases")
@click.option("--tokens", type=click.IntRange(1), help="Length of a model's prompt [64].")
@click.option("--batch", type=click.IntRange(1), help="Sequences of a model at once [1].")
@click.option(
    "--with",
    "run",
    type=RunFolder(),
    metavar="RUN",
    help="A recorded run: are its values too large for the formats here?",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "unknown", "warning", "note"]),
    default="error",
    show_default=True,
    help="The severity from which on the exit code is 1.",
)
@click.option("--sarif", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write SARIF here.")
@click.option("--list", "listed", is_flag=True, help="Print what every rule says.")
@report_options("findings")
@click.pass_context
def command(context: click.Context, /, subject: str | None, filters: "Filters", to: Delivery, **given: Any) -> int:
    """Say what SUBJECT's text does to its precision; runs nothing.

    SUBJECT: a model as in trace, or a precaudit.Program as FILE.py:NAME (its code is imported).

    Exit code 0: nothing as severe as --fail-on. 1: something is. 3: only an operation that cannot be read.
    """
    from precaudit import __version__
    from precaudit.checks.lint.rules import every
    from precaudit.errors import UserError
    from precaudit.reports import lint as report

    if given["listed"]:
        for line in report.rule_lines(every()):
            say(line)
        return 0
    if subject is None:
        raise UserError("SUBJECT is missing: a model such as tiny, or FILE.py:NAME")
    fail_on, codes = given["fail_on"], []
    for name, found in _lint(context, subject, filters, given):
        if given["sarif"] is not None:
            import json

            from precaudit.cli._options import write

            write(given["sarif"], json.dumps(report.sarif(found, every(), __version__), indent=1) + "\n")
        deliver(report.lint_report(found, name, fail_on), to)
        codes.append(found.exit_code(fail_on))
    return max(codes, key=(0, 3, 1).index)


OF_A_MODEL = ("policy", "settings", "phases", "tokens", "batch", "mesh")


def _lint(context: click.Context, subject: str, filters: "Filters", given: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return what was found of a program, or of a model under each policy, with what it is called."""
    from precaudit.checks.lint.linting import PHASES, LintedCalls, Lowering, lint_model, lint_program
    from precaudit.checks.lint.recorded import read_extents
    from precaudit.errors import UserError
    from precaudit.interpreters.tpu.target import parse_target
    from precaudit.recording.programs.loading import is_reference, load_program
    from precaudit.schema.meshes import ONE, parse_mesh
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings

    tpu, mesh, device, run = given["tpu"], given["mesh"], given["device"], given["run"]
    target, extents = None if tpu is None else parse_target(tpu), None if run is None else read_extents(run)
    with progress_bar("loading JAX") as advance:
        if is_reference(subject):
            leave_out(context, OF_A_MODEL, "a program says itself what it runs on")
            return [(subject, lint_program(load_program(subject), Lowering(target, device), advance, extents))]
        names = policy_names(given["policy"] or "bf16")
        if len(names) > 1 and (given["sarif"] or to_files(context)):
            raise UserError("a file holds what was found under one policy: give one --policy, or no file")
        shape = ONE if mesh is None else parse_mesh(mesh)
        phases = tuple(p.strip() for p in filters.phases.split(",")) if filters.phases else PHASES
        found = []
        for name in names:
            policy = apply_settings(load_policy(name), parse_settings(given["settings"]))
            calls = LintedCalls(phases, given["tokens"] or 64, given["batch"] or shape.data)
            its = lint_model(subject, policy, Lowering(target, device, shape), calls, advance, extents)
            found.append((subject if len(names) == 1 else f"{subject}, {name}", its))
        return found


def to_files(context: click.Context) -> bool:
    """Whether the command line asks for a page of the report."""
    return bool({"markdown", "html"} & given_options(context).keys())

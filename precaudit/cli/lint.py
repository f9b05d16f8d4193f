"""``precaudit lint``: what a program's text says of its precision, on a TPU that need not be there."""

from pathlib import Path
from typing import Any

import click

from precaudit.cli._options import deliver, page_options, progress_bar, say


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
@click.option("--policy", metavar="NAME|FILE", help="Formats of a model's parts [bf16].")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@click.option("--phase", metavar="PHASES", help="prefill, decode (default: both).")
@click.option("--tokens", type=click.IntRange(1), help="Length of a model's prompt [64].")
@click.option("--batch", type=click.IntRange(1), help="Sequences of a model at once [1].")
@click.option(
    "--with",
    "run",
    type=click.Path(path_type=Path),
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
@page_options
@click.option("--list", "listed", is_flag=True, help="Print what every rule says.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSONL.")
def command(
    subject: str | None,
    tpu: str | None,
    device: str,
    mesh: str | None,
    policy: str | None,
    settings: tuple[str, ...],
    phase: str | None,
    tokens: int | None,
    batch: int | None,
    run: Path | None,
    fail_on: Any,
    sarif: Path | None,
    listed: bool,
    as_json: bool,
    **pages: Path | None,
) -> int:
    """Say what SUBJECT's text does to its precision; runs nothing.

    SUBJECT: a model as in trace, or a precaudit.Program as FILE.py:NAME (its code is imported).

    Exit code 0: nothing as severe as --fail-on. 1: something is. 3: only an operation that cannot be read.
    """
    from precaudit import __version__
    from precaudit.errors import UserError
    from precaudit.reports import lint as report

    if listed:
        from precaudit.checks.lint.rules import every

        for line in report.rule_lines(every()):
            say(line)
        return 0
    if subject is None:
        raise UserError("SUBJECT is missing: a model such as tiny, or FILE.py:NAME")
    from precaudit.checks.lint.rules import every

    own = {"--policy": policy, "--set": settings or None, "--phase": phase, "--tokens": tokens, "--batch": batch}
    own["--mesh"] = mesh
    found = _lint(subject, tpu, device, own, run)
    if sarif is not None:
        import json

        from precaudit.cli._options import write

        write(sarif, json.dumps(report.sarif(found, every(), __version__), indent=1) + "\n")
    deliver(report.lint_report(found, subject, fail_on), as_json, **pages)
    return found.exit_code(fail_on)


def _lint(subject: str, tpu: str | None, device: str, own: dict[str, Any], folder: Path | None) -> Any:
    from precaudit.checks.lint.linting import PHASES, lint_model, lint_program
    from precaudit.checks.lint.recorded import read_extents
    from precaudit.errors import UserError
    from precaudit.interpreters.tpu.target import parse_target
    from precaudit.recording.programs.loading import is_reference, load_program
    from precaudit.schema.meshes import ONE, parse_mesh
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings

    target, run = None if tpu is None else parse_target(tpu), None if folder is None else read_extents(folder)
    with progress_bar("loading JAX") as advance:
        if is_reference(subject):
            if other := [name for name, value in own.items() if value is not None]:
                raise UserError(f"a program says itself what it runs on; leave out {', '.join(other)}")
            return lint_program(load_program(subject), target, device, advance, run)
        policy = apply_settings(load_policy(own["--policy"] or "bf16"), parse_settings(own["--set"] or ()))
        shape = ONE if own["--mesh"] is None else parse_mesh(own["--mesh"])
        phases = tuple(p.strip() for p in own["--phase"].split(",")) if own["--phase"] else PHASES
        return lint_model(
            subject,
            policy,
            target,
            phases,
            device,
            own["--tokens"] or 64,
            own["--batch"] or shape.data,
            advance,
            run,
            shape,
        )

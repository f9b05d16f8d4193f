"""``precaudit audit``: trace, compare and gate from precaudit.schema.toml: the command for CI."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from precaudit.cli._judged import Judged, judged_options
from precaudit.cli._options import SCREEN, cache_option, deliver, progress_bar, references, say

if TYPE_CHECKING:
    from precaudit.workflows.audit import Audit


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default="precaudit.toml", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@judged_options
@cache_option
def command(config: Path, settings: tuple[str, ...], to: Judged, no_cache: bool) -> int:
    """Trace, compare and judge as precaudit.toml says (for CI).

    Exit codes are those of gate. The run has errors.jsonl and report.md. If the judgement fails, its diagnosis follows
    (diagnose = false in precaudit.toml: none) and changes no exit code. --json prints verdicts alone.
    """
    from precaudit.cli._judged import deliver_judgement
    from precaudit.schema.policies import parse_settings
    from precaudit.workflows.audit import audit

    with progress_bar("loading JAX") as advance, references(no_cache) as cache:
        found = audit(config, parse_settings(settings), advance, cache)
    _report(found)
    code = deliver_judgement(found.judgement, str(found.run), to)
    if not to.report.as_json:
        _diagnosis(found)
        if to.report.markdown != SCREEN:
            say(f"Run: {found.run}; report: {found.run / 'report.md'}")
    return code


def _report(found: "Audit") -> None:
    """Write report.md of the run, with the audit's verdict and what was diagnosed."""
    from dataclasses import replace

    from precaudit.reports.comparison import recalled_report
    from precaudit.reports.gathered import gather_run
    from precaudit.reports.pages import as_markdown
    from precaudit.writing import write_whole

    report = recalled_report(replace(gather_run(found.run), judgement=found.judgement), page=True)
    write_whole(found.run / "report.md", as_markdown(report, 1, None), inside=True)


def _diagnosis(found: "Audit") -> None:
    """Print the conclusions of a diagnosis, or why there are none."""
    from precaudit.diagnosis.programs import Diagnosed
    from precaudit.reports.diagnosis import diagnosis_report
    from precaudit.reports.program_diagnosis import program_diagnosis_report

    if found.diagnosis is None:
        return
    say("")
    say("Diagnosis:")
    if isinstance(found.diagnosis, tuple):
        for line in found.diagnosis:
            say(line)
    elif isinstance(found.diagnosis, str):
        say(f"unknown: {found.diagnosis}")
    elif not found.diagnosis.findings and not found.diagnosis.unknown:
        say("? every operation is within the default limits: what fails is a limit of your own, or the baseline's")
    elif isinstance(found.diagnosis, Diagnosed):
        deliver(program_diagnosis_report(found.diagnosis, found.compared.errors))
    else:
        deliver(diagnosis_report(found.diagnosis))

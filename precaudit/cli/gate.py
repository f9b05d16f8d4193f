"""``precaudit gate``: judge errors against limits, budgets and a baseline."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._judged import Judged, judged_options
from precaudit.cli._options import filter_options
from precaudit.cli._runs import RunFolder, every_run

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters


@click.command()
@click.argument("source", type=RunFolder(several=True), metavar="RUN|ERRORS|ROLLOUTS")
@filter_options()
@click.option("--budgets", type=click.Path(path_type=Path), help="budgets.toml [default limits].")
@click.option("--baseline", type=click.Path(path_type=Path), help="Frozen errors to compare the run with.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="KIND=SIZE",
    help="Largest relative error from FP64 that passes, whatever explains it: forward=0.1, local=1e-2.",
)
@click.option("--across-devices", is_flag=True, help="Allow a baseline of another kind of device.")
@judged_options
@click.option("-v", "--verbose", is_flag=True, help="Every group of verdicts that do not pass.")
@click.pass_context
def command(context: click.Context, /, source: Path, filters: "Filters", to: Judged, **given: Any) -> int:
    """Judge a compared RUN, or a file of error records.

    For a folder of runs, which trace --policy A,B -o FOLDER writes, each is judged, and the worst exit code counts.

    ROLLOUTS: a file that rollout -o wrote; its budgets are [[rollout]] entries.

    With filters, the exit code is that of the verdicts that they select.

    Exit code 0: all pass. 1: a verdict is fail or nonfinite. 3: only missing, stale or unknown ones, or none at all.
    """
    runs = every_run(context, source, ("junit", "markdown", "html", "baseline"), "each is judged by itself")
    codes = [_judge(run, filters, to, given) for run in runs or [source]]
    return max(codes, key=(0, 3, 1).index)


def _judge(source: Path, filters: "Filters", to: Judged, given: dict[str, Any]) -> int:
    from precaudit.checks.rollouts.kinds import is_rollouts
    from precaudit.cli._judged import deliver_judgement
    from precaudit.errors import UserError
    from precaudit.judging.gate import Criteria, gate_selected

    stated = limits_of(given["limits"])
    budgets, baseline, across = given["budgets"], given["baseline"], given["across_devices"]
    if is_rollouts(source):
        if stated or filters.options:
            lacks, option = ("relative errors", "--limit") if stated else ("points", filters.options[0])
            raise UserError(f"{source} holds rollouts, which have no {lacks}; leave out {option}")
        from precaudit.checks.rollouts.gating import gate_rollouts

        judged = gate_rollouts(source, budgets, baseline, across)
    else:
        judged = gate_selected(source, Criteria(budgets, baseline, across, None, stated, filters))
    return deliver_judgement(judged, str(source), to, given["verbose"])


def limits_of(items: tuple[str, ...]) -> dict[str, float]:
    """Return the sizes that options state by kind; raises UserError for what is no KIND=SIZE."""
    from precaudit.errors import UserError

    found = {}
    for item in items:
        kind, _, size = item.partition("=")
        try:
            found[kind] = float(size)
        except ValueError:
            raise UserError(f"--limit {item!r} is no KIND=SIZE, such as forward=0.1") from None
    return found

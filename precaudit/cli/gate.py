"""``precaudit gate``: judge errors against limits, budgets and a baseline."""

from pathlib import Path

import click


@click.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="RUN|ERRORS|ROLLOUTS")
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
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write Markdown for a pull request here.")
@click.option("--github", is_flag=True, envvar="GITHUB_ACTIONS", help="Print GitHub annotations.")
@click.option("-v", "--verbose", is_flag=True, help="Every group of verdicts that do not pass.")
@click.option("--json", "as_json", is_flag=True, help="Print every verdict that is no pass as JSONL.")
def command(
    source: Path,
    budgets: Path | None,
    baseline: Path | None,
    limits: tuple[str, ...],
    across_devices: bool,
    junit: Path | None,
    markdown: Path | None,
    github: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Judge a compared RUN, or a file of error records.

    ROLLOUTS: a file that rollout -o wrote; its budgets are [[rollout]] entries.

    Exit code 0: all pass. 1: a verdict is fail or nonfinite. 3: only missing, stale or unknown ones, or none at all.
    """
    from precaudit.checks.rollouts.kinds import is_rollouts
    from precaudit.cli._judged import deliver_judgement
    from precaudit.errors import UserError
    from precaudit.judging.gate import gate

    stated = limits_of(limits)
    if is_rollouts(source):
        if stated:
            raise UserError(f"{source} holds rollouts, which have no relative errors; leave out --limit")
        from precaudit.checks.rollouts.gating import gate_rollouts

        judged = gate_rollouts(source, budgets, baseline, across_devices)
    else:
        judged = gate(source, budgets, baseline, across_devices, at_most=stated)
    return deliver_judgement(judged, str(source), junit, markdown, github, as_json, verbose)


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

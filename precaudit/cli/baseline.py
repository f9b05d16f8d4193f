"""``precaudit baseline``: freeze a run's errors for later runs to be held against."""

from pathlib import Path

import click

from precaudit.cli._options import say
from precaudit.cli._runs import RunFolder


@click.command()
@click.argument("run", type=RunFolder())
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="traces/baselines/NAME.jsonl")
@click.option("--accept", is_flag=True, help="Replace the baseline that is there.")
@click.option("--why", default="", metavar="TEXT", help="Why the new errors are the ones to keep.")
def command(run: Path, output: Path, accept: bool, why: str) -> None:
    """Freeze a RUN's errors, or a rollout's metrics, for later gates.

    RUN: a folder, or a file that rollout -o wrote.

    The file has no tensors. It says where the errors come from, and its own SHA-256.
    """
    from precaudit.checks.rollouts.kinds import is_rollouts
    from precaudit.judging.baselines import freeze_errors
    from precaudit.judging.recalled import provenance_of, recall_any

    if is_rollouts(run):
        from precaudit.checks.rollouts.frozen import freeze_rollouts

        frozen = freeze_rollouts(run, output, accept, why)
        of = f"rollouts of {frozen.of.model} ({frozen.of.device})"
        return _tell(output, of, frozen.sha256, len(frozen.chain))
    found = recall_any(run)
    record = freeze_errors(found.errors, provenance_of(found.run), str(run), output, accept, why)
    return _tell(output, f"run {record.run} ({record.device})", record.sha256, len(record.chain))


def _tell(output: Path, of: str, sha256: str, before: int) -> None:
    links = f", {before} before it" if before else ""
    say(f"{output}: baseline of {of}, SHA-256 {sha256[:12]}…{links}")

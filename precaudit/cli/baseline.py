"""``precaudit baseline``: freeze a run's errors for later runs to be held against."""

from pathlib import Path

import click

from precaudit.cli._options import say


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="traces/baselines/NAME.jsonl")
@click.option("--accept", is_flag=True, help="Replace the baseline that is there.")
@click.option("--why", default="", metavar="TEXT", help="Why the new errors are the ones to hold.")
def command(run: Path, output: Path, accept: bool, why: str) -> None:
    """Freeze a compared RUN's errors, to hold later runs against.

    The file holds no tensors; it says where the errors come from, and its own SHA-256.
    """
    from precaudit.judging.baselines import freeze, freeze_errors
    from precaudit.judging.programs import errors_of, provenance
    from precaudit.runs.programs import is_program_run, open_program_run
    from precaudit.runs.written import recall

    if is_program_run(run):
        opened = open_program_run(run)
        record = freeze_errors(errors_of(opened), provenance(opened), str(run), output, accept, why)
    else:
        record = freeze(recall(run), output, accept, why)
    links = f", {len(record.chain)} before it" if record.chain else ""
    say(f"{output}: baseline of run {record.run} ({record.device}), SHA-256 {record.sha256[:12]}…{links}")

"""``precaudit import``: tensors that another framework wrote become a run."""

import sys
from pathlib import Path

import click

from precaudit.cli._options import progress_bar, say

LISTED = 8  # names of a dump that are shown


@click.command()
@click.argument("dump", type=click.Path(path_type=Path))
@click.option(
    "--map",
    "names",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='TOML of names: q = "layers.{i}.q"; without it, names are ours: case/call/layer/q.',
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The run's folder.")
@click.option("--force", is_flag=True, help="Replace a run that is there.")
def command(dump: Path, names: Path | None, output: Path, force: bool) -> None:
    """Make a run of another framework's tensors.

    DUMP: a folder of .npy, .npz, .safetensors and .jsonl, or one such file.

    Then compare it: precaudit compare OUTPUT RUN. Arrays that no entry of the map takes are listed, and so are
    those that are not there.
    """
    from precaudit.recording.dumps.importing import import_dump

    with progress_bar() as advance:
        found = import_dump(dump, output, names, force, " ".join(["precaudit", *sys.argv[1:]]), advance)
    record = found.record
    for what, its in (("not taken", record.left_out), ("not there", record.absent)):
        if its:
            more = f" and {len(its) - LISTED} more (run.json has all)" if len(its) > LISTED else ""
            say(f"{what}, {len(its)}: {', '.join(its[:LISTED])}{more}")
    cases = dict.fromkeys(t.prompt for t in record.tensors)
    told = f", {len(record.reported)} reported numbers" if record.reported else ""
    after = f"Next: precaudit compare {output} --model PATH (FP64 of its weights), or compare {output} RUN"
    say(f"{output}: {len(record.tensors)} tensors of {len(cases)} cases{told}. {after}")

"""``precaudit init``: a commented start for audits in CI."""

from pathlib import Path

import click

from precaudit.cli._options import say


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".")
def command(folder: Path) -> None:
    """Write precaudit.toml, budgets.toml and a GitHub workflow to FOLDER [.]."""
    from precaudit.audit import init

    for path in init(folder):
        say(f"wrote {path}")
    say("Next: precaudit audit")

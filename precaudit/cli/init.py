"""``precaudit init``: a gate on one's own program, or on a checkpoint, for CI."""

import click

from precaudit.cli._options import say


@click.command()
@click.argument("subject", required=False)
@click.option("--reference", metavar="FILE.py:NAME", help="A program's formula in FP64, as compare --reference has it.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
def command(subject: str | None, reference: str | None, force: bool) -> None:
    """Write a first audit for CI: settings, budgets, a workflow.

    precaudit.toml, budgets.toml, .github/workflows/precaudit.yml and lines of .gitignore are written here.

    SUBJECT is what they audit: a precaudit.Program of your own as FILE.py:NAME or module:NAME (its code
    runs), a checkpoint's folder, a .gguf file or a hub id. It is asked for on a terminal.
    """
    from precaudit.workflows.package_source import package_source
    from precaudit.workflows.starter import init

    for path in init(subject or _ask(), ".", reference, force):
        say(f"wrote {path}")
    say(f"assumed: {package_source().assumes}")
    say("Next: precaudit audit")


def _ask() -> str:
    """Return what is typed on a terminal; raises UserError elsewhere."""
    import sys

    from precaudit.errors import UserError

    if not sys.stdin.isatty():
        raise UserError("SUBJECT is missing: what is audited. Type: precaudit init FILE.py:NAME (or a checkpoint)")
    text: str = click.prompt("What is audited (FILE.py:NAME, module:NAME, a checkpoint's folder, .gguf file or hub id)")
    return text.strip()

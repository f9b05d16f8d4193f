"""``precaudit models``: what can be loaded, and what a path holds."""

import click

from precaudit.cli._options import Delivery, deliver, progress_bar, report_options


@click.command()
@click.argument("subject", required=False)
@click.option("--check", is_flag=True, help="Read every tensor of SUBJECT: finite, shape, hash. Runs nothing.")
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over.")
@report_options("facts, with --check a line for each tensor,")
def command(subject: str | None, check: bool, allow_field: tuple[str, ...], to: Delivery) -> int:
    """Show what can be loaded, or what SUBJECT has.

    Without SUBJECT: what is supported and installed. With it: what would be loaded, its points and the size of a run.

    Exit code 1: --check found values that are not finite.
    """
    from precaudit.errors import UserError
    from precaudit.reports.models import check_report, models_report

    if subject is None:
        if check:
            raise UserError("--check needs a SUBJECT: precaudit models --check tiny")
        deliver(models_report(), to)
        return 0
    from precaudit.models.checkpoints import open_checkpoint
    from precaudit.models.checkpoints.inspection import inspect_tensors

    opened = open_checkpoint(subject, allow_field)
    if not check:
        deliver(models_report(opened), to)
        return 0
    found = []
    with progress_bar() as advance:
        total = len(opened.tensors.shapes())
        for i, tensor in enumerate(inspect_tensors(opened)):
            found.append(tensor)
            advance(i + 1, total, tensor.name)
    deliver(check_report(opened, found), to)
    return int(any(t.nonfinite for t in found))

"""``precaudit doctor``: what is installed, what it can do here, and what the caches hold."""

import click

from precaudit.cli._options import Delivery, deliver, report_options

CLEARED = {
    "references": ("references",),
    "programs": ("programs",),
    "buckets": ("buckets",),
    "all": ("references", "programs", "trusted", "buckets"),
}


@click.command()
@click.option("--clear", type=click.Choice(list(CLEARED)), help="Delete what is cached, and say how much it was.")
@report_options("facts")
def command(clear: str | None, to: Delivery) -> int:
    """Show versions, devices, caches, and what is missing here.

    Exit code 0: all that precaudit needs is here. 1: something is broken; it is said first.
    """
    from precaudit.reports.doctor import checkup_report, cleared_report

    if clear is not None:
        from precaudit.checks.doctor import caches

        freed = [caches.clear(kind) for kind in CLEARED[clear]]
        deliver(cleared_report(freed), to)
        return 2 if any(each.kept for each in freed) else 0
    from precaudit.checks.doctor.checkup import examine

    found = examine()
    deliver(checkup_report(found), to)
    return found.exit_code

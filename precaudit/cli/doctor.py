"""``precaudit doctor``: what is installed, what it can do here, and what the caches hold."""

import click

CLEARED = {"references": ("references",), "programs": ("programs",), "all": ("references", "programs", "trusted")}


@click.command()
@click.option("--clear", type=click.Choice(list(CLEARED)), help="Delete what is cached, and say how much it was.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(clear: str | None, as_json: bool) -> int:
    """Show versions, devices, caches, and what is missing here.

    Exit code 0: all that precaudit needs is here. 1: something is broken; it is said first.
    """
    from precaudit.cli._options import deliver
    from precaudit.reports.doctor import checkup_report, cleared_report

    if clear is not None:
        from precaudit.checks.doctor import caches

        freed = [caches.clear(kind) for kind in CLEARED[clear]]
        deliver(cleared_report(freed), as_json)
        return 2 if any(each.kept for each in freed) else 0
    from precaudit.checks.doctor.checkup import examine

    found = examine()
    deliver(checkup_report(found), as_json)
    return found.exit_code

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
    if clear is not None:
        return _clear(CLEARED[clear], as_json)
    from dataclasses import asdict

    from precaudit.checks.doctor.checkup import examine
    from precaudit.cli._options import say, text_width
    from precaudit.reports import doctor

    found = examine()
    if as_json:
        import json

        click.echo(json.dumps(asdict(found)))
    else:
        for line in doctor.lines(found, text_width()):
            say(line)
    return found.exit_code


def _clear(kinds: tuple[str, ...], as_json: bool) -> int:
    """Empty caches, and say what was freed; 2 where something could not be deleted."""
    from dataclasses import asdict

    from precaudit.checks.doctor import caches
    from precaudit.cli._options import say
    from precaudit.reports import doctor

    found = [caches.clear(kind) for kind in kinds]
    if as_json:
        import json

        click.echo(json.dumps([asdict(each) for each in found]))
    else:
        for each in found:
            say(doctor.cleared(each))
    return 2 if any(each.kept for each in found) else 0

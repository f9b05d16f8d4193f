"""``precaudit open``: a compared run as one sitting in a terminal."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precaudit.cli._options import filter_options, say
from precaudit.cli._runs import RunFolder

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters

OURS = 70  # the exit code of a fault of ours, whose traceback textual has printed


@click.command()
@click.argument("run", type=RunFolder())
@filter_options()
def command(run: Path, filters: "Filters") -> int:
    """Look at RUN in the terminal: a heat map to walk on.

    Arrows move over layers and points, with Shift they select. Enter tells a cell's story, / filters, Tab shows the
    next map, d diagnoses what is selected, c compares with another run, x writes the selection as a command line.
    What is written beside the run meanwhile is shown. Needs the extra session.
    """
    from precaudit.errors import UserError
    from precaudit.reports.session.reading import require_readable

    require_readable(run)
    if find_spec("textual") is None:
        raise UserError("open needs textual: pip install 'precaudit[session]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"open needs a terminal; without one: precaudit report {run}")
    from precaudit.reports.session.app import Sitting

    sitting = Sitting(run, filters)
    sitting.run()
    if sitting.failed is not None:
        raise sitting.failed
    for line in sitting.commands:
        say(line)
    return OURS if sitting.return_code else 0

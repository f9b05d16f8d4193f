"""The same run once more: does it give the same bits twice."""

from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precaudit.errors import UserError
from precaudit.mirrors import takes_urls
from precaudit.progress import Progress
from precaudit.recording.opening import AnyRun, open_any
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run

if TYPE_CHECKING:
    from precaudit.recording.runs.bits import Repeat
    from precaudit.recording.tracing.subject import Subject


@takes_urls
def repeat(
    run: AnyRun | Path | str,
    output: Path | str,
    subject: "Subject | Program | str | None" = None,
    force: bool = False,
    progress: Progress | None = None,
) -> "Repeat":
    """Trace what a run recorded again, as it was recorded, into ``output``, and compare every tensor bit for bit.

    ``subject``: its program, where it was not the shipped decoder; of a Program's run that Program or its name, by
    default the one that the run names. Raises UserError as ``trace`` does, and where the program is not at hand.
    """
    return _repeated(open_any(run), output, subject, force, progress or Progress())


@singledispatch
def _repeated(run: Any, _output: Path | str, _given: Any, _force: bool, _progress: Progress) -> "Repeat":
    raise UserError(f"{run.folder} was imported: nothing here made it")


@_repeated.register(Opened)
def _(run: Opened, output: Path | str, given: Any, force: bool, progress: Progress) -> "Repeat":
    from precaudit.recording.programs.repeat import repeat_program

    return repeat_program(run, output, given, force, progress.advance)


@_repeated.register(Run)
def _(run: Run, output: Path | str, given: Any, force: bool, progress: Progress) -> "Repeat":
    from precaudit.recording.tracing.repeat import repeat as repeat_model

    return repeat_model(run, output, given, force, progress)

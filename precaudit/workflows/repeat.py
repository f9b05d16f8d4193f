"""The same run once more: does it give the same bits twice."""

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
    opened, told = open_any(run), progress or Progress()
    given: Any = subject
    if isinstance(opened, Opened):
        from precaudit.recording.programs.repeat import repeat_program

        return repeat_program(opened, output, given, force, told.advance)
    if isinstance(opened, Run):
        from precaudit.recording.tracing.repeat import repeat as repeat_model

        return repeat_model(opened, output, given, force, told)
    raise UserError(f"{opened.folder} was imported: nothing here made it")

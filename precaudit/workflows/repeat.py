"""The same run once more, of a model or of a program: does it give the same bits twice."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from precaudit.progress import Progress
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.workflows.kinds_of_runs import is_of_program

if TYPE_CHECKING:
    from precaudit.recording.programs.repeat import ProgramRepeat
    from precaudit.recording.runs.reader import Run
    from precaudit.recording.tracing.repeat import Repeat
    from precaudit.recording.tracing.subject import Subject


@overload
def repeat(
    run: Opened,
    output: Path | str,
    subject: Program | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> "ProgramRepeat": ...
@overload
def repeat(
    run: "Run | Path | str",
    output: Path | str,
    subject: "Subject | None" = None,
    force: bool = False,
    progress: Progress | None = None,
) -> "Repeat": ...
def repeat(
    run: Any, output: Path | str, subject: Any = None, force: bool = False, progress: Progress | None = None
) -> Any:
    """Trace what a run recorded again, as it was recorded, into ``output``, and compare every tensor bit for bit.

    ``subject``: its program, where it was not the shipped decoder; of a Program's run that Program or its name, by
    default the one that the run names. Raises UserError as ``trace`` does, and where the program is not at hand.
    """
    if is_of_program(run):
        from precaudit.recording.programs.repeat import repeat_program as of_program

        return of_program(run, output, subject, force, (progress or Progress()).advance)
    from precaudit.recording.tracing.repeat import repeat as of_model

    return of_model(run, output, subject, force, progress)

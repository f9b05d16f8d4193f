"""Of what a run is that a verb is given: of a model, of a program, or imported; opened, or its folder."""

from pathlib import Path
from typing import Any

from precaudit.recording.dumps.runs import Imported, is_imported
from precaudit.recording.runs.programs import MANIFEST, Opened, is_program_run


def folder_of(run: Any) -> Any:
    """Return the folder of a run that was opened; what is not is its folder."""
    return getattr(run, "folder", run)


def is_import(run: Any) -> bool:
    """Whether a run was imported from a dump."""
    return isinstance(run, Imported) or (isinstance(run, Path | str) and is_imported(run))


def is_run(run: Any) -> bool:
    """Whether it is a run of a model or of a program, and not a Program or its name."""
    folder = folder_of(run)
    return isinstance(folder, Path | str) and any((Path(folder) / name).is_file() for name in ("run.json", MANIFEST))


def is_of_program(run: Any) -> bool:
    """Whether a run is of a program of one's own."""
    return isinstance(run, Opened) or (isinstance(run, Path | str) and is_program_run(run))

"""Folders that hold sketches in place of tensors: a program's run, or of a model one for each length of prompts."""

from contextlib import suppress
from pathlib import Path

from precaudit.errors import UserError
from precaudit.recording.runs.folders import runs_of_lengths
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.programs import Opened, ProgramRun, is_program_run, open_program_run
from precaudit.schema.records.lines import read_record


def sketches_in(folder: Path | str) -> dict[str, Opened]:
    """Return the runs of sketches in a folder by name, or the one that it is; raises UserError where it holds none."""
    own = _folders(Path(folder))
    if not own:
        raise UserError(f"{folder}: no sketches here; make some with: precaudit trace SUBJECT --sketch 128 -o {folder}")
    return {"" if p == Path(folder) else p.name: open_program_run(p, sketched=True) for p in own}


def is_sketched(folder: Path | str) -> bool:
    """Whether a folder holds sketches in place of tensors."""
    for path in _folders(Path(folder)):
        with suppress(UserError):  # which is said where it is opened
            if read_record(manifest_of(path), ProgramRun, "a program's run").sketch is not None:
                return True
    return False


def _folders(folder: Path) -> list[Path]:
    """Return the runs of programs in a folder: itself, or one for each length of a model's prompts."""
    return [folder] if is_program_run(folder) else runs_of_lengths(folder)

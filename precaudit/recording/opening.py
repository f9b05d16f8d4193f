"""A run of any kind opened by its folder: of a model, of a program, or of tensors that another framework dumped."""

import hashlib
from pathlib import Path

from precaudit.mirrors import takes_urls
from precaudit.recording.dumps.runs import Imported, open_imported
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import kind_of, manifest_of, tag_of
from precaudit.recording.runs.programs import Opened, open_program_run
from precaudit.recording.runs.reader import Run, open_run

AnyRun = Run | Opened | Imported


def open_any(run: AnyRun | Path | str, partial: bool = False, held: bool = True) -> AnyRun:
    """Return a run opened, by what its folder holds; what is opened already is returned as it is.

    A dump is an ``Imported``, also where it is known whose weights made it. ``partial``: open a run that was cut off;
    ``held``: whether lines of tables are in memory. Raises UserError for what is no run.
    """
    if isinstance(run, AnyRun):
        return run
    kind = kind_of(run)
    if kind == "dump":
        return open_imported(run)
    return open_program_run(run, partial=partial) if kind == "program" else open_run(run, partial, held)


@takes_urls
def open_known(run: AnyRun | Path | str, partial: bool = False) -> AnyRun:
    """Return the same, a dump as the run of a model where it was compared with FP64 of one: ``precaudit.open_run``."""
    if isinstance(run, Path | str) and kind_of(run) == "dump" and tag_of(run) == "model":
        return open_run(run, partial)
    return open_any(run, partial)


def holds_run(x: object) -> bool:
    """Whether it is a run, opened or by its folder, of any kind."""
    if isinstance(x, Path | str):
        return kind_of(x) is not None
    return isinstance(x, AnyRun)


def against_folder(run: Path, other: Path) -> Path:
    """Return where the records of a run against another lie: a folder for each other, named by its identity."""
    return run / "against" / hashlib.sha256(file_hash(manifest_of(other)).encode()).hexdigest()[:8]

"""A run of any kind opened by its folder: of a model, of a program, or of tensors that another framework dumped."""

import hashlib
from pathlib import Path

from precaudit.mirrors import takes_urls
from precaudit.recording.dumps.runs import Imported, is_imported, open_imported
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import Opened, is_program_run, open_program_run
from precaudit.recording.runs.reader import Run, open_run

AnyRun = Run | Opened | Imported
MANIFESTS = ("run.json", "program.json", "dump.json")  # the first that is there names the run's identity


def open_any(run: AnyRun | Path | str, partial: bool = False, held: bool = True) -> AnyRun:
    """Return a run opened, by what its folder holds; what is opened already is returned as it is.

    A dump is an ``Imported``, also where it is known whose weights made it. ``partial``: open a run that was cut off;
    ``held``: whether lines of tables are in memory. Raises UserError for what is no run.
    """
    if isinstance(run, AnyRun):
        return run
    kind = kind_of(run)
    if kind is Imported:
        return open_imported(run)
    return open_program_run(run, partial=partial) if kind is Opened else open_run(run, partial, held)


@takes_urls
def open_known(run: AnyRun | Path | str, partial: bool = False) -> AnyRun:
    """Return the same, a dump as the run of a model where it was compared with FP64 of one: ``precaudit.open_run``."""
    if isinstance(run, Path | str) and is_imported(run) and (Path(run) / "run.json").is_file():
        return open_run(run, partial)
    return open_any(run, partial)


def kind_of(folder: Path | str) -> type[AnyRun] | None:
    """Return the type of the run that a folder holds, by which files are there; None where no run is."""
    if is_imported(folder):
        return Imported
    return Opened if is_program_run(folder) else Run if (Path(folder) / "run.json").is_file() else None


def holds_run(x: object) -> bool:
    """Whether it is a run, opened or by its folder, of any kind."""
    if isinstance(x, Path | str):
        return kind_of(x) is not None
    return isinstance(x, AnyRun)


def manifest_of(folder: Path) -> Path:
    """Return the manifest of a run that was opened: the file whose hash is the run's identity."""
    return next(p for name in MANIFESTS if (p := folder / name).is_file())


def against_folder(run: Path, other: Path) -> Path:
    """Return where the records of a run against another lie: a folder for each other, named by its identity."""
    return run / "against" / hashlib.sha256(file_hash(manifest_of(other)).encode()).hexdigest()[:8]

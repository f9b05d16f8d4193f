"""What diagnosis keeps beside a run, and whether it still holds: the run, the code and the bytes are what they were."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from precaudit.caching import DIAGNOSES, computed_by
from precaudit.diagnosis.records import Kept
from precaudit.records import Record, read_lines, write_lines
from precaudit.store import Run, file_hash

NAME = "kept.json"
R = TypeVar("R", bound=Record)


def held(run: Run, name: str, kind: type[R]) -> tuple[R, ...] | None:
    """Return what was kept in a file of JSON lines; None where it is not there, of another run, code or content."""
    before, path = _read(run), run.folder / name
    if before is None or not path.is_file() or before.files.get(name) != file_hash(path):
        return None
    return tuple(read_lines(path, kind))


def keep(run: Run, name: str, records: Sequence[R]) -> tuple[R, ...]:
    """Write records to a file that ``held`` will return; return them."""
    before = _read(run)
    write_lines(run.folder / name, records)
    files = {**(before.files if before is not None else {}), name: file_hash(run.folder / name)}
    write_lines(run.folder / NAME, [Kept(*_identity(run), files)])
    return tuple(records)


def _identity(run: Run) -> tuple[str, str]:
    return file_hash(run.folder / "run.json"), computed_by(DIAGNOSES)


def _read(run: Run) -> Kept | None:
    try:
        found = msgspec.json.decode((run.folder / NAME).read_bytes(), type=Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if (found.run, found.code) == _identity(run) else None

"""What diagnosis keeps beside a run, and whether it still holds: the run, the code and the bytes are what they were."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from precaudit.caching import DIAGNOSES, computed_by
from precaudit.diagnosis.evidence.records import Kept
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.schema.records.base import Record
from precaudit.schema.records.lines import read_lines, write_lines

NAME = "kept.json"
R = TypeVar("R", bound=Record)


def read_kept(folder: Path, name: str, kind: type[R]) -> tuple[R, ...] | None:
    """Return what was kept in a file of JSON lines; None where it is not there, of another run, code or content."""
    before, path = _read_identity(folder), folder / name
    if before is None or not path.is_file() or before.files.get(name) != file_hash(path):
        return None
    return tuple(read_lines(path, kind))


def write_kept(folder: Path, name: str, records: Sequence[R]) -> tuple[R, ...]:
    """Write records to a file that ``read_kept`` will return; return them."""
    before = _read_identity(folder)
    write_lines(folder / name, records)
    files = {**(before.files if before is not None else {}), name: file_hash(folder / name)}
    write_lines(folder / NAME, [Kept(*_identity(folder), files)])
    return tuple(records)


def _identity(folder: Path) -> tuple[str, str]:
    """Return the hashes of a run's manifest, a model's or a program's, and of the code."""
    return file_hash(manifest_of(folder)), computed_by(DIAGNOSES)


def _read_identity(folder: Path) -> Kept | None:
    try:
        found = msgspec.json.decode((folder / NAME).read_bytes(), type=Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if (found.run, found.code) == _identity(folder) else None

"""Which kind of run a folder holds, by its manifest."""

from pathlib import Path
from typing import Literal, get_args

import msgspec

from precaudit.errors import UserError
from precaudit.schema.records.manifests import MANIFEST, SCHEMA, Manifest
from precaudit.writing import write_whole

Kind = Literal["model", "program", "dump"]
FORMER: dict[str, Kind] = {"program.json": "program", "dump.json": "dump"}  # manifests of before
KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
MANIFESTS = (MANIFEST, *FORMER)


class _Ours(msgspec.Struct, frozen=True):
    """What the manifest of every run of ours has."""

    schema: int
    id: str
    command: str


class _Said(msgspec.Struct, frozen=True):
    schema: int = 0
    kind: str = "model"
    imported: msgspec.Raw = msgspec.Raw(b"null")


def manifest_of(folder: Path | str) -> Path:
    """Return the manifest of a run, whose hash is the run's identity: run.json where no other is there."""
    found = (path for name in MANIFESTS if (path := Path(folder) / name).is_file())
    return next(found, Path(folder) / MANIFEST)


def tag_of(folder: Path | str) -> Kind | None:
    """Return what a folder's manifest is of; None where none is.

    One that cannot be read is a model's, which says so where it is opened.
    """
    path = manifest_of(folder)
    if not path.is_file():
        return None
    return FORMER.get(path.name) or KINDS.get(_read(path).kind, "model")


def kind_of(folder: Path | str) -> Kind | None:
    """Return what a folder's run is of: a dump stays one where its manifest says whose weights made it."""
    tag, path = tag_of(folder), Path(folder)
    if tag == "model" and (bytes(_read(path / MANIFEST).imported) != b"null" or (path / "dump.json").is_file()):
        return "dump"
    return tag


def check_schema(path: Path) -> None:
    """Raise UserError for a manifest that is newer than what is read here."""
    if (schema := _read(path).schema) > SCHEMA:
        raise UserError(f"{path}: schema {schema} is newer than this precaudit reads ({SCHEMA}): upgrade precaudit")


def check_ours(folder: Path) -> None:
    """Raise UserError where a manifest is another tool's."""
    path = manifest_of(folder)
    try:
        msgspec.json.decode(path.read_bytes(), type=_Ours)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: {error}") from None


def _read(path: Path) -> _Said:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Said)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Said()


def write_manifest(folder: Path, record: Manifest) -> None:
    """Write run.json."""
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", inside=True)

"""What ``compare`` has written beside a program's run: compared.json, and the records that it says are of this run."""

from collections.abc import Sequence

import msgspec

from precaudit.errors import UserError
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.programs import PAIRS, Opened
from precaudit.recording.runs.written import Comparison
from precaudit.schema.filed import Filed
from precaudit.schema.records.base import Record
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord
from precaudit.schema.records.lines import read_lines, write_lines
from precaudit.writing import write_whole

MARKS, ERRORS = "compared.json", "errors.jsonl"


class Unpaired(Record, frozen=True, omit_defaults=False):
    """An entry point of a case whose positions could be held against no other entry point's, and why."""

    case: str
    phase: str
    why: str


class Compared(Record, frozen=True, omit_defaults=False):
    """compared.json: which run the error records beside it are of, and their hash.

    ``names``: the textbook that formula records are against, as ``Names`` has it; ``told``: what these rest on.
    ``accum``: formats that sums of products were made in, too. ``pairs``: the hash of prefill_decode.jsonl, where the
    entry points see positions twice; ``unpaired``: what of them could not be held against another. ``code``: what
    computed the records, empty of those that do not say.
    """

    run: str
    errors: str
    names: dict[str, str] = msgspec.field(default_factory=dict)
    told: tuple[str, ...] = ()
    accum: tuple[str, ...] = ()
    pairs: str = ""
    unpaired: tuple[Unpaired, ...] = ()
    code: str = ""


def is_compared(opened: Opened) -> bool:
    """Whether ``compare`` has written anything of a run."""
    return (opened.folder / MARKS).is_file() and (opened.folder / ERRORS).is_file()


def marks_of(opened: Opened) -> Compared:
    """Return what compare says of its records; raises UserError where the run was not compared."""
    marks = opened.folder / MARKS
    if not is_compared(opened):
        part = " --partial" if opened.absent else ""
        raise UserError(f"{opened.folder} was not compared yet: precaudit compare {opened.folder}{part}")
    try:
        return msgspec.json.decode(marks.read_bytes(), type=Compared)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{marks}: {error}") from None


def program_errors(opened: Opened) -> list[ErrorRecord]:
    """Return the error records of a compared run; raises UserError where there are none, or of another run."""
    return list(filed_errors(opened))


def filed_errors(opened: Opened) -> Filed[ErrorRecord]:
    """Return the same, which stay in their file; raises UserError as ``program_errors``."""
    path, found = opened.folder / ERRORS, marks_of(opened)
    if found.run != file_hash(manifest_of(opened.folder)) or found.errors != file_hash(path):
        raise UserError(f"{path} is not what compare wrote of this run: precaudit compare {opened.folder}")
    return Filed(path, ERROR_KINDS)


def recall_program(opened: Opened) -> Comparison[Opened]:
    """Return what compare has written of a run, whose records stay in their file; raises UserError as they do."""
    return Comparison(opened, filed_errors(opened), pairs_of(opened), marks_of(opened).told, opened.folder)


def pairs_of(opened: Opened) -> list[PrefillDecodeRecord]:
    """Return the records of positions that entry points see twice; raises UserError where they are of another run."""
    path, found = opened.folder / PAIRS, marks_of(opened)
    if not found.pairs:
        return []
    if not path.is_file() or found.pairs != file_hash(path):
        raise UserError(f"{path} is not what compare wrote of this run: precaudit compare {opened.folder}")
    return read_lines(path, PrefillDecodeRecord)


def write_compared(
    opened: Opened, errors: Sequence[ErrorRecord], pairs: Sequence[PrefillDecodeRecord], marks: Compared
) -> None:
    """Write records beside a run, and what says that they are of it: ``marks`` with their hashes."""
    write_lines(opened.folder / ERRORS, errors)
    write_lines(opened.folder / PAIRS, pairs)
    hashes = [file_hash(opened.folder / name) for name in (ERRORS, PAIRS)]
    whole = msgspec.structs.replace(marks, run=file_hash(manifest_of(opened.folder)), errors=hashes[0], pairs=hashes[1])
    write_whole(opened.folder / MARKS, msgspec.json.encode(whole) + b"\n", inside=True)

"""Records read from files and written to them, one JSON line each."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from precaudit.errors import UserError
from precaudit.schema.records.base import Record
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord
from precaudit.writing import whole

R = TypeVar("R", bound=Record)
_ENCODER = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """Return one JSON line, newline included."""
    return _ENCODER.encode(record) + b"\n"


def decode_lines(data: bytes, kind: type[R], where: str, tolerate_tail: bool = False) -> Iterator[R]:
    """Yield the records of JSONL ``data``; raises UserError naming the line and field that is wrong.

    ``tolerate_tail``: a last line without its newline (a run that was cut off) is left out.
    """
    decode = msgspec.json.Decoder(kind).decode
    lines = data.split(b"\n")
    if lines[-1] and tolerate_tail:
        lines.pop()
    return (decode_line(decode, line, where, i) for i, line in enumerate(lines, 1) if line)


def decode_line(decode: Callable[[bytes], R], line: bytes, where: str | Path, i: int) -> R:
    """Return the record that line ``i`` of a file holds; raises UserError naming file, line and field."""
    try:
        return decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}:{i}: {error}") from None


def read_record(path: Path, kind: type[R], what: str) -> R:
    """Return the record that a JSON file holds; raises UserError where it is not there or is not ``what``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not {what}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def read_lines(path: Path, kind: type[R]) -> list[R]:
    """Return every record of a JSONL file; raises UserError naming file, line and field."""
    return list(decode_lines(path.read_bytes(), kind, str(path)))


def read_layers(path: Path, layers: Iterable[int]) -> list[ErrorRecord]:
    """Return the error records of some layers and those outside layers; other lines are not parsed.

    The layer is looked for in the line's bytes as ``encode`` writes it, which cannot miss one.
    """
    wanted = [b'"layer":null,', *(b'"layer":%d,' % layer for layer in layers)]
    lines = path.read_bytes().split(b"\n")
    return list(decode_lines(b"\n".join(x for x in lines if any(w in x for w in wanted)), ERROR_KINDS, str(path)))


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records into a folder of ours, whole or not at all."""
    with whole(path, inside=True) as f:
        f.writelines(encode(r) for r in records)

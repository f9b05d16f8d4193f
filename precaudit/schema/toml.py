"""TOML as users write it: one reader for all of it, and what it takes is bounded."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from precaudit.errors import UserError, nearest

T = TypeVar("T", bound=msgspec.Struct)
DEEPEST = 64  # tables and arrays in one another; no file of ours needs four
BITS = 63  # of an integer beside its sign, which TOML 1.0 asks a reader to hold ("Integer")


def read_toml(path: Path, missing: str = "") -> dict[str, Any]:
    """Return the table that a TOML file holds; raises UserError: ``missing`` where it is not there."""
    return toml_table(toml_bytes(path, missing), str(path))


def toml_bytes(path: Path, missing: str = "") -> bytes:
    """Return a file's bytes; raises UserError: ``missing`` where it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(missing or f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def toml_table(data: bytes, where: str) -> dict[str, Any]:
    """Return the table that TOML in UTF-8 says; raises UserError that begins with ``where``."""
    try:
        table = tomllib.loads(data.decode())
        _check_bounds(table)
    except RecursionError:
        raise UserError(f"{where}: not TOML: nested too deep") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TooMuch) as error:
        raise UserError(f"{where}: not TOML: {error}") from None
    except ValueError:  # CPython reads no decimal integer of more than 4300 digits
        raise UserError(f"{where}: not TOML: {TooMuch.integer}") from None
    return table


class TooMuch(Exception):
    """What is no TOML that is read here, though its grammar has it."""

    integer = f"an integer of more than {BITS + 1} bits"


def _check_bounds(table: dict[str, Any]) -> None:
    """Raise TooMuch for integers beyond TOML's, for what is nested too deep (no recursion), and for NUL in a text."""
    left: list[tuple[Any, int]] = [(table, 1)]
    while left:
        x, depth = left.pop()
        if depth > DEEPEST:
            raise TooMuch(f"nested more than {DEEPEST} deep")
        if isinstance(x, int) and not -(1 << BITS) <= x < 1 << BITS:
            raise TooMuch(TooMuch.integer)
        if isinstance(x, str) and "\0" in x:
            raise TooMuch("a NUL character, which no name and no path has")
        inner = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
        left += [(y, depth + 1) for y in inner]


def of_table(raw: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Return a table of a user's TOML file as a record; raises UserError that begins with ``where``."""
    names = kind.__struct_fields__
    for key in raw:
        if key not in names:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, names)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from None

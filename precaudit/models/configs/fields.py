"""A field of a JSON configuration: its type, its default, and a message that names it."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from precaudit.errors import UserError

Raw = Mapping[str, Any]
REQUIRED = object()
KINDS = {int: "a whole number", float: "a finite floating-point number", bool: "true or false", str: "a name"}


def take(raw: Raw, name: str, kind: type, default: Any = REQUIRED, null: bool = False) -> Any:
    """Return a field that has to be of JSON type ``kind``, or ``default``; ``null``: null is a value of it.

    Raises UserError for another type: transformers' configurations are as strict.
    """
    found = raw.get(name, default)
    if found is REQUIRED:
        raise UserError(f"field {name!r} is missing")
    if found is None and null:
        return None
    if type(found) is not kind or (isinstance(found, float) and not isfinite(found)):
        raise UserError(f"{name} = {found!r} is not {KINDS[kind]}")
    return found


def number(raw: Raw, name: str, default: Any = REQUIRED, null: bool = False) -> Any:
    """Return a number, whole or not, or null where that is a value."""
    found = raw.get(name, default)
    if found is REQUIRED:
        raise UserError(f"{name!r} is missing")
    if found is None and null:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
        raise UserError(f"{name} = {found!r} is not a finite number")
    return float(found)

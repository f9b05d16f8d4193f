"""Bytes in words, as ``3.2 GB``, and read of them."""

import re

from precaudit.errors import UserError

UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def bytes_text(n: float) -> str:
    """Return a number of bytes with the largest unit that it has one of, and three digits at most: ``3.2 GB``."""
    for unit, size in UNITS.items():
        if n >= size:
            return f"{n / size:.1f} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes that ``"8GB"`` or ``"500 MB"`` says; raises UserError, which names the option."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?B?)\s*", text)
    if found is None:
        raise UserError(f"{option} {text}: a number of bytes is wanted, such as 8GB or 500MB")
    if not found[2]:
        raise UserError(f"{option} {text}: the unit is missing; write {found[1]}GB, {found[1]}MB or {found[1]}B")
    unit = found[2].removesuffix("B").replace("K", "k")
    return int(float(found[1]) * (UNITS[unit + "B"] if unit else 1))


def bytes_of(given: int | str | None, option: str) -> int | None:
    """Return bytes given as a number or as text, None of nothing; raises UserError, which names the option."""
    return parse_bytes(given, option) if isinstance(given, str) else given

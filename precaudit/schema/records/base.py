"""What the lines of every file are made of: the base of records, bounded integers, numbers as JSON holds them."""

import math
from typing import Annotated, Any, Literal

import msgspec

SCHEMA = 1
# JSON has no NaN and no infinity: they are written as these strings.
# A run may be someone else's: what it counts and indexes by is bounded before anything is made of that size.
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Number = float | Literal["nan", "inf", "-inf"]


def json_number(x: Any) -> Number:
    """Return ``x`` as JSON can hold it."""
    value = float(x)
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def value(x: Number | None) -> float:
    """Return a number of a record as a float (NaN for none)."""
    return float("nan") if x is None else float(x)


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all records."""

"""Records as pandas DataFrames: the same columns and formats whatever the records hold, also where there are none."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from precaudit.schema.emulations import of_policy_alone
from precaudit.schema.records.base import Number, Record, value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import (
    KINDS,
    Distribution,
    EmulatedError,
    ErrorRecord,
    ForwardError,
    PairError,
    PolicyError,
    RatedError,
    Scope,
    StateError,
)

TEXT, WHOLE, REAL, TRUTH = "string", "Int64", "float64", "boolean"  # pandas' nullable formats; NaN is NaN
SCOPED = {
    "token": ("rel_l2", "max_diff", "excess", "ratio"),
    "head": ("rel_l2", "max_diff", "excess", "ratio", "gain", "mean"),
    "row": ("rel_l2",),
    "channel": ("rel_l2", "max_diff", "excess"),
}
COUNTED = ("token", "head", "channel")  # scopes of which a record says how many slices there are


class Column(NamedTuple):
    """A column: its format, and what it holds of a record."""

    name: str
    dtype: str
    of: Callable[[Any], Any]


def frame(records: Iterable[Any], columns: Iterable[Column]) -> Any:
    """Return a DataFrame with a row a record."""
    import pandas

    held = list(records)
    return pandas.DataFrame({c.name: _series(pandas, c, held) for c in columns})


def errors_frame(errors: Iterable[ErrorRecord]) -> Any:
    """Return error records as a DataFrame.

    ``worst_index``: the worst element's, ``0,3,17``. ``token_rel_l2``, ``token_index``: of the token that is worst by
    it; of another number ``token_excess`` and ``token_excess_index``; heads and channels alike. ``explained``: the
    largest share, by ``explained_by``; ``explained_policy``: that of the declared policy. ``kl``: of the worst row, at
    ``kl_index``; ``top1``: the share of rows.
    """
    return frame(errors, ERRORS)


def pairs_frame(pairs: Iterable[PrefillDecodeRecord]) -> Any:
    """Return prefill-against-decode records as a DataFrame."""
    return frame(pairs, flat(PrefillDecodeRecord))


def flat(kind: type[Record]) -> tuple[Column, ...]:
    """Return a column for every field of a record that is one text, number or truth value."""
    found = ((f.name, _dtype(f.type)) for f in msgspec.structs.fields(kind))
    return tuple(Column(name, dtype, partial(_field, name)) for name, dtype in found if dtype is not None)


def list_column(name: str) -> Column:
    """Return a column of a field that lists things, with commas between them."""

    def of(record: object) -> str | None:
        found = getattr(record, name)
        if found is None:
            return None
        return ",".join(map(str, found)) if isinstance(found, list | tuple) else str(found)

    return Column(name, TEXT, of)


def worst_columns() -> tuple[Column, ...]:
    """Return the columns of a record's worst element."""

    def of(part: str, record: Any) -> Any:
        found = None if record.worst is None else getattr(record.worst, part)
        return ",".join(map(str, found)) if isinstance(found, list | tuple) else found

    parts = {"index": TEXT, "candidate": REAL, "reference": REAL}
    return tuple(Column(f"worst_{part}", dtype, partial(of, part)) for part, dtype in parts.items())


def _field(name: str, record: object) -> Any:
    return getattr(record, name, None)


def _series(pandas: Any, c: Column, records: list[Any]) -> Any:
    found = [c.of(r) for r in records]
    if c.dtype == REAL:
        return pandas.Series([value(x) for x in found], dtype=REAL)
    return pandas.Series(pandas.array(found, dtype=c.dtype))


def _dtype(hint: object) -> str | None:
    """Return the format of a field; None where it holds more than one value."""
    parts = set(_leaves(hint)) - {type(None)}
    for kind, dtype in ((float, REAL), (bool, TRUTH), (int, WHOLE), (str, TEXT)):
        if kind in parts and parts <= {kind, str}:
            return dtype
    return None


def _leaves(hint: object) -> Iterator[Any]:
    """Yield the types that a hint is made of."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _leaves(part)
    elif origin is Annotated:
        yield from _leaves(get_args(hint)[0])
    elif origin is Literal:
        yield from {type(x) for x in get_args(hint)}
    else:
        yield hint


def _scope_value(scope: str, metric: str, part: int, e: ErrorRecord) -> Any:
    held: Mapping[str, Scope] = e.scopes or {}
    found = held.get(scope, {}).get(metric)
    return None if found is None else found[part]


def _scopes() -> Iterator[Column]:
    for scope, metrics in SCOPED.items():
        for metric in metrics:
            index = f"{scope}_index" if metric == "rel_l2" else f"{scope}_{metric}_index"
            yield Column(f"{scope}_{metric}", REAL, partial(_scope_value, scope, metric, 0))
            yield Column(index, WHOLE, partial(_scope_value, scope, metric, 1))
        if scope in COUNTED:
            yield Column(f"{scope}s", WHOLE, partial(_slices, scope))


def _flat_errors() -> Iterator[Column]:
    """Yield a column for every field of any kind of error record that is one text, number or truth value."""
    found = {c.name: c for kind in KINDS.values() for c in flat(kind)}
    for name, column in found.items():
        yield column
        if name == "point":
            yield Column("kind", TEXT, partial(_field, "kind"))


def _slices(scope: str, e: ErrorRecord) -> int | None:
    return (e.slices or {}).get(scope) if isinstance(e, RatedError) else None


def _remainder(name: str, part: str | int, e: ErrorRecord) -> Any:
    """Return a number of what the best emulation leaves."""
    found = getattr(getattr(e, "unexplained", None), name, None)
    if found is None or isinstance(found, float | str):
        return found
    at = getattr(found, part) if isinstance(part, str) else found[part]
    return ",".join(map(str, at)) if isinstance(at, list | tuple) else at


def _unexplained_columns() -> Iterator[Column]:
    for name in ("rel_l2", "u", "excess"):
        yield Column(f"unexplained_{name}", REAL, partial(_remainder, name, "value"))
    for name in ("gain", "mean"):
        yield Column(f"unexplained_{name}", REAL, partial(_remainder, name, "value"))
        yield Column(f"unexplained_{name}_noise", REAL, partial(_remainder, name, "noise"))
    yield Column("componentwise", REAL, partial(_remainder, "componentwise", 0))
    yield Column("componentwise_index", TEXT, partial(_remainder, "componentwise", 1))


def _shares(e: ErrorRecord) -> dict[str, Number]:
    return (e.explained or {}) if isinstance(e, EmulatedError) else {}


def _best(e: ErrorRecord) -> str | None:
    shares = _shares(e)
    return max(shares, key=lambda name: _share(e, name), default=None)


def _share(e: ErrorRecord, name: str | None) -> float:
    found = value(_shares(e).get(name or ""))
    return found if found == found else float("-inf")


def _policy(e: ErrorRecord) -> Any:
    """Return the share of the declared policy's emulation, or of a program's equations."""
    found = of_policy_alone(_shares(e))
    return None if found is None else found[1]


def _explained_columns() -> Iterator[Column]:
    yield Column("explained_by", TEXT, _best)
    yield Column("explained", REAL, lambda e: _shares(e).get(_best(e) or ""))
    yield Column("explained_policy", REAL, _policy)
    yield Column("elided", TEXT, _elided_places)


def _elided_places(e: ErrorRecord) -> str | None:
    elided = e.elided if isinstance(e, EmulatedError) else None
    return "; ".join(x for found in elided.values() for x in found) if elided else None


def _rows(e: ErrorRecord) -> str | None:
    rows = e.rows if isinstance(e, StateError | PolicyError) else None
    return None if rows is None else ",".join(f"{first}:{end}" for first, end in rows)


def _distribution(e: ErrorRecord) -> Distribution | None:
    return e.distribution if isinstance(e, ForwardError | PairError) else None


def _row(e: ErrorRecord) -> int | None:
    """Return which row of logits is farthest from the reference; one that is NaN is."""
    d = _distribution(e)
    if d is None or not d.kl:
        return None
    sizes = [value(k) for k in d.kl]
    return max(range(len(sizes)), key=lambda i: float("inf") if sizes[i] != sizes[i] else sizes[i])


def _at(name: str, e: ErrorRecord) -> Any:
    row, d = _row(e), _distribution(e)
    found = None if row is None or d is None else getattr(d, name)
    return None if found is None or row is None else found[row]


def _logits() -> Iterator[Column]:
    for name, field, dtype in (("kl", "kl", REAL), ("kl_noise", "kl_noise", REAL), ("kl_index", "positions", WHOLE)):
        yield Column(name, dtype, partial(_at, field))
    yield Column("top1", REAL, lambda e: None if (d := _distribution(e)) is None else _mean(d.top1))


def _mean(numbers: tuple[float, ...]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


ERRORS = (
    *_flat_errors(),
    Column("rows", TEXT, _rows),
    *worst_columns(),
    *_unexplained_columns(),
    *_explained_columns(),
    *_scopes(),
    *_logits(),
)

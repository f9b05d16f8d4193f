"""What happened to a cache that does not hold the rows that were written."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from precaudit.diagnosis.evidence.integer_rows import explain_integers
from precaudit.diagnosis.evidence.states import ENOUGH, State
from precaudit.models.numpy_decoder.rounding import Cast
from precaudit.numbers.arrays import Array, as_format, cutter, widen
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.row_hashes import row_hashes
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.cache_state import bits_of
from precaudit.references.mutations.forms import quantiser
from precaudit.references.mutations.storing import FEW, to_bits
from precaudit.references.mutations.variants import Class
from precaudit.schema.digits import digits
from precaudit.schema.places import Place

FOREIGN = "foreign rows"


def explain(
    found: Array,
    expected: Array,
    others: Mapping[str, Array] | None = None,
    name: str = "cache",
    says: str = "cached",
    layers: Mapping[int, Array] | None = None,
) -> State:
    """Say what a cache [S, G, K] holds instead of the expected rows.

    A row may be rounded to a narrower format, zero (never written), another position's, that of a prompt in the same
    batch (``others``: their expected rows), of another layer (``layers``), its own in another order, or nothing that
    was written. ``name``, ``says``: what holds the rows.
    """
    f, e = widen(found), widen(expected)
    bad = np.flatnonzero(np.any((f != e) & ~(np.isnan(f) & np.isnan(e)), axis=(1, 2)))
    rows = tuple(int(s) for s in bad)
    if not rows:
        return State("not finite", "state", "the cache holds NaN or infinities, as the rows that were written", 1.0, ())
    for kind in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"):
        with np.errstate(over="ignore"):
            narrow = expected.astype(np.float32).astype(FORMATS[kind].dtype).astype(np.float32)
        if np.array_equal(f[bad], narrow[bad].astype(np.float64)):
            return State(f"{name} in {kind}", "format", f"the {says} rows are rounded to {kind}", 1.0, rows)
    if (factor := _factor(f[bad], e[bad], expected)) is not None:
        says_so = f"the {says} rows {_span(rows)} are multiplied by {digits(factor, 6)}"
        return State(f"rows × {digits(factor, 6)}", "state", says_so, 1.0, rows)
    if (lies := _order_cause(f[bad], e[bad])) is not None:
        return State(*lies, 1.0, rows)
    for cause, what, cast in _casts(name):
        if np.array_equal(f[bad], widen(as_format(cast(e[bad]), expected.dtype.name))):
            return State(cause, "format", f"the {says} rows {what}", 1.0, rows)
    for width in (8, 4):
        made = widen(quantiser(width)(e[bad]).astype(expected.dtype))
        share = float(np.mean(f[bad] == made)) if bad.size else 0.0
        if share >= ENOUGH:
            quantum = f"the {says} rows are quantised to {width} bits, one scale a head and row"
            return State(f"{name} in int{width}", "format", quantum, share, rows)
    keys, written = _keys(bits_of(found)), {name: _keys(bits_of(x)) for name, x in (others or {}).items()}
    zeros = {keys[s] for s in rows if not f[s].any()}
    told = _state_of_rows(rows, keys, _keys(bits_of(expected)), zeros, written)
    if told.cause == FOREIGN and layers:
        return _of_layer(rows, keys, {layer: _keys(bits_of(x)) for layer, x in layers.items()}) or told
    return told


def _order_cause(found: Array, expected: Array) -> tuple[str, Class, str] | None:
    """Return (cause, kind, what it is) of rows [N, G, K] whose heads or dimensions lie otherwise; None of others."""
    heads, size = found.shape[1:]
    same = [[np.array_equal(found[:, g], expected[:, h]) for h in range(heads)] for g in range(heads)]
    read = tuple(row.index(True) if any(row) else -1 for row in same)
    if -1 not in read and read != tuple(range(heads)):
        what = f"heads 0 to {heads - 1} hold heads {', '.join(map(str, read))}"
        return ("heads exchanged" if len(set(read)) == heads else "rows of other heads"), "state", what
    for by in range(1, size):
        alike = np.array_equal(found[0], np.roll(expected[0], by, axis=-1))
        if alike and np.array_equal(found, np.roll(expected, by, axis=-1)):
            halves = "dimensions in halves exchanged" if 2 * by == size else f"dimensions shifted by {by}"
            return halves, "state", f"dimension i of a head holds dimension i − {by} of {size}"
    if np.array_equal(found, expected[..., ::-1]):
        return "dimensions reversed", "state", "dimensions of a head are in reverse order"
    return None


def _casts(name: str) -> Iterator[tuple[str, str, Cast]]:
    """Yield (cause, what it is, function) of rows in few bits, or cut."""
    for bits_ in FEW:
        yield f"{name} cut to {bits_} bits", f"have {bits_} bits of a mantissa", to_bits(bits_)
    for kind in ("float16", "bfloat16"):
        yield f"{name} cut to {kind}", f"are cut to {kind} toward zero", cutter(kind)


def _of_layer(rows: tuple[int, ...], found: Sequence[bytes], layers: Mapping[int, Sequence[bytes]]) -> State | None:
    """Say that most rows that differ are those of another layer, at the same slots."""
    held = {layer: [s for s in rows if s < len(x) and found[s] == x[s]] for layer, x in layers.items()}
    layer = max(held, key=lambda i: len(held[i]))
    if len(held[layer]) < ENOUGH * len(rows):
        return None
    says = f"rows {_span(held[layer])} hold the rows of layer {layer}; {len(rows)} rows differ"
    return State(f"rows of layer {layer}", "state", says, len(held[layer]) / len(rows), rows)


def _factor(found: Array, expected: Array, like: Array) -> float | None:
    """Return the factor of fewest digits on rows [N, G, K] that gives nearly all elements bit for bit; None if none."""
    size = float((expected * expected).sum())
    x = float((found * expected).sum()) / size if size and np.isfinite(found).all() else 0.0
    for places in range(5) if x else ():
        short = float(f"{x:.{places}e}")
        if short != 1 and np.mean(found == widen((expected * short).astype(like.dtype))) >= ENOUGH:
            return short
    return None


def explain_hashes(
    found: Array,
    expected: Array,
    zero: Array,
    others: Mapping[str, Array] | None = None,
    layers: Mapping[int, Array] | None = None,
) -> State:
    """Say the same from hashes of rows [S, LANES]; ``zero``: that of a row of zeros."""
    rows = tuple(int(s) for s in np.flatnonzero((found != expected).any(axis=1)))
    written = {name: _keys(x) for name, x in (others or {}).items()}
    told = _state_of_rows(rows, _keys(found), _keys(expected), {zero.tobytes()}, written)
    if told.cause == FOREIGN and layers:
        return _of_layer(rows, _keys(found), {layer: _keys(x) for layer, x in layers.items()}) or told
    return told


def _keys(rows: Array) -> list[bytes]:
    """Return what identifies each row."""
    return [np.ascontiguousarray(r).tobytes() for r in rows]


def _state_of_rows(
    rows: tuple[int, ...],
    found: Sequence[bytes],
    expected: Sequence[bytes],
    zeros: Container[bytes],
    others: Mapping[str, Sequence[bytes]],
) -> State:
    """Say which rows that differ hold another row, another prompt's, zeros, or what nothing wrote."""
    zero = [s for s in rows if found[s] in zeros]
    left = [s for s in rows if found[s] not in zeros]
    moved = {s: expected.index(found[s]) for s in left if found[s] in expected}
    share = (len(zero) + len(moved)) / len(rows) if rows else 1.0
    theirs = {b: _in_step(left, found, x) for b, x in others.items()}
    name = max(theirs, key=lambda b: len(theirs[b]), default="")
    if theirs and len(theirs[name]) > max(len(zero), len(_in_step(left, found, expected))):
        return _of_prompt(rows, name, theirs[name])
    if zero and moved and all(h in rows for h in moved.values()):
        first, source = next(iter(moved.items()))
        says = f"what belongs into slot {source} was written at slot {first}; rows {_span(zero)} are zero"
        return State("written at other slots", "state", says, share, rows)
    if moved and len(moved) >= len(zero):
        shifts = {h - s for s, h in moved.items()}
        first, source = next(iter(moved.items()))
        if len(shifts) == 1 and len(moved) > 1:
            by = shifts.pop()
            says = f"rows {_span(moved)} hold the rows {abs(by)} {'before' if by < 0 else 'after'}"
            return State("rows shifted", "state", says, share, rows)
        return State("stale row", "state", f"row {first} holds row {source}; {len(rows)} rows differ", share, rows)
    if zero:
        return State(
            "rows not written", "state", f"rows {_span(zero)} are zero: never written, or not read", share, rows
        )
    return State(FOREIGN, "state", f"rows {_span(rows)} hold what no recorded call wrote", 0.0, rows)


def _in_step(rows: Iterable[int], found: Sequence[bytes], source: Sequence[bytes]) -> dict[int, int]:
    """Return {row: row of the source it holds} for the most rows that one shift explains."""
    places: dict[bytes, list[int]] = {}
    for h, key in enumerate(source):
        places.setdefault(key, []).append(h)
    shifts = Counter(h - s for s in rows for h in places.get(found[s], ()))
    if not shifts:
        return {}
    by = max(shifts, key=lambda d: (shifts[d], -abs(d)))
    return {s: s + by for s in rows if 0 <= s + by < len(source) and source[s + by] == found[s]}


def _of_prompt(rows: tuple[int, ...], name: str, own: Mapping[int, int]) -> State:
    """Say that rows are those of a prompt in the same batch."""
    first, source = next(iter(own.items()))
    what = f"row {first} holds row {source}" if len(own) == 1 else f"rows {_span(own)} hold the rows from {source} on"
    says = f"{what} of prompt {name}, which ran in the same batch; {len(rows)} rows differ"
    return State(f"row of prompt {name}", "state", says, len(own) / len(rows), rows)


def cache_state(recorded: Recorded, place: Place) -> State:
    """Say what the cache of a prompt, recorded or hashed at a decode step, holds instead of the rows written."""
    prompt, step, layer, point = place.prompt, place.step, place.layer, place.point
    assert layer is not None
    found = recorded.tensor(prompt, "decode", step, layer, point)
    mates = {b: recorded.expected_cache(b, layer, point, step) for b in recorded.batch_of(prompt) if b != prompt}
    others = {b: x for b, x in mates.items() if x is not None}
    expected = recorded.expected_cache(prompt, layer, point, step)
    assert expected is not None
    beside = {i: recorded.expected_cache(prompt, i, point, step) for i in recorded.requested.layers if i != layer}
    layers = {i: x for i, x in beside.items() if x is not None and x.dtype == expected.dtype}
    if found is not None:
        made = (
            explain_integers(found, rows, expected)
            if (rows := _rows_before_cast(recorded, place)) is not None
            else None
        )
        return made or explain(found, expected, others, layers=layers)
    hashes = recorded.hashes(prompt, step, layer, point)
    assert hashes is not None
    zero = row_hashes(np.zeros_like(expected[:1]))[0]
    return explain_hashes(
        hashes,
        row_hashes(expected),
        zero,
        {b: row_hashes(x) for b, x in others.items()},
        {i: row_hashes(x) for i, x in layers.items()},
    )


def _rows_before_cast(recorded: Recorded, place: Place) -> Array | None:
    """Return the rows that a cache of integers was made of; None of another, or where they were not recorded."""
    assert place.layer is not None
    if recorded.run.record.policy["kv_cache"] != "int8":
        return None
    return recorded.cached_rows(place.prompt, place.layer, place.point, place.step)


def _span(rows: Iterable[int]) -> str:
    found = sorted(rows)
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)})"

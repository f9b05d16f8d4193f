"""Formula records of a program's run: its FP64 shadow against a reference, the textbook or a callable of the user's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.program_places import judged_places, not_taken
from precaudit.recording.runs.programs import Opened
from precaudit.references.cached import MADE, CachePair, read_caches
from precaudit.references.mapped import (
    MappedTextbook,
    Pair,
    PassedOver,
    as_cache,
    as_keyed,
    as_textbook,
    each_its_own,
    starts,
    whole_sequences,
)
from precaudit.references.padding import Padding, padding
from precaudit.references.sequences import Beginning, Tokens, caches_of, find_beginnings
from precaudit.schema.graphs.decoder import POINTS, row_shapes
from precaudit.schema.limits.checks import SAME
from precaudit.schema.places import Place, spans
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import ErrorRecord, FormulaError

ROUNDED = 0.05  # relative distance of queries as a format of 16 bits has them; of the next position's about 0.3
Values = Mapping[str, Array]
OwnReference = Callable[..., Mapping[str, Any]]


class Shown(NamedTuple):
    """A case as program and textbook make it in FP64, [B, T, …] of all calls, and each call's rows.

    ``seen`` by pair; ``expected`` by (layer, point), of what those operations read, too; ``sequences``: which of these
    rows are whose; ``caches``: those that the map names, in every call; ``keyed``: the program's scores and
    probabilities [B, H, T, S], in every call; ``slots``: how many a cache among the inputs has, where that was asked.
    """

    seen: dict[Pair, Array]
    expected: dict[tuple[int | None, str], Array]
    calls: list[slice]
    sequences: tuple[Tokens, ...]
    caches: dict[Pair, list[CachePair]]
    keyed: dict[Pair, list[Array]]
    slots: int | None = None

    @property
    def positions(self) -> Array:
        """The position [B, T] of every row in its sequence, −1 of padding."""
        found = np.full((len(self.sequences), self.calls[-1].stop if self.calls else 0), -1)
        for i, s in enumerate(self.sequences):
            found[i, s.rows] = s.positions
        return found


def read_shown(opened: Opened, book: MappedTextbook, case: str, exact: Sequence[Values]) -> Shown:
    """Return a case's FP64 values of every call beside the textbook's; raises UserError where they do not fit."""
    ids, calls = token_ids(opened, book, case, len(exact))
    seen = _concatenate_calls(book, exact, calls, len(ids))
    sequences = _sequences(opened, book, case, (ids, calls), seen, SAME)
    expected = book.values(sequences, ids.shape[1])
    caches = read_caches(book, exact, expected, sequences, calls)
    return Shown(seen, expected, calls, sequences, caches, _keyed(book, exact, calls, len(ids)))


def with_slots(opened: Opened, book: MappedTextbook, case: str, made: Shown) -> Shown:
    """Return the same with the number of slots of a case's caches; as it is where no cache is found."""
    inputs = [opened.tensors(case, call, "inputs") for call in range(min(2, opened.record.calls))]
    first = {(pair.layer, pair.point): x for pair, x in made.seen.items()}
    lead = (made.positions[:, made.calls[0]] >= 0).argmax(axis=1)
    found = caches_of(Beginning(book.model, first, made.calls[0], inputs, lead))
    sizes = {len(x.held) for every in found.values() for x in every.values()}
    return made._replace(slots=sizes.pop()) if len(sizes) == 1 else made


class Rests(NamedTuple):
    """What a case's formula records rest on: rows of padding, where sequences start, whether keys before are known.

    ``beyond``: slots that the first call writes, or that come after, and that held rows before; ``counted``: how many
    rows of padding before a sequence its positions count; ``passed``: rows of padding that the next entry point alone
    passes over.
    """

    padding: int
    starts: frozenset[int]
    known: bool
    beyond: frozenset[int] = frozenset()
    counted: frozenset[int] = frozenset()
    passed: int = 0


def rests_on(made: Shown, passed: PassedOver | None = None) -> Rests:
    """Return what a case's formula records rest on; ``passed``: padding by the entry point before or after."""
    begun = [s.earlier for s in made.sequences if s.earlier.start]
    starts, known = frozenset(e.start for e in begun), all(e.kept for e in begun)
    beyond = frozenset(slot for s in made.sequences for slot in s.beyond or ())
    counted = frozenset(s.earlier.turned for s in made.sequences) - {0}
    n, told = int((made.positions < 0).sum()), passed is not None and not passed.earlier
    return Rests(0 if told else n, starts, known, beyond, counted, n if told else 0)


def formula_notes(every: Sequence[Rests]) -> tuple[str, ...]:
    """Return what formula records of cases rest on in words: rows that are not judged, and where sequences start."""
    told, n = [], sum(x.padding for x in every)
    if n:
        rows = "row is read by no other row: it is" if n == 1 else "rows are read by no other row: they are"
        told.append(f"{n} padding {rows} not compared with the reference implementation")
    if n := sum(x.passed for x in every):
        told.append(
            f"{n} row{'s' if n > 1 else ''} before sequences {'are' if n > 1 else 'is'} padding, which the next entry "
            "point skips: not compared with the reference implementation"
        )
    if counted := sorted({x for r in every for x in r.counted}):
        told.append(
            f"RoPE counts the padding before sequences ({spans(counted)} rows), which changes none of their scores: "
            "positions are given without it"
        )
    starts = sorted({x for r in every for x in r.starts})
    if starts:
        before = "keys and values before are those in the first call's caches"
        if not all(r.known for r in every):
            before = "the keys before are not known, so attention's result is taken as it is"
        told.append(f"sequences start at position{'s' if len(starts) > 1 else ''} {spans(starts)}; {before}")
    beyond = sorted({x for r in every for x in r.beyond})
    if beyond:
        slots = f"slot{'s' if len(beyond) > 1 else ''} {spans(beyond)}"
        told.append(
            f"{slots} of the first call's caches, from where it writes on, had rows already: taken as padding, which "
            "no row reads; if they are none, the past length is too small"
        )
    return tuple(told)


class Stored(NamedTuple):
    """A case's recorded values in their formats, as the textbook has them, each call's rows, and which are whose.

    ``seen``: [B, T, …] of all calls; a call's of points over keys are in ``keyed``, [B, H, T, S], and of caches in
    ``caches``, [B, S, G, K].
    """

    seen: dict[Pair, Array]
    keyed: dict[Pair, list[Array]]
    caches: dict[Pair, list[Array]]
    calls: list[slice]
    sequences: tuple[Tokens, ...]

    @property
    def pairs(self) -> list[Pair]:
        """Every pair, in the textbook's order of points."""
        order = list(POINTS)
        return sorted((*self.seen, *self.keyed, *self.caches), key=lambda p: order.index(p.point))


def stored_sequences(opened: Opened, book: MappedTextbook, case: str) -> Stored:
    """Return a case's recorded values as the textbook has them; raises UserError where they do not fit."""
    ids, calls = token_ids(opened, book, case, opened.record.calls)
    stored = [opened.tensors(case, call, "taps") for call in range(opened.record.calls)]
    if opened.record.outputs:
        stored = [x | opened.tensors(case, call, "outputs") for call, x in enumerate(stored)]
    seen = _concatenate_calls(book, stored, calls, len(ids))
    sequences = _sequences(opened, book, case, (ids, calls), seen, ROUNDED)
    rows = row_shapes(book.config)
    caches = {
        pair: [as_cache(pair, x[pair.shown.name], len(ids), rows[MADE[pair.point]], book.where) for x in stored]
        for pair in book.pairs
        if POINTS[pair.point].state
    }
    keyed = _keyed(book, stored, calls, len(ids))
    return Stored(seen, keyed, caches, calls, sequences)


def token_ids(opened: Opened, book: MappedTextbook, case: str, calls: int) -> tuple[Array, list[slice]]:
    """Return the token ids [B, T] of a case's first calls, and each call's rows."""
    given = [opened.tensors(case, call, "inputs") for call in range(calls)]
    found, rows = whole_sequences(given, book.tokens, book.where, each_its_own(given, book.names))
    if found.size and not 0 <= found.min() <= found.max() < book.config.vocab:
        raise UserError(f"{book.where}: tokens = {book.tokens}: that input holds numbers outside the vocabulary")
    return found, rows


def _sequences(
    opened: Opened,
    book: MappedTextbook,
    case: str,
    given: tuple[Array, list[slice]],
    seen: Mapping[Pair, Array],
    near: float,
) -> tuple[Tokens, ...]:
    """Return which rows of a case's calls are whose; ``near``: how far a query may be from the textbook's."""
    ids, calls = given
    if not calls or not ids.shape[1]:
        return tuple(Tokens(x, np.arange(len(x))) for x in ids)
    inputs = [opened.tensors(case, call, "inputs") for call in range(min(2, opened.record.calls))]
    first = {(pair.layer, pair.point): x for pair, x in seen.items()}
    real = _real(opened, book, case, given, first, near)
    told = starts(inputs[0], book.names, len(ids), book.where)
    passed = book.passed.get(case)
    if passed is not None and not passed.earlier:
        real[:, calls[0]] = np.arange(calls[0].stop) >= np.asarray(passed.lead)[:, None]
    lead = real[:, calls[0]].argmax(axis=1)
    before = find_beginnings(Beginning(book.model, first, calls[0], inputs, lead), told, near)
    if passed is not None and passed.earlier:
        before = [one.passing_over(n) for one, n in zip(before, passed.lead, strict=True)]
    return tuple(Tokens(x[r], np.flatnonzero(r), *how) for x, r, how in zip(ids, real, before, strict=True))


def _real(
    opened: Opened,
    book: MappedTextbook,
    case: str,
    given: tuple[Array, list[slice]],
    seen: Mapping[tuple[int | None, str], Array],
    near: float,
) -> Array:
    """Return which rows [B, T] of all calls are a sequence's and not padding: as the map says, or as is found."""
    ids, calls = given
    real, leaf = np.ones(ids.shape, bool), book.names.lengths
    if leaf is None:
        first, at = opened.tensors(case, 0, "inputs"), calls[0]
        found = padding(book.model, seen, at, first, (book.tokens, ids[:, at]), near)
    else:
        found = Padding("rows", leaf)
    for call, rows in enumerate(calls if found is not None and found.kind == "rows" else calls[:1]):
        its = opened.tensors(case, call, "inputs")
        said = found.rows(its, ids[:, rows]) if found is not None else None
        if said is None and leaf is not None:
            x = its.get(str(leaf))
            told = "is not there" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise UserError(
                f"{book.where}: lengths = {leaf}: that input {told}; it holds how many rows of a call are each "
                f"sequence's [{len(ids)}], or a mask of them [{len(ids)}, {rows.stop - rows.start}]"
            )
        if said is not None:
            real[:, rows] = said
    return real


def _concatenate_calls(
    book: MappedTextbook, values: Sequence[Values], calls: list[slice], batch: int
) -> dict[Pair, Array]:
    """Return every pair's values of all calls, one after another."""
    found, row = {}, row_shapes(book.config)
    for pair in (p for p in book.pairs if POINTS[p.point].by_row):
        parts = [
            as_textbook(pair, x[pair.shown.name], batch, rows.stop - rows.start, row[pair.point], book.where)
            for x, rows in zip(values, calls, strict=True)
        ]
        found[pair] = np.concatenate(parts, axis=1)
    return found


def _keyed(
    book: MappedTextbook, values: Sequence[Values], calls: Sequence[slice], batch: int
) -> dict[Pair, list[Array]]:
    """Return every call's scores and probabilities [B, H, T, S] that the map shows."""
    heads = book.config.heads
    return {
        pair: [
            as_keyed(pair, x[pair.shown.name], (batch, heads, at.stop - at.start), book.where)
            for x, at in zip(values, calls, strict=True)
        ]
        for pair in book.pairs
        if POINTS[pair.point].over_keys
    }


def textbook_errors(opened: Opened, book: MappedTextbook, case: str, made: Shown) -> Iterator[ErrorRecord]:
    """Yield a formula record for every pair and call; ``rel_l2``: ‖shadow − textbook‖ / ‖textbook‖."""
    at = made.positions
    for pair, seen in made.seen.items():
        expected = made.expected[pair.layer, pair.point]
        named = f"{book.config.family}:{'' if pair.layer is None else pair.layer}.{pair.point}"
        for call, rows in enumerate(made.calls):
            why = not_taken(opened.record, pair.shown, pair.step, opened.tensors(case, call, "taps"))
            found = {"skipped": why} if why else formula_numbers(seen[:, rows], expected[:, rows], at[:, rows])
            here = Place(case, opened.record.phase, call, pair.step, pair.shown.name)
            yield here.record(FormulaError, "shadow", named, **found)
    for pair, its in made.caches.items():
        for call, cache in enumerate(its):
            why = not_taken(opened.record, pair.shown, pair.step, opened.tensors(case, call, "taps"))
            found = {"skipped": why} if why else formula_numbers(*cache)
            named = f"{book.config.family}:{pair.layer}.{pair.point}"
            here = Place(case, opened.record.phase, call, pair.step, pair.shown.name)
            yield here.record(FormulaError, "shadow", named, **found)


def callable_errors(opened: Opened, expected: object, case: str, call: int, exact: Values) -> Iterator[ErrorRecord]:
    """Yield a formula record for every point that a reference of the user's returned; raises UserError."""
    if not isinstance(expected, Mapping) or not expected:
        raise UserError("the reference must return {point: array}, with the names of the program's points")
    every = {p.name: p for p in (*opened.record.points, *opened.record.outputs)}
    for name in expected:
        if name not in every:
            raise UserError(f"the reference names {name!r}, which is no point of the program{nearest(name, every)}")
    for p, layer in [*judged_places(opened.record), *((p, None) for p in opened.record.outputs)]:
        if p.name not in expected:
            continue
        wanted, seen = np.asarray(expected[p.name], np.float64), exact[p.name]
        if wanted.shape != seen.shape:
            raise UserError(f"the reference's {p.name!r} is {list(wanted.shape)}, the program's {list(seen.shape)}")
        here = Place(case, opened.record.phase, call, layer, p.name)
        if (why := not_taken(opened.record, p, layer, opened.tensors(case, call, "taps"))) is not None:
            yield here.record(FormulaError, "shadow", "reference", skipped=why)
            continue
        cut = [x.reshape(-1, *p.shape)[layer or 0] for x in (seen, wanted)]
        rows = [x.reshape(1, -1, p.shape[-1] if p.shape else 1) for x in cut]
        yield here.record(FormulaError, "shadow", "reference", **formula_numbers(*rows))


def formula_numbers(seen: Array, expected: Array, positions: Array | None = None) -> dict[str, Any]:
    """Return a formula record's numbers of values [B, T, …], of all rows but padding.

    ``positions`` [B, T]: of rows in their sequences, −1 of padding (None: as they are counted). ``row``: of the batch.
    """
    every = np.indices(seen.shape[:2])[1] if positions is None else positions
    real = every >= 0
    if not real.any():
        return {"skipped": "all of its rows are padding"}
    batch, at = np.nonzero(real)[0], every[real]
    excluded = (real.size - len(at)) * (seen[0, 0].size if real.size else 0)
    seen, expected, rows = seen[real], expected[real], len(at)
    with np.errstate(invalid="ignore", over="ignore"):
        error = (seen - expected).reshape(rows, -1)
        off, size = np.linalg.norm(error, axis=1), np.linalg.norm(expected.reshape(rows, -1), axis=1)
        whole, base = float(np.linalg.norm(off)), float(np.linalg.norm(size))
        each = np.where(off == 0, 0.0, off / np.where(size == 0, 1.0, size))
    worst = int(np.argmax(np.where(np.isnan(each), np.inf, each)))
    scopes = {"token": {"rel_l2": (json_number(each[worst]), int(at[worst]))}}
    if len(real) > 1:
        scopes["row"] = {"rel_l2": (json_number(each[worst]), int(batch[worst]))}
    return {
        "dtype": "float64",
        "n": error.size,
        "nonfinite": int((~np.isfinite(error)).sum()),
        "excluded": excluded,
        "max_diff": json_number(float(np.abs(error).max())),
        "rel_l2": json_number(whole / base if base else whole),
        "scopes": scopes,
    }

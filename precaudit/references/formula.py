"""Formula records of a program's run: its FP64 shadow against a reference, the textbook or a callable of the user's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from precaudit.arrays import Array
from precaudit.errors import UserError, nearest
from precaudit.graphs.decoder import row_shapes
from precaudit.records import PROGRAM_CALL, ErrorRecord, number
from precaudit.references.mapped import Pair, Textbook, as_textbook, whole_sequences
from precaudit.runs.programs import Opened, ProgramPoint, not_taken, places

Values = Mapping[str, Array]
OwnReference = Callable[..., Mapping[str, Any]]


class Shown(NamedTuple):
    """A case as program and textbook make it in FP64, [B, T, …] of all calls, and each call's rows.

    ``seen`` by pair; ``expected`` by (layer, point), of what those operations read, too.
    """

    seen: dict[Pair, Array]
    expected: dict[tuple[int | None, str], Array]
    calls: list[slice]


def shown(opened: Opened, book: Textbook, case: str, exact: Sequence[Values]) -> Shown:
    """Return a case's FP64 values of every call beside the textbook's; raises UserError where they do not fit."""
    sequences, calls = _sequences(opened, book, case, len(exact))
    expected = book.values(sequences)
    return Shown(_joined(book, exact, calls, len(sequences)), expected, calls)


def own_sequences(opened: Opened, book: Textbook, case: str) -> dict[Pair, Array]:
    """Return a case's recorded values, in their formats, as the textbook has them: [B, T, …] of all calls."""
    sequences, calls = _sequences(opened, book, case, opened.record.calls)
    stored = [opened.tensors(case, call, "taps") for call in range(opened.record.calls)]
    if opened.record.outputs:
        stored = [x | opened.tensors(case, call, "outputs") for call, x in enumerate(stored)]
    return _joined(book, stored, calls, len(sequences))


def calls_of(opened: Opened, book: Textbook, case: str) -> list[slice]:
    """Return each call's rows of a case's sequences."""
    return _sequences(opened, book, case, opened.record.calls)[1]


def _sequences(opened: Opened, book: Textbook, case: str, calls: int) -> tuple[Array, list[slice]]:
    """Return the token ids [B, T] of a case's first calls, and each call's rows."""
    given = [opened.tensors(case, call, "inputs") for call in range(calls)]
    sequences, rows = whole_sequences(given, book.tokens, book.where)
    if sequences.size and not 0 <= sequences.min() <= sequences.max() < book.config.vocab:
        raise UserError(f"{book.where}: tokens = {book.tokens}: that input holds numbers outside the vocabulary")
    return sequences, rows


def _joined(book: Textbook, values: Sequence[Values], calls: list[slice], batch: int) -> dict[Pair, Array]:
    """Return every pair's values of all calls, one after another."""
    found, row = {}, row_shapes(book.config)
    for pair in book.pairs:
        parts = [
            as_textbook(pair, x[pair.shown.name], batch, rows.stop - rows.start, row[pair.point], book.where)
            for x, rows in zip(values, calls, strict=True)
        ]
        found[pair] = np.concatenate(parts, axis=1)
    return found


def textbook_errors(opened: Opened, book: Textbook, case: str, made: Shown) -> Iterator[ErrorRecord]:
    """Yield a formula record for every pair and call; ``rel_l2``: ‖shadow − textbook‖ / ‖textbook‖."""
    for pair, seen in made.seen.items():
        expected = made.expected[pair.layer, pair.point]
        named = f"{book.config.family}:{'' if pair.layer is None else pair.layer}.{pair.point}"
        for call, rows in enumerate(made.calls):
            why = not_taken(opened.record, pair.shown, pair.step, opened.tensors(case, call, "taps"))
            found = {"skipped": why} if why else distance(seen[:, rows], expected[:, rows])
            yield _record(opened, case, call, pair.shown, pair.step, named, found)


def callable_errors(opened: Opened, expected: Any, case: str, call: int, exact: Values) -> Iterator[ErrorRecord]:
    """Yield a formula record for every point that a reference of the user's returned; raises UserError."""
    if not isinstance(expected, Mapping) or not expected:
        raise UserError("the reference must return {point: array}, with the names of the program's points")
    every = {p.name: p for p in (*opened.record.points, *opened.record.outputs)}
    for name in expected:
        if name not in every:
            raise UserError(f"the reference names {name!r}, which is no point of the program{nearest(name, every)}")
    for p, layer in [*places(opened.record), *((p, None) for p in opened.record.outputs)]:
        if p.name not in expected:
            continue
        wanted, seen = np.asarray(expected[p.name], np.float64), exact[p.name]
        if wanted.shape != seen.shape:
            raise UserError(f"the reference's {p.name!r} is {list(wanted.shape)}, the program's {list(seen.shape)}")
        if (why := not_taken(opened.record, p, layer, opened.tensors(case, call, "taps"))) is not None:
            yield _record(opened, case, call, p, layer, "reference", {"skipped": why})
            continue
        cut = [x.reshape(-1, *p.shape)[layer or 0] for x in (seen, wanted)]
        rows = [x.reshape(1, -1, p.shape[-1] if p.shape else 1) for x in cut]
        yield _record(opened, case, call, p, layer, "reference", distance(*rows))


def distance(seen: Array, expected: Array) -> dict[str, Any]:
    """Return a formula record's numbers of values [B, T, …]; the worst token is counted through the batch."""
    rows = seen.shape[0] * seen.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        error = (seen - expected).reshape(rows, -1)
        off, size = np.linalg.norm(error, axis=1), np.linalg.norm(expected.reshape(rows, -1), axis=1)
        whole, base = float(np.linalg.norm(off)), float(np.linalg.norm(size))
        each = np.where(off == 0, 0.0, off / np.where(size == 0, 1.0, size))
    worst = int(np.argmax(np.where(np.isnan(each), np.inf, each)))
    return {
        "dtype": "float64", "n": error.size, "nonfinite": int((~np.isfinite(error)).sum()),
        "max_diff": number(float(np.abs(error).max())), "rel_l2": number(whole / base if base else whole),
        "scopes": {"token": {"rel_l2": (number(each[worst]), worst)}},
    }  # fmt: skip


def _record(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None, reference: str, numbers: dict[str, Any]
) -> ErrorRecord:
    return ErrorRecord(
        prompt=case, phase=PROGRAM_CALL, step=call, layer=layer, point=p.name, kind="formula", candidate="shadow",
        reference=reference, **numbers,
    )  # fmt: skip

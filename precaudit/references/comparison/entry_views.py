"""The same position of a case seen by two entry points of a program: prefill and decode, a batch and one alone.

Which position a row is of is known by its call's token ids and where they start, or by counting them. Two rows see one
position where all tokens up to it are the same: whatever the batch, padding, chunk or mesh that they are computed in.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.programs.program import OUTPUT_LOGITS
from precaudit.recording.runs.compared_programs import Unpaired
from precaudit.recording.runs.programs import Opened, ProgramRun
from precaudit.references.comparison.prefill_decode import ONE, View, compare_views
from precaudit.references.padding import as_rows
from precaudit.references.token_rows import of_sequences, token_rows
from precaudit.references.traced.reference import Traced
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records.base import json_number
from precaudit.schema.records.comparisons import PrefillDecodeRecord

Prefix = tuple[int, int]  # a position, and a hash of all tokens up to it


class Fed(NamedTuple):
    """A token of a sequence, and a hash of all up to it."""

    token: int
    prefix: int


class Row(NamedTuple):
    """A row of a call's logits: of which entry point, call, sequence of the batch and row of the call, and where.

    ``alone``: it is the call's only row of its sequence; ``shape``: those logits as sequences, rows and vocabulary.
    """

    entry: int
    call: int
    batch: int
    row: int
    position: int
    alone: bool
    shape: tuple[int, int, int]


class Strange(NamedTuple):
    """A first call whose position follows from no token before it: what the program says, and how many tokens came."""

    entry: int
    said: int
    tokens: int


def entry_views(entries: Sequence[Traced], case: str) -> tuple[list[PrefillDecodeRecord], list[Unpaired]]:
    """Return a record of every position of a case that two entry points see.

    And what could not be held against anything, where an entry point begins at a position that no token leads to.
    """
    opened = [one.opened for one in entries]
    rows, strange = _rows(opened, case)
    sigma = float(np.sqrt(np.mean([x.power for one in entries for x in one.logits] or [np.nan])))
    found, seen = [], set[int]()
    for its in rows.values():
        for against, row in pairs_of_rows(its):
            found.append(_pair(entries, case, against, row, sigma))
            seen |= {row.entry, against.entry}
    rest = [
        Unpaired(
            case=case,
            phase=opened[x.entry].record.phase,
            why=f"it begins at position {x.said}, and {x.tokens} tokens came before; no other entry point sees these "
            "tokens (leave start out where positions count what is no token; lengths says which rows are padding)",
        )
        for x in strange
        if x.entry not in seen
    ]
    return found, rest


def pairs_of_rows(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield which rows of one position are held against each other, the one that the other is held to first.

    A row alone in its call, as decode has them, is held to each entry point that sees several at once. Any other is
    held to the first entry point that sees the position, of its own kind where both kinds do. Of several sequences
    with these tokens the one at the same place of the batch comes first.
    """
    several = [row for row in rows if not row.alone]
    for row in rows:
        earlier = [x for x in (several or rows) if x.entry < row.entry]
        others = [x for x in several if x.entry != row.entry] if row.alone and several else earlier[:1]
        for entry in dict.fromkeys(x.entry for x in others):
            yield min((x for x in (several or rows) if x.entry == entry), key=lambda x: x.batch != row.batch), row


def _pair(entries: Sequence[Traced], case: str, whole: Row, decoded: Row, sigma: float) -> PrefillDecodeRecord:
    both = [(entries[at.entry], at) for at in (whole, decoded)]
    views = [View.of_row(at.call, at.position, _stored_row(one.opened, case, at)) for one, at in both]
    known = [_cut(one.logits[at.call].exact, at) for one, at in both if at.call < len(one.logits)]
    batch = next((at.batch for at in (whole, decoded) if at.shape[0] > 1), None)
    name = case if batch is None else f"{case}, row {batch}"
    against, view = (one.opened.record.entry for one, _ in both)
    found = compare_views(name, against, (views[0], views[1]), known, sigma)
    apart = None
    if len(known) == 2 and not any(map(_rounds_to_integers, entries)):
        off = ratio(norm(known[0] - known[1]), norm(known[1]))
        apart = json_number(off) if off > ONE else None
    if not decoded.alone:
        found = msgspec.structs.replace(found, prefill_last_top1=None, decode0_top1=None)
    return msgspec.structs.replace(found, f64_apart=apart, view=view)


def _rounds_to_integers(one: Traced) -> bool:
    """Whether an entry point stores floats in integers of 8 bits or less: what it reads of them is another number."""
    casts = (e for e in walk_equations(one.made.jaxpr.jaxpr) if e.primitive.name == "convert_element_type")
    formats = ((e.invars[0].aval.dtype, e.outvars[0].aval.dtype) for e in casts)
    return any(float_bits(a) and b.kind in "iu" and b.itemsize == 1 for a, b in formats)


def _rows(entries: Sequence[Opened], case: str) -> tuple[dict[Prefix, list[Row]], list[Strange]]:
    """Return the rows of all calls by what they see, and first calls that are strange."""
    strange: list[Strange] = []
    found: dict[Prefix, dict[tuple[int, int], Row]] = {}
    before: list[list[Fed]] = []  # of each sequence
    for i, one in enumerate(entries):
        tokens, shown = one.record.tokens, any(p.name == OUTPUT_LOGITS for p in one.record.outputs)
        if tokens is None:
            before = []
            continue
        for call in range(one.record.calls):
            given = one.tensors(case, call, "inputs")
            ids = _ids(given, one.record, len(before))
            real = _real(given, one.record, ids)
            if len(before) != len(ids) or (call == 0 and one.record.start is None and ids.shape[1] > 1):
                before = [[] for _ in ids]
            starts, said = _starts(given, one.record.start, before, ids, real.argmax(axis=1))
            if call == 0 and i and (off := [(a, b) for a, b in zip(said, starts, strict=True) if a != b]):
                strange.append(Strange(i, *off[0]))
            before = [b[:n] for b, n in zip(before, starts, strict=True)]
            shape = _shape(one, len(ids)) if shown else (len(ids), 0, 0)
            for b, known in enumerate(before):
                for t in np.flatnonzero(real[b]):
                    token, position = int(ids[b, t]), len(known)
                    known.append(Fed(token, hash((known[-1].prefix if known else 0, token))))
                    at = int(t) - (ids.shape[1] - shape[1])  # of fewer rows than tokens these are the last
                    if at >= 0:
                        here = Row(i, call, b, at, position, ids.shape[1] == 1, shape)
                        found.setdefault((position, known[-1].prefix), {}).setdefault((i, b), here)
    return {prefix: list(its.values()) for prefix, its in found.items()}, strange


def _starts(
    given: Mapping[str, Array], start: int | None, before: Sequence[Sequence[Fed]], ids: Array, first: Array
) -> tuple[list[int], list[int]]:
    """Return the place of the first token of each sequence in a call, and the position that the program says of it.

    ``ids`` [B, T]; ``first`` [B]: the column of each sequence's first token. The place is after all tokens before it,
    or that of one fed again. A position that is said and is neither is a mistake to be seen, or counts what is no
    token. Raises UserError where positions are neither of sequences nor of rows.
    """
    ends = [len(known) for known in before]
    if start is None:
        return ends, ends
    held, each = given[str(start)], np.arange(len(ids))
    if held.size not in (1, len(ids)) and held.shape not in (ids.shape, ids.shape[1:]):
        raise UserError(
            f"start = {start}: that input is {list(held.shape)}, and the token ids {list(ids.shape)}; it says the "
            "position of each sequence's first token, or of every token"
        )
    held = held.reshape(-1) if held.size in (1, len(ids)) else np.broadcast_to(held, ids.shape)[each, first]
    said, tokens = [int(x) for x in np.broadcast_to(held, len(ids))], ids[each, first]
    again = (at < n and known[at].token == id_ for at, n, known, id_ in zip(said, ends, before, tokens, strict=True))
    return [at if is_again else n for at, n, is_again in zip(said, ends, again, strict=True)], said


def _ids(given: Mapping[str, Array], record: ProgramRun, before: int) -> Array:
    """Return a call's token ids [B, T]; [N] are of N sequences where N came before, or N starts are said."""
    ids = given[str(record.tokens)]
    starts = 1 if record.start is None else given[str(record.start)].size
    return token_rows(ids, of_sequences(ids, starts, before))


def _real(given: Mapping[str, Array], record: ProgramRun, ids: Array) -> Array:
    """Return which rows [B, T] of a call the program says to be no padding; all where it says nothing."""
    said = None if record.lengths is None else as_rows(given[str(record.lengths)], *ids.shape)
    return np.ones(ids.shape, bool) if said is None else said


def _shape(one: Opened, batch: int) -> tuple[int, int, int]:
    """Return of how many sequences, rows and tokens of a vocabulary a call's logits are."""
    (logits,) = (p for p in one.record.outputs if p.name == OUTPUT_LOGITS)
    size, vocab = int(np.prod(logits.shape)), logits.shape[-1]
    return batch, size // (batch * vocab), vocab


def _stored_row(one: Opened, case: str, at: Row) -> Array:
    return _cut(widen(one.tensors(case, at.call, "outputs")[OUTPUT_LOGITS]), at)


def _cut(logits: Array, at: Row) -> Array:
    row: Array = logits.reshape(at.shape)[at.batch, at.row]
    return row

"""The textbooks of a run's entry points: what is padding before sequences in one is in the next that goes on with them.

Where positions count padding, each entry point alone may as well have been fed it: only both together tell that one
reads what the other passes over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.references.formula import stored_sequences, token_ids
from precaudit.references.mapped import MappedTextbook, PassedOver, textbook_of
from precaudit.references.names_map import Names
from precaudit.references.padding import possible_padding
from precaudit.references.sequences import Tokens


def goes_on(program: Program, before: OfRun, one: Program) -> bool:
    """Whether an entry point was recorded from where the recorded one before it ends."""
    order, record = [program.entry, *program.then], before.opened.record
    ended = record.began + record.calls == before.program.steps + 1
    return ended and order.index(one.entry) == order.index(record.entry) + 1


def entry_textbooks(names: Names, entries: Sequence[OfRun], program: Program) -> list[MappedTextbook]:
    """Return the textbook of each entry point; raises UserError for what the map or the configuration has wrong."""
    found = [textbook_of(names, of.program, of.opened) for of in entries]
    for i in range(1, len(found)):
        if goes_on(program, entries[i - 1], entries[i].program):
            both = entries[i - 1].opened, entries[i].opened
            found[i - 1 : i + 1] = _with_common_padding(both, found[i - 1], found[i])
    return found


def _with_common_padding(
    runs: tuple[Opened, Opened], first: MappedTextbook, then: MappedTextbook
) -> tuple[MappedTextbook, MappedTextbook]:
    """Return the textbooks of two entry points, what one passes over before sequences told of the other, too."""
    of_first, of_then = dict(first.passed), dict(then.passed)
    for case in runs[0].record.cases:
        said = list(_possible_leads(runs[0], first, case))
        if not said:
            continue
        one, other = (stored_sequences(o, b, case).sequences for o, b in zip(runs, (first, then), strict=True))
        lead, later = (tuple(s.lead for s in sequences) for sequences in (one, other))
        if len(lead) != len(later) or not _go_on(one, other):
            continue
        if lead in said and not any(later):
            of_then[case] = PassedOver(lead, earlier=True)
        elif later in said and not any(lead):
            of_first[case] = PassedOver(later, earlier=False)
    return replace(first, passed=of_first), replace(then, passed=of_then)


def _possible_leads(opened: Opened, book: MappedTextbook, case: str) -> Iterator[tuple[int, ...]]:
    """Yield how many rows before each sequence's first inputs of a first call may say are padding."""
    ids, rows = token_ids(opened, book, case, 1)
    for _, real in possible_padding(opened.tensors(case, 0, "inputs"), book.tokens, ids[:, rows[0]]):
        lead = real.argmax(axis=1)
        if np.array_equal(real, np.arange(real.shape[1]) >= lead[:, None]):
            yield tuple(int(n) for n in lead)


def _go_on(first: Sequence[Tokens], then: Sequence[Tokens]) -> bool:
    """Whether sequences go on at the positions after their last ones, padding before them counted in both."""
    for s, t in zip(first, then, strict=True):
        if (s.earlier.turned, t.earlier.turned) != (s.lead, t.lead) or not len(s.rows):
            return False
        if t.earlier.start + t.lead != int(s.positions[-1]) + 1 + s.lead:
            return False
    return True

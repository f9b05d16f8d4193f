"""A program's run beside its FP64 shadow as pieces, by whichever executor: calls of a case, or the case whole (JAX).

Other processes load the program by its name, and so run its code: only where the process that asks has run it, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import jax

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.jaxpr.explicit import to_host, without_mesh, without_shardings
from precaudit.numbers.executors import Executor
from precaudit.numbers.threads import WORKERS, one_blas_thread
from precaudit.progress import Advance, silent
from precaudit.recording.programs.agreement import OfRun, recorded_entries
from precaudit.recording.programs.loading import load_program, raising_line, source_of
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.compared_programs import Unpaired
from precaudit.recording.runs.program_places import judged_places
from precaudit.recording.runs.programs import Opened, open_program_run
from precaudit.references.announced import announced_errors
from precaudit.references.comparison.entry_views import entry_views
from precaudit.references.comparison.program_records import Lacking, places_of
from precaudit.references.entry_textbooks import entry_textbooks, goes_on
from precaudit.references.formula import (
    OwnReference,
    Rests,
    Shown,
    Values,
    callable_errors,
    read_shown,
    rests_on,
    textbook_errors,
)
from precaudit.references.mapped import MappedTextbook
from precaudit.references.names_map import Names, check_entries
from precaudit.references.traced.judged import record_of
from precaudit.references.traced.reference import Traced
from precaudit.references.viewed import view_case
from precaudit.schema.places import Place
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord, FormulaError

_loading = Lock()  # a file is imported by one thread of a worker at a time


class ProgramPiece(NamedTuple):
    """Segments of some calls of an entry point in a case; ``entry`` None: what is of the whole program."""

    case: str
    entry: int | None
    calls: range = range(0)

    @property
    def text(self) -> str:
        """What it is of, in words."""
        return f"the whole program of {self.case}" if self.entry is None else f"operations of {self.case}"


class WholeCase(NamedTuple):
    """What the whole program gives of a case: forward records of its places, and those that follow them."""

    errors: list[ErrorRecord]
    rests: list[Rests]
    pairs: list[PrefillDecodeRecord]
    unpaired: list[Unpaired]


class Computing(NamedTuple):
    """What decides how XLA adds up: the platform, its devices, and the cores whose threads share a sum."""

    platform: str
    devices: int
    cores: int

    @classmethod
    def here(cls) -> "Computing":
        """Return what computes in this process."""
        return cls(jax.default_backend(), jax.device_count(), WORKERS)

    @property
    def text(self) -> str:
        """It in words."""
        return f"{self.devices} {self.platform} device{'s' if self.devices > 1 else ''} on {self.cores} cores"


@dataclass(frozen=True)
class EntryBesideShadow:
    """An entry point beside its FP64 shadow, and a reference of the user's or the textbook (``book``)."""

    traced: Traced
    book: MappedTextbook | None
    reference: OwnReference | Names | None

    def others(self, case: str) -> tuple[list[ErrorRecord], list[Rests]]:
        """Return the records of a case that follow those of its places, and what those of formulas rest on."""
        opened, traced, book = self.traced.opened, self.traced, self.book
        errors: list[ErrorRecord] = [e for call in range(opened.record.calls) for e in traced.chosen(case, call)]
        exact = [] if self.reference is None else traced.alone(case)
        beside = read_shown(opened, book, case, exact) if book is not None and exact else None
        if self.reference is not None:
            errors += _formula(traced, book or self.reference, case, beside, exact)
        if book is not None:
            errors += announced_errors(view_case(opened, book, case), book, case, opened.record.phase)
        return errors, [] if beside is None else [rests_on(beside, None if book is None else book.passed.get(case))]


@dataclass(frozen=True)
class ProgramShadows:
    """What pieces share: a program, the entry points of its run, and what its FP64 is compared with.

    ``accum``: formats that sums of products are made in; ``name``: by which another process loads the program, None
    where it is in memory alone. ``some``: the places whose operations are recomputed, None: all.
    """

    program: Program
    entries: Sequence[OfRun]
    reference: OwnReference | Names | None
    accum: Sequence[str]
    name: str | None = None
    tell: Advance = silent
    some: frozenset[Place] | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Another process has nothing in memory."""
        folder = self.entries[0].opened.folder.absolute()
        return NamedShadows, (folder, self.name, self.reference, tuple(self.accum), Computing.here(), self.some)

    @cached_property
    def books(self) -> Sequence[MappedTextbook | None]:
        """The textbook of each entry point, None of one that no names map shows."""
        if not isinstance(self.reference, Names):
            return [None] * len(self.entries)
        check_entries(self.reference, [self.program.entry, *self.program.then])
        return entry_textbooks(self.reference, self.entries, self.program)

    @cached_property
    def each(self) -> list[EntryBesideShadow]:
        """Every entry point beside its FP64 shadow."""
        found: list[EntryBesideShadow] = []
        for i, one in enumerate(self.entries):
            before = found[-1].traced if i and goes_on(self.program, self.entries[i - 1], one.program) else None
            begins = None if before is None else (before, self.program.then[one.program.entry].begin)
            kept = self.reference is not None and before is None
            traced = Traced(one, self.tell, kept, begins, self.accum, self.some)
            found.append(EntryBesideShadow(traced, self.books[i], self.reference))
        return found


@dataclass(frozen=True)
class NamedShadows:
    """The same in another process, which loads the program when it is first asked; as ``ProgramShadows`` has them."""

    folder: Path
    name: str
    reference: Names | None
    accum: tuple[str, ...]
    computing: Computing
    some: frozenset[Place] | None = None

    @cached_property
    def loaded(self) -> ProgramShadows:
        """The program and its run; raises UserError where it, or what computes, is not that of the asking process."""
        with _loading:
            program = load_program(self.name)
        if (here := Computing.here()) != self.computing:
            raise UserError(f"a worker has {here.text}, and {self.computing.text} ask: sums would be split differently")
        entries = traced_entries(open_program_run(self.folder), program)
        return ProgramShadows(program, entries, self.reference, self.accum, self.name, some=self.some)


def traced_entries(opened: Opened, program: Program) -> list[OfRun]:
    """Return the entry points of a run's program; raises UserError where it is not what was traced.

    Where its types carry shardings, as one device makes it, to be run under ``without_mesh``.
    """
    return [_alone(one) for one in recorded_entries(opened, program)]


def _alone(of: OfRun) -> OfRun:
    one = of.program
    alone = without_shardings(of.made, one.params, *next(iter(one.cases.values())))
    if alone is of.made:
        return of
    return of._replace(
        program=replace(one, params=to_host(one.params), cases={n: to_host(x) for n, x in one.cases.items()}),
        made=alone,
    )


def divide_program(entries: Sequence[Opened], by: Executor, lacking: Lacking) -> list[ProgramPiece]:
    """Return the pieces of what is computed: of cases the whole program, and segments of every entry point's calls."""
    records = [one.record for one in entries]
    every = [(case, i) for case in records[0].cases for i in (None, *range(len(records)))]
    n = 1 if by.here else -(-by.slots // len(every))
    asked = None if lacking.some is None else {(p.prompt, p.phase, p.step) for p in lacking.some}
    pieces: list[ProgramPiece] = []
    for case, i in every:
        if i is None:
            pieces += [ProgramPiece(case, None)] if case in lacking.cases else []
            continue
        cuts, phase = [records[i].calls * k // n for k in range(n + 1)], records[i].phase
        each = (range(a, b) for a, b in pairwise(cuts))
        pieces += [
            ProgramPiece(case, i, calls)
            for calls in each
            if calls and (asked is None or any((case, phase, call) in asked for call in calls))
        ]
    return pieces


@enough_memory()
def piece_errors(
    shared: ProgramShadows | NamedShadows, piece: ProgramPiece, _tell: Advance
) -> list[ErrorRecord] | WholeCase:
    """Return the local records of a piece's places, or what is of the whole program."""
    shared = shared.loaded if isinstance(shared, NamedShadows) else shared
    with without_mesh(), one_blas_thread():
        if piece.entry is not None:
            traced, some = shared.each[piece.entry].traced, shared.some
            places = places_of(traced.opened.record, piece.case, piece.calls)
            return [e for place in places if some is None or place in some for e in traced.local(place)]
        each = [(one.traced, places_of(one.traced.opened.record, piece.case)) for one in shared.each]
        forwards = [e for traced, places in each for place in places for e in traced.forward(place)]
        others = [one.others(piece.case) for one in shared.each]
        pairs, unpaired = entry_views([one.traced for one in shared.each], piece.case)
        rests = [x for _, its in others for x in its]
        return WholeCase([*forwards, *(e for errors, _ in others for e in errors)], rests, pairs, unpaired)


def for_others(name: str | None, reference: OwnReference | Names | None, by: Executor) -> str | None:
    """Return the name by which other processes load a program; raises UserError where they cannot compute its part."""
    if by.here:
        return name
    if name is None:
        raise UserError("a Program in memory stays in this process: name it FILE.py:NAME, or leave out jobs")
    if reference is not None and not isinstance(reference, Names):
        raise UserError("a reference that is a function stays in this process: leave out --jobs and --scheduler")
    if (platform := jax.default_backend()) != "cpu":
        raise UserError(
            f"several processes would share the memory of one {platform}: leave out --jobs, or compute on the CPU with "
            "JAX_PLATFORMS=cpu"
        )
    source = source_of(name)
    return name if source is None else f"{source}:{name.rpartition(':')[2]}"


def _formula(
    traced: Traced,
    reference: OwnReference | Names | MappedTextbook,
    case: str,
    beside: Shown | None,
    exact: Sequence[Values],
) -> Iterator[ErrorRecord]:
    """Yield the formula records of a case; unknown are those of calls that FP64 never came to."""
    opened = traced.opened
    for call in range(len(exact), opened.record.calls):
        for p, layer in reference.places if isinstance(reference, MappedTextbook) else judged_places(opened.record):
            why = "the program in FP64 did not come so far"
            yield record_of(FormulaError, opened, case, call, p, layer, unknown=why)
    if isinstance(reference, MappedTextbook):
        if beside is not None:
            yield from textbook_errors(opened, reference, case, beside)
        return
    assert not isinstance(reference, Names)
    for call, values in enumerate(exact):
        try:
            expected = reference(traced.program.params, *traced.inputs(case, call))
        except Exception as error:
            raise UserError(f"the reference raised {type(error).__name__}: {error}{raising_line(error)}") from None
        yield from callable_errors(opened, expected, case, call, values)

"""The error records of a program's run by where they are: those that are there, those that lack, and both together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from precaudit.errors import UserError
from precaudit.recording.runs.compared_programs import Compared, filed_errors, is_compared, marks_of, pairs_of
from precaudit.recording.runs.program_places import compared_places, recomputed_places
from precaudit.recording.runs.programs import Opened, ProgramRun
from precaudit.recording.runs.written import computing_code
from precaudit.schema.places import Place, case_of
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import AccumulationError, ErrorRecord, FormulaError, ForwardError, LocalError

Holds = Callable[[Place], bool]


@dataclass(frozen=True)
class KnownRecords:
    """Records by where they are: of operations (``local``), ``forward`` ones, and ``others``, by case and phase.

    ``pairs``: of positions that two entry points see, by case; ``marks``: what compare says of all of them; ``cases``:
    those of the run.
    """

    marks: Compared
    cases: tuple[str, ...]
    local: dict[Place, list[ErrorRecord]] = field(default_factory=dict)
    forward: dict[Place, list[ErrorRecord]] = field(default_factory=dict)
    others: dict[tuple[str, str], list[ErrorRecord]] = field(default_factory=dict)
    pairs: dict[str, list[PrefillDecodeRecord]] = field(default_factory=dict)

    def add(self, errors: Sequence[ErrorRecord], pairs: Sequence[PrefillDecodeRecord]) -> None:
        """Put records where they are."""
        for e in errors:
            if isinstance(e, LocalError | AccumulationError):
                self.local.setdefault(Place.of(e), []).append(e)
            elif isinstance(e, ForwardError):
                self.forward.setdefault(Place.of(e), []).append(e)
            else:
                self.others.setdefault((case_of(e.prompt, self.cases), e.phase), []).append(e)
        for p in pairs:
            self.pairs.setdefault(case_of(p.prompt, self.cases), []).append(p)

    def of(self, record: ProgramRun) -> list[ErrorRecord]:
        """Return the records of an entry point in the order of its cases, calls and points."""
        found: list[ErrorRecord] = []
        for case in record.cases:
            for place in places_of(record, case):
                found += [*self.local.get(place, ()), *self.forward.get(place, ())]
            found += self.others.get((case, record.phase), ())
        return found


class Lacking(NamedTuple):
    """What is computed: places whose operations are recomputed (None: all), and cases whose whole program is run."""

    some: frozenset[Place] | None
    cases: tuple[str, ...]


def places_of(record: ProgramRun, case: str, calls: range | None = None) -> list[Place]:
    """Return the places of some calls of an entry point in a case, all of them by default, as their records come."""
    some = range(record.calls) if calls is None else calls
    return [Place(case, record.phase, call, layer, p.name) for call in some for p, layer in compared_places(record)]


def known_records(opened: Opened, names: Mapping[str, str] | None) -> KnownRecords | None:
    """Return what an earlier compare wrote of this very run; None where there is nothing that this code computed.

    ``names``: the textbook, as ``Names`` has it, None of a function; what is of another reference is left out.
    """
    if not is_compared(opened):
        return None
    with suppress(UserError):  # what was altered, or is of another run, is computed again
        marks = marks_of(opened)
        if marks.code != computing_code():
            return None
        found = KnownRecords(marks, opened.record.cases)
        found.add(list(filed_errors(opened)), pairs_of(opened))
        of_function = not marks.names and any(isinstance(e, FormulaError) for es in found.others.values() for e in es)
        if marks.names == names and not of_function:
            return found
        return KnownRecords(Compared("", "", accum=marks.accum), found.cases, found.local)
    return None


def lacking(opened: Opened, known: KnownRecords | None, holds: Holds, accum: Sequence[str]) -> Lacking:
    """Return what a comparison of the places that are looked at has to compute beside what is known."""
    every = known is None or not {*accum} <= {*known.marks.accum}
    there = {} if known is None or every else known.local
    whole = {} if known is None else known.forward
    asked = [*_places(opened, holds)]
    some = frozenset(place for place, recomputed in asked if recomputed and place not in there)
    return Lacking(some, tuple(dict.fromkeys(place.prompt for place, _ in asked if place not in whole)))


def joined(known: KnownRecords | None, made: KnownRecords, work: Lacking) -> KnownRecords:
    """Return what is known with what was made of what lacked, which takes its place."""
    if known is None:
        return made
    old, new, cases = known.marks, made.marks, set(work.cases)
    again = work.some is None or known.local.keys() <= work.some
    marks = msgspec.structs.replace(
        new,
        told=tuple(dict.fromkeys((*new.told, *old.told))),
        accum=new.accum if again else tuple(a for a in old.accum if a in new.accum),
        unpaired=(*(x for x in old.unpaired if x.case not in cases), *new.unpaired),
    )
    return KnownRecords(
        marks,
        known.cases,
        known.local | made.local,
        known.forward | made.forward,
        {at: x for at, x in known.others.items() if at[0] not in cases} | made.others,
        {case: x for case, x in known.pairs.items() if case not in cases} | made.pairs,
    )


def _places(opened: Opened, holds: Holds) -> Iterator[tuple[Place, bool]]:
    """Yield the places of a run that are looked at, and whether an operation is recomputed there."""
    for one in opened.entries:
        recomputed = {(p.name, layer) for p, layer in recomputed_places(one.record)}
        for place in (x for case in one.record.cases for x in places_of(one.record, case)):
            if holds(place):
                yield place, (place.point, place.layer) in recomputed

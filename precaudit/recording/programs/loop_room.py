"""Room for the iterations of while loops: where rounding decides when a loop ends, it may run on as it is recorded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.bounded import MORE
from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.interpreters.jaxpr.sites import STATE, TAKEN
from precaudit.recording.runs.kinds import manifest_of, tag_of
from precaudit.recording.runs.programs import EntryRun, ProgramLoop, ProgramRun
from precaudit.schema.digits import count_text
from precaudit.schema.records.lines import read_record

TIMES = 5  # that room is made before it is said that a loop does not end
Room = Mapping[tuple[str, str], int]  # iterations at least, by entry point and loop
NO_ROOM: Room = {}
T = TypeVar("T")


class RanOnError(UserError):
    """A loop that went on after the iterations that it was recorded with."""

    def __init__(self, entry: str, loop: ProgramLoop, where: str) -> None:
        self.entry, self.loop = entry, loop
        super().__init__(
            f"{where}: the while loop {loop.name}{_at(loop)} did not end within "
            f"{count_text(loop.iterations, 'iteration')} when it was recorded, more than were counted: "
            "rounding decides when it ends; end it by a count"
        )


def check_loops_ended(record: ProgramRun, taps: Mapping[str, Any], case: str, call: int) -> None:
    """Raise RanOnError where a while loop would have gone on after the iterations that are recorded."""
    decided = {name: x for name, x in taps.items() if name.startswith(STATE) and not name.endswith(TAKEN)}
    for loop in record.loops:
        if any(np.any(on_host(x)) for name, x in decided.items() if name.startswith(f"{STATE}{loop.name}{MORE}")):
            raise RanOnError(record.entry, loop, f"{case}, call {call}")


def with_room(trace: Callable[[Room, bool], T], folder: Path, resume: bool) -> T:
    """Return what ``trace(room, again)`` returns, with more room for a loop where it ran on; raises RanOnError.

    ``again``: whether the folder holds what was recorded until then. A run that goes on (``resume``) has the room that
    it was begun with.
    """
    room, again = dict(_room_of(folder) if resume else {}), False
    for _ in range(TIMES - 1):
        try:
            return trace(room, again)
        except RanOnError as error:
            room[error.entry, error.loop.name], again = 2 * error.loop.iterations, True
    return trace(room, again)


def room_notes(room: Room, entries: Sequence[EntryRun]) -> Iterator[str]:
    """Yield a note of each loop that ran on as it was recorded."""
    for x in entries:
        for loop in (loop for loop in x.loops if (x.entry, loop.name) in room):
            yield (
                f"rounding decides when the while loop {loop.name}{_at(loop)} ends: it took more iterations as it was "
                "recorded than when they were counted"
            )


def _room_of(folder: Path) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the iterations of the loops that a run which was cut off has room for."""
    if tag_of(folder) == "program":
        held = read_record(manifest_of(folder), ProgramRun, "a program's run")
        every: tuple[ProgramRun | EntryRun, ...] = (held, *held.then)
        yield from (((x.entry, loop.name), loop.iterations) for x in every for loop in x.loops)


def _at(loop: ProgramLoop) -> str:
    return f" ({loop.source})" if loop.source else ""

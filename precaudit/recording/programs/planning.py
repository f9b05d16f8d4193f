"""Which entry points and calls of a program are recorded, with which taps, before anything is run (JAX)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from precaudit.errors import UserError, nearest
from precaudit.interpreters.jaxpr.keys import key_bits
from precaudit.interpreters.jaxpr.tag import Tagged, TapChoice, Which
from precaudit.interpreters.tpu.target import Target
from precaudit.recording.programs.entries import entries_of, with_values
from precaudit.recording.programs.loop_room import NO_ROOM, Room
from precaudit.recording.programs.preparing import (
    code_hash,
    most_steps,
    outputs_of,
    points_of,
    prepare_program,
    recorded_loops,
    support_of,
    weights_hash,
)
from precaudit.recording.programs.program import OUTPUT, Program
from precaudit.recording.runs.programs import EntryRun, ProgramPoint
from precaudit.schema.selection import parse_positions


@dataclass(frozen=True)
class ProgramSelection:
    """What of a program is recorded.

    ``layers``: the steps of the program's outermost scans (None: all), with the states that they begin and end with.
    ``points``: names of those that are judged (None: all); what these are judged by is recorded as their support.
    ``phases``: entry points (None: all); those before are run alone. ``positions``: which calls of one entry point
    (None: all), one after another; the first of them is call 0 of the run, whose inputs hold what came before.
    ``taps``: the program's own (``checkpoint_name``), automatic ones, or both (None: as of ``TapChoice``).
    """

    layers: Sequence[int] | None = None
    points: Collection[str] | None = None
    phases: Collection[str] | None = None
    positions: str | None = None
    taps: Which | None = None


WHOLE_PROGRAM = ProgramSelection()


@dataclass(frozen=True)
class Planned:
    """An entry point that is run: as a program with its taps, and which of its calls are recorded; none of ``made``."""

    program: Program
    made: Tagged | None
    calls: range
    asked: Collection[str] | None = None


def longest_scan(program: Program, taps: Which | None = None) -> int:
    """Return how many steps the longest outermost loop of a program with points has; raises UserError without one."""
    return max(most_steps(made) for _, made in _prepare(program, ProgramSelection(taps=taps), None))


def points(program: Program, taps: Which | None = None, entry: str | None = None) -> tuple[ProgramPoint, ...]:
    """Return the points of an entry point (None: the first), in its order: its own, automatic ones, or both."""
    every = _prepare(program if entry else program.altered(then={}), ProgramSelection(taps=taps), None)
    return next(points_of(made, None) for one, made in every if one.entry == (entry or program.entry))


def _prepare(
    program: Program, select: ProgramSelection, target: Target | None, room: Room = NO_ROOM
) -> list[tuple[Program, Tagged]]:
    """Return every entry point, and with its taps; ``room``: as ``plan`` takes it."""
    every, choice, layers = entries_of(program), TapChoice(select.taps), select.layers
    made = [prepare_program(one, choice, layers, () if i else None, target) for i, one in enumerate(every)]
    if any(x.loops for x in made[1:]):  # how long they run is counted on values
        every = with_values(program)
        made = [prepare_program(one, choice, layers, target=target) for one in every]
    found = []
    for one, tags in zip(every, made, strict=True):
        held = recorded_loops(tags)
        wide = [replace(x, iterations=max(x.iterations, room.get((one.entry, x.name), 0))) for x in held]
        again = wide != [*held]
        found.append((one, prepare_program(one, choice, layers, wide, target) if again else tags))
    return found


def plan(
    program: Program, select: ProgramSelection, target: Target | None = None, room: Room = NO_ROOM
) -> list[Planned]:
    """Return every entry point up to the last that is recorded; raises UserError for what none of them has.

    ``room``: iterations of while loops that are recorded at least, by entry point and loop.
    """
    every, asked = _prepare(program, select, target, room), select.points
    positions, phases = select.positions, select.phases
    names = [one.entry for one, _ in every]
    if unknown := [name for name in phases or () if name not in names]:
        raise UserError(f"no entry point of the program is named {unknown[0]!r}{nearest(unknown[0], names)}")
    if positions is not None and len(phases or names) > 1:
        raise UserError(f"positions {positions!r}: of which entry point's calls, --phases {' or '.join(names)}?")
    known = [
        {*(s.name for s in tags.sites), *(p.name.removeprefix(OUTPUT) for p in outputs_of(one))} for one, tags in every
    ]
    some = sorted(set().union(*known))
    if unknown := sorted({*(asked or ())} - set(some)):
        raise UserError(f"no point of the program is named {unknown[0]!r}{nearest(unknown[0], some)}")
    found = []
    for (one, tags), own in zip(every, known, strict=True):
        here = None if asked is None else [name for name in asked if name in own]
        if (phases is not None and one.entry not in phases) or here == []:
            found.append(Planned(one, None, range(0)))
            continue
        if here is not None:
            only = {*here, *support_of(one, tags, here)}
            choice = TapChoice(select.taps, only=only)
            tags = prepare_program(one, choice, select.layers, recorded_loops(tags))
        if not tags.sites:
            raise UserError("the program has no points: it holds no product, no cache write and no result of floats")
        found.append(Planned(one, tags, _calls(positions, one.steps + 1), here))
    last = max((i for i, x in enumerate(found) if x.calls), default=-1)
    return found[: last + 1]


def entry_run(one: Planned, layers: Sequence[int] | None) -> EntryRun:
    """Return what a run says of an entry point before it was run."""
    assert one.made is not None
    return EntryRun(
        entry=one.program.entry,
        code=code_hash(one.made),
        weights=weights_hash(one.program, one.made),
        automatic=one.made.automatic,
        calls=len(one.calls),
        points=points_of(one.made, layers, one.asked),
        outputs=outputs_of(one.program, one.asked),
        renamed=dict(one.program.points or {}),
        loops=recorded_loops(one.made),
        began=one.calls.start,
        tokens=one.program.tokens,
        start=one.program.start,
        lengths=one.program.lengths,
    )


def size_of(one: Planned, held: EntryRun) -> int:
    """Return the bytes that an entry point's calls of a case take."""
    taps = sum(prod((*p.stacked, *p.shape)) * jnp.dtype(p.dtype).itemsize for p in held.points)
    inputs = (jax.eval_shape(key_bits, x) for x in jax.tree.leaves(next(iter(one.program.cases.values()))))
    return len(one.calls) * (taps + sum(x.size * x.dtype.itemsize for x in inputs))


def _calls(positions: str | None, calls: int) -> range:
    """Return the calls that positions name, each a call; raises UserError for those that are not one after another."""
    found = parse_positions(positions, calls)
    if not found:
        raise UserError(f"positions {positions!r} name none of the program's {calls} calls (0 to {calls - 1})")
    if len(found) != found[-1] + 1 - found[0]:
        raise UserError(f"positions {positions!r}: calls of a program are recorded one after another, such as last:4")
    return range(found[0], found[-1] + 1)

"""Which mistake on a mesh makes a program another one: what change of one operation makes its values the other's (JAX).

Each known mistake is undone in turn at each operation inside shard_map, in FP64 and with all ranks at hand. What makes
values the other's that were not before is a cause, and where all outputs then are, the causes explain everything.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.diagnosis.sameness.marks import Marks, in_order, known, marks
from precaudit.diagnosis.sameness.observed import Observed
from precaudit.diagnosis.sameness.records import MeshCause
from precaudit.diagnosis.sameness.repairs import HANDED_ON, Repair, repairs
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.interpreters.jaxpr.jax_versions import frames, walk_equations
from precaudit.interpreters.jaxpr.ranks import Change, Key, Made, Ranks, Told
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.interpreters.jaxpr.wide import up
from precaudit.numbers.arrays import Array
from precaudit.references.comparison.exact import tapped_jaxpr

MOST_BYTES = 1 << 28  # of a program's inputs in FP64: the values of all ranks are held
SECONDS = 90.0  # of CPU time of a search: what is found does not depend on what else runs
ROUNDS = 4  # mistakes of one program
BEYOND = 8  # places that are looked at behind the first that has a cause of all: one that is simpler may be there
FARTHER = 64  # behind the first that has a cause of a part: two parts may be one cause that lies farther on
FEW_TIMES = 4  # that one line makes an equation: a sum that goes round a ring, not every layer
SOON = 24  # values made anew, after a mistake is undone, of which one is the other's
EQUAL = 1e-9  # of an output's norm


@dataclass(frozen=True)
class Place:
    """Equations of one kind, made by the same lines, or what comes into shard_map or leaves it; what may mend it."""

    keys: tuple[Key, ...]
    source: str
    mends: tuple[Repair, ...]


class Candidate(NamedTuple):
    """A repair at a place: how many more of the other's values it makes, and whether all outputs are the other's."""

    whole: bool
    more: int
    place: Place
    repair: Repair


class Values(NamedTuple):
    """What a program makes: marks of all its values, and its outputs."""

    marks: Marks
    outputs: list[Array]


class _InVain(Exception):
    """A change makes none of the other's values."""


class _Trial:
    """Looks for missing values among those that a change makes; raises _InVain where the first ``most`` are none."""

    def __init__(self, missing: Marks, most: int) -> None:
        self.missing, self.left, self.found = missing, most, np.zeros(len(missing), bool)

    def __call__(self, told: Told) -> None:
        """Take note of one equation's results."""
        if own := _marks(told):
            self.found |= known(self.missing, in_order(own))
        self.left -= 1
        if not self.left and not self.found.any():
            raise _InVain


@dataclass
class _Seen:
    """What an evaluation tells: marks of its values, and its places."""

    marks: list[Marks] = field(default_factory=list)
    found: dict[Any, tuple[dict[Key, list[Marks]], str, list[Repair]]] = field(default_factory=dict)

    def __call__(self, told: Told) -> None:
        """Take note of one equation, or of what crosses a shard_map's border."""
        own, e = _marks(told), told.equation
        self.marks += own
        if not told.axes.count:
            return
        family = told.key if told.key[1] else (frames(e), e.primitive.name, str([v.aval for v in e.outvars]))
        if family not in self.found:
            self.found[family] = ({}, told.source, list(repairs(told)))
        self.found[family][0].setdefault(told.key, own)


def _marks(told: Told) -> list[Marks]:
    return [marks(np.asarray(x), told.axes.count) for x in told.out if jnp.issubdtype(x.dtype, jnp.floating)]


@dataclass(frozen=True)
class Again:
    """A program to be evaluated again and again."""

    jaxpr: Any
    leaves: list[Any]
    functions: dict[Any, Any]

    def values(self, changes: Mapping[Key, Change]) -> tuple[Values, _Seen, Made]:
        """Return what the program makes with some changes, its places, and what is kept of it."""
        seen, made = _Seen(), Made(self.functions, keeps=True)
        out = self._run(Ranks(made, changes, seen))
        return Values(in_order(seen.marks), out), seen, replace(made, keeps=False)

    def tried(self, kept: Made, changes: Mapping[Key, Change], missing: Marks, most: int) -> tuple[int, list[Array]]:
        """Return how many of the other's values some more changes make, and the outputs.

        Zero, and none, where the first ``most`` values that are made anew make none.
        """
        seen = _Trial(missing, most)
        try:
            out = self._run(Ranks(kept, changes, seen))
        except _InVain:
            return 0, []
        return int(seen.found.sum()), out

    def _run(self, ranks: Ranks) -> list[Array]:
        return [np.asarray(x) for x in ranks.run(self.jaxpr.jaxpr, self.jaxpr.consts, self.leaves)]


def causes_on_meshes(programs: Sequence[str], seen: Sequence[Observed], calls: Sequence[int]) -> tuple[MeshCause, ...]:
    """Return the mistakes of one of two programs that, undone, make it the other: of the second, else of the first.

    ``calls``: of each the first whose outputs are apart. Empty where none is known.
    """
    jaxprs = [tapped_jaxpr(x.of) for x in seen]
    sharded = [any(e.primitive.name == "shard_map" for e in walk_equations(j.jaxpr)) for j in jaxprs]
    if not any(sharded):
        return ()
    functions: dict[Any, Any] = {}
    with without_mesh(), jax.enable_x64(True):
        both = list[Again]()
        for x, jaxpr, call in zip(seen, jaxprs, calls, strict=True):
            given = [np.asarray(a) for a in (*jax.tree.leaves(x.of.program.params), *x.calls[call].inputs)]
            if sum(8 * a.size for a in given) > MOST_BYTES:
                return ()
            both.append(Again(jaxpr, [up(jnp.asarray(a)) for a in given], functions))
        try:
            targets = [again.values({})[0] for again in both]
            found = (_causes(programs[i], both[i], targets[1 - i]) for i in (1, 0) if sharded[i])
            return tuple(next(filter(None, found), ()))
        except (CannotLift, NotImplementedError, TypeError, ValueError):
            return ()  # not to be evaluated rank by rank: no cause is known


def _causes(name: str, again: Again, target: Values) -> list[MeshCause]:
    """Return mistakes that make a program another one: undone together they make all outputs the other's."""
    ends, found = time.process_time() + SECONDS, list[Candidate]()
    while len(found) < ROUNDS and not (found and found[-1].whole):
        now, seen, kept = again.values(_changes(found))
        search = Search(again, kept, _changes(found), target.marks[~known(target.marks, now.marks)], target, ends)
        best = search.best(_places(seen, target.marks))
        if best is None:
            return []
        found.append(best)
    if not found[-1].whole:
        return []
    for one in list(found):  # without those that change nothing
        rest = [c for c in found if c is not one]
        if rest and _agree(again.values(_changes(rest))[0].outputs, target.outputs):
            found = rest
    return [MeshCause(program=name, name=c.repair.name, source=c.place.source, says=c.repair.says) for c in found]


def _changes(found: Sequence[Candidate]) -> dict[Key, Change]:
    return {key: c.repair.change for c in found for key in c.place.keys}


def _places(seen: _Seen, right: Marks) -> list[Place]:
    """Return the places of an evaluation: what leaves shard_map, then those that are not right at first, in order.

    What is made few times is also tried each alone; then what comes into shard_map, and the others alone.
    """

    def right_at(own: Sequence[Marks]) -> bool:
        return bool(own) and all(known(m, right).any() for m in own)

    every = [
        (Place(tuple(firsts), at, tuple(mends)), [right_at(own) and not _moves(mends) for own in firsts.values()])
        for firsts, at, mends in seen.found.values()
    ]
    last = [p for p, _ in every if p.keys[0][1] == "out"]
    given = [p for p, _ in every if p.keys[0][1] == "in"]
    wrong, alone = list[Place](), list[Place]()
    for p, known_right in every:
        if not p.keys[0][1]:
            each = zip(p.keys, known_right, strict=True)
            some = [replace(p, keys=(key,)) for key, its in each if len(p.keys) > 1 and not its]
            wrong += [p] * (not known_right[0]) + some * (len(p.keys) <= FEW_TIMES)
            alone += some * (len(p.keys) > FEW_TIMES)
    return [*last, *wrong, *given, *alone]


def _moves(mends: Sequence[Repair]) -> bool:
    """Whether a place hands shards on: they are the other's, of whichever rank."""
    return any(r.name == "shard of another rank" and r.rank == HANDED_ON for r in mends)


class Search(NamedTuple):
    """A program, what its values are with the changes so far, those of the other's that it has not, and until when."""

    again: Again
    kept: Made
    changes: Mapping[Key, Change]
    missing: Marks
    target: Values
    ends: float

    def best(self, places: Sequence[Place]) -> Candidate | None:
        """Return the repair that makes most of the other's values, of equals the simplest; None where none does."""
        found: list[Candidate] = []
        since = 0
        for place in places:
            since += bool(found) and bool(place.mends)
            most = BEYOND if any(c.whole for c in found) else FARTHER
            if since > most or time.process_time() > self.ends:
                break
            if not any(key in self.changes for key in place.keys):
                found += filter(None, (self.tried(place, repair) for repair in place.mends))
            if place.keys[0][1] == "out" and any(c.whole for c in found):
                break
        return max(found, key=lambda c: (c.whole, c.more, -c.repair.rank), default=None)

    def tried(self, place: Place, repair: Repair) -> Candidate | None:
        """Return a repair with what it makes, None where that is none of the other's values."""
        changes = {**self.changes, **dict.fromkeys(place.keys, repair.change)}
        more, outputs = self.again.tried(self.kept, changes, self.missing, SOON)
        whole = _agree(outputs, self.target.outputs)
        return Candidate(whole, more, place, repair) if more or whole else None


def _agree(mine: Sequence[Array], its: Sequence[Array]) -> bool:
    """Whether every output of floats of one program is one of the other's."""
    wanted = [x for x in its if np.issubdtype(x.dtype, np.floating)]
    given = [x for x in mine if np.issubdtype(x.dtype, np.floating)]
    return bool(wanted) and all(any(_equal(x, y) for y in given) for x in wanted)


def _equal(x: Array, y: Array) -> bool:
    return x.shape == y.shape and float(np.linalg.norm(x - y)) <= EQUAL * float(np.linalg.norm(x))

"""Which results a point's segment read unrounded, one read at a time, where none of the usual ways closes (JAX).

A compiler decides for each fusion whether it reads a result of 16 bits as it was before it was rounded. Each read is a
choice; a greedy search finds the choices that leave least of what was recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from precaudit.interpreters.jaxpr.emulate import emulate_segments
from precaudit.interpreters.jaxpr.excess import MOVES, Excess, moves
from precaudit.interpreters.jaxpr.plant import WantedSteps
from precaudit.interpreters.jaxpr.reads import reads_of_arguments
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.numbers.arrays import Array
from precaudit.references.traced.remade import Tapped, Values
from precaudit.schema.metrics.residue import finite
from precaudit.schema.metrics.sizes import norm

Place = tuple[str, int | None]  # a point and its layer
Rows = dict[Place, Array]

EXCESS_PRECISION = ("some results read unrounded",)
MOST_READS = 512  # that a point depends on, and is searched for
READS = 1 << 14  # of a program that is looked at: all of it is traced for each point
ROUNDS = 12  # of the search
AT_ONCE = 32  # choices of a small program that are made at once
ELEMENTS = 32  # of a point for each choice that may be made of it: fewer could be made to fit
GAIN = 0.98  # times the residual before it, that a choice must leave at most


class _Reads:
    """Gives every read of an unrounded result its choice, in the order in which equations are evaluated."""

    def __init__(self, choices: Sequence[Any]) -> None:
        self.choices, self.variables = choices, []  # type: tuple[Sequence[Any], list[int]]
        self.numbers: dict[tuple[int, int], int] = {}

    def free(self, equation: jex.JaxprEqn, i: int) -> Any:
        """Return the choice of a read; what only moves values has none, since its readers do."""
        if equation.primitive.name in MOVES:
            return False
        n = self.numbers.setdefault((id(equation), i), len(self.numbers))
        if n == len(self.variables):
            self.variables.append(id(equation.invars[i]))
        return self.choices[n] if n < len(self.choices) else False


@dataclass(frozen=True)
class Segment:
    """What makes a point of some layers: ``tapped``'s segments, how they round, and the values that they read."""

    tapped: Tapped
    how: Realisation
    name: str
    steps: tuple[int, ...] | None
    values: Values
    args: tuple[Any, ...]

    def evaluate(self, reads: _Reads, values: Values, args: tuple[Any, ...]) -> Any:
        """Return the point's values [steps, …] as choices of reads have them."""
        how = replace(self.how, chosen=Excess(reads.free, moves), by_conversions=True)
        wanted = None
        if self.steps is not None:
            count, length = len(self.steps), self.tapped.sites[self.name].stacked[0]
            slots = np.full(length, count, np.int32)
            slots[list(self.steps)] = np.arange(count)
            wanted = WantedSteps(self.tapped.names[self.name], slots, count)
        made = emulate_segments(self.tapped.call, how, steps=self.tapped.steps, wanted=wanted)(values, *args)
        return made[self.name][0]


class Choices:
    """The choices of a segment's reads: those that its point depends on, in groups of one variable's."""

    def __init__(self, segment: Segment, rows: Callable[[Array], Rows]) -> None:
        self.segment, self.rows, reads = segment, rows, _Reads(())
        jax.eval_shape(lambda *a: segment.evaluate(reads, *a), segment.values, segment.args)
        count, self.matter = len(reads.numbers), ()  # type: tuple[int, tuple[int, ...]]
        if not 0 < count <= READS:
            return

        def of(choices: Sequence[Any], values: Values, args: tuple[Any, ...]) -> Any:
            return segment.evaluate(_Reads(choices), values, args)

        jaxpr = jax.make_jaxpr(of)([np.False_] * count, segment.values, segment.args).jaxpr
        given = [frozenset({str(i)}) if i < count else frozenset[str]() for i in range(len(jaxpr.invars))]
        matter = sorted(map(int, reads_of_arguments(jaxpr, given)[1][0]))
        if len(matter) > MOST_READS:
            return
        self.matter = tuple(matter)
        self.flips = _flips([reads.variables[n] for n in matter], segment.tapped.small)

        def by(some: jax.Array, values: Values, args: tuple[Any, ...]) -> Any:
            every: list[Any] = [False] * count
            for n, x in zip(matter, some, strict=True):
                every[n] = x
            return of(every, values, args)

        options = segment.tapped.options
        self.one = jax.jit(by, compiler_options=options)
        self.several = jax.jit(jax.vmap(by, (0, None, None)), compiler_options=options)

    def made(self, choices: Array) -> list[Rows]:
        """Return the point's rows of each of N choices [N, reads]."""
        given = self.segment.values, self.segment.args
        if not self.segment.tapped.small:
            return [self.rows(np.asarray(self.one(x, *given))) for x in choices]
        found: list[Rows] = []
        for at in range(0, len(choices), AT_ONCE):
            part = choices[at : at + AT_ONCE]
            padded = np.concatenate([part, np.zeros((AT_ONCE - len(part), choices.shape[1]), bool)])
            found += map(self.rows, np.asarray(self.several(padded, *given))[: len(part)])
        return found


def least_residual(choices: Choices, stored: Rows, closes: Callable[[Rows], bool]) -> Rows | None:
    """Return what the choices make that leave least of what was recorded (``stored``); None where none close."""
    size = len(choices.matter)
    if not size:
        return None

    def residual(made: Rows) -> float:
        with np.errstate(invalid="ignore"):  # equal infinities
            return norm(np.array([norm(finite(x - made[at])) for at, x in stored.items()]))

    most = sum(x.size for x in stored.values()) / ELEMENTS
    alike = np.repeat([[False], [True]], size, axis=1)
    made = choices.made(alike)
    left, first = min((residual(x), i) for i, x in enumerate(made))
    best, values = alike[first], made[first]
    for _ in range(ROUNDS):
        if closes(values):
            return values
        sizes = [residual(x) for x in choices.made(best ^ choices.flips)]
        better = [i for i in np.argsort(sizes, kind="stable") if sizes[i] < left]
        if not better:
            return None
        # the best of them, it and the next, and so on
        together = best ^ np.logical_or.accumulate(choices.flips[better[:AT_ONCE]])
        made = choices.made(together)
        found, at = min((residual(x), i) for i, x in enumerate(made))
        if found > GAIN * left or np.sum(together[at] != alike[first]) > most:
            return None
        left, best, values = found, together[at], made[at]
    return None


def _flips(variables: Sequence[int], small: bool) -> Array:
    """Return which choices change at once [N, reads]: those of one variable, and of a small program each alone."""
    of = np.array(variables)
    alone = np.eye(len(of), dtype=bool) if small else np.zeros((0, len(of)), bool)
    return np.unique([*alone, *(of == one for one in dict.fromkeys(variables))], axis=0)

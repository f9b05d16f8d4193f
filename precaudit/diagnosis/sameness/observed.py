"""A program as another is held against it: its calls in FP64 and as they ran, and what its points read (JAX)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import jax
import numpy as np

from precaudit.diagnosis.evidence.last_call import output_rows
from precaudit.interpreters.jaxpr.emulate import evaluate_planted
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.interpreters.jaxpr.keys import is_numbers
from precaudit.interpreters.jaxpr.plant import Planted
from precaudit.interpreters.jaxpr.reads import Reads
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.program import OUTPUT, Program
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.references.comparison.exact import exact_calls, tap_graph, tapped_jaxpr
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.padding import as_rows
from precaudit.references.token_rows import token_rows
from precaudit.references.traced.forward import CallValues, states_of


class Site(NamedTuple):
    """A point in one step of the scans around it, in one call; ``order`` sorts the sites of a call as they are made."""

    call: int
    order: tuple[int, ...]
    point: ProgramPoint
    step: tuple[int, ...]


@dataclass(frozen=True)
class Observed:
    """An entry point of a traced program, for one case; ``calls``: in FP64."""

    of: OfRun
    case: str
    calls: tuple[CallValues, ...]

    @property
    def exact(self) -> list[dict[str, Array]]:
        """Every call's values in FP64 by name."""
        return [c.exact for c in self.calls]

    @property
    def points(self) -> tuple[ProgramPoint, ...]:
        """Its points, in the order of the program."""
        return self.of.opened.record.points

    @cached_property
    def graph(self) -> tuple[dict[str, Reads], Reads]:
        """Which taps each tap reads, and which its outputs do."""
        return tap_graph(self.of, [p.name for p in self.points])

    def given(self) -> list[Array]:
        """Return its weights and the first call's inputs, those that are numbers, in FP64."""
        leaves = jax.tree.leaves((self.of.program.params, self.of.program.cases[self.case]))
        return [widen(np.asarray(x)) for x in leaves if is_numbers(x)]

    def sites(self) -> list[Site]:
        """Return every point of every call and step, in the order in which they are made."""
        found = [
            Site(call, order_in_call(p, step, self.points), p, step)
            for call, p in product(range(len(self.exact)), self.points)
            if p.name in self.exact[call]
            for step in np.ndindex(*p.stacked)
        ]
        return sorted(found, key=lambda s: (s.call, s.order))

    def value(self, site: Site, made: Mapping[str, Array] | None = None) -> Array:
        """Return a point's FP64 value in a step of a call; ``made``: of these values by name."""
        return self.whole(site, made)[site.step]

    def whole(self, site: Site, made: Mapping[str, Array] | None = None) -> Array:
        """Return a point's FP64 values in all steps of a call."""
        values = self.exact[site.call] if made is None else made
        return values[site.point.name].reshape((*site.point.stacked, *site.point.shape))

    def tap(self, site: Site) -> str:
        """Return a point's name among those that read each other: its tap's, where that is several points."""
        return site.point.name if site.point.name in self.graph[0] else site.point.name.partition("#")[0]

    def reads(self, site: Site) -> Reads:
        """Return which taps a point reads."""
        return self.graph[0].get(self.tap(site), frozenset())

    def remake(self, call: int, planted: Mapping[str, Array]) -> dict[str, Array]:
        """Return what a call makes of each point that is planted, in FP64, where it reads what is planted of others.

        ``planted``: values by name, of all steps. What is not planted is made of what is.
        """
        taps = states_of(self.of.opened.tensors(self.case, call, "taps"))
        leaves = (*jax.tree.leaves(self.of.program.params), *self.calls[call].inputs)
        with without_mesh(), jax.enable_x64(True):
            jaxpr = tapped_jaxpr(self.of)
            _, told = evaluate_planted(lambda n: Planted({}, "read", n), jaxpr, leaves, {**taps, **planted})
        return {n: np.asarray(x) for n, x in told.items()}

    def outputs(self) -> dict[str, Array]:
        """Return the rows [R, N] of every named output of all calls in FP64, call after call, without padding."""
        return self._rows(self.exact)

    def outputs_as_run(self) -> dict[str, Array]:
        """Return the same as the program made them."""
        calls = range(self.of.opened.record.calls)
        return self._rows([self.of.opened.tensors(self.case, call, "outputs") for call in calls])

    def _rows(self, calls: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        names = [p.name for p in self.of.opened.record.outputs]
        each = {n: [self.rows(i, widen(np.asarray(c[n]))) for i, c in enumerate(calls) if n in c] for n in names}
        return {n.removeprefix(OUTPUT): np.concatenate(rows) for n, rows in each.items() if rows}

    def rows(self, call: int, output: Array) -> Array:
        """Return an output of a call as rows [R, N], without those that the program says to be padding."""
        found, record = np.asarray(output_rows(output)), self.of.opened.record
        if record.lengths is None or record.tokens is None:
            return found
        given = self.of.opened.tensors(self.case, call, "inputs")
        real = as_rows(given[str(record.lengths)], *token_rows(given[str(record.tokens)]).shape)
        return found if real is None or real.size != len(found) else found[real.reshape(-1)]


def observe(opened: Opened, program: Program, case: str) -> dict[str, Observed]:
    """Return a traced program's entry points, a case of each, by name; raises CannotLift, NotChained and UserError."""
    entries = traced_entries(opened, program)
    exact = exact_calls(entries, program, case)
    return {of.opened.record.entry: Observed(of, case, tuple(calls)) for of, calls in zip(entries, exact, strict=True)}


def order_in_call(p: ProgramPoint, step: tuple[int, ...], points: Sequence[ProgramPoint]) -> tuple[int, ...]:
    """Return what sorts a point's step among all of a call, as they are made.

    At each level of scans a point is made before (0), in (1) or after (2) those that are deeper there.
    """
    at, found = points.index(p), list[int]()
    for level in range(max((len(q.stacked) for q in points), default=0)):
        inner = [i for i, q in enumerate(points) if len(q.stacked) > level and q.stacked[:level] == p.stacked[:level]]
        inside = len(p.stacked) > level
        found += [1, step[level]] if inside else [2 if inner and at > inner[0] else 0, 0]
    return (*found, at)

"""Does it matter, and what helps: what changed a program's outputs, and what its lines gain in float32 (JAX).

What changed them is of the last call that was recorded, on the inputs it had then; what lines gain is of the last calls
one after another, each on what the one before makes: a line may round what is handed on. Both are kept beside the run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.diagnosis.evidence.kept import held, keep
from precaudit.diagnosis.evidence.records import LineRemedy, Shares
from precaudit.diagnosis.evidence.shares import Goal, goal_of, split, unknown_shares
from precaudit.interpreters.jaxpr import CannotLift
from precaudit.interpreters.jaxpr.emulate import Realisation, whole
from precaudit.interpreters.jaxpr.raised import Line, product_lines, raising, rounding_lines
from precaudit.interpreters.jaxpr.sites import TAKEN
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array, widen
from precaudit.progress import Advance
from precaudit.recording.programs.program import OUTPUT_LOGITS, Program
from precaudit.recording.runs.programs import MANIFEST, Opened
from precaudit.recording.store import file_hash
from precaudit.references.traced.forward import NotChained, as_on, effort, following, small, states_of
from precaudit.references.traced.units import flushes_of, units_of
from precaudit.schema.metrics.logits import kl, top_ids
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records import number, value

SHARED, TRIED = 3, 2  # cases whose outputs are shared out; cases that lines are raised on
FEWEST, MOST_DRAWS, ENOUGH = 2, 64, 128  # realisations of the rounding; rows of the output over all of them
BASE = 4  # times as many of what every gain is measured from
WORTH = 0.1  # of the size that a line takes away for it to be worth a word
MOST = 4  # lines that are tried together
CALLS, FEW_CALLS = 64, 4  # the last ones that are run in a chain: of a small program, of a large one
DISTANCE = "distance"
NOT_FINITE = "in FP64, or as its equations round, it is not finite"
UNNAMED = 'no output is named: Program(..., outputs="logits"), or another name, says what matters'
UNLIFTED = (CannotLift, NotImplementedError, TypeError, ValueError, jax.errors.JaxRuntimeError)


Given = tuple[list[Any], dict[str, Array]]  # a call's input leaves, and what its loops decided


class Effects(NamedTuple):
    """What changed the outputs, and what lines gain, best first; ``unknown``: why the latter is not told."""

    shares: tuple[Shares, ...] = ()
    lines: tuple[LineRemedy, ...] = ()
    unknown: str = ""


class Measured(NamedTuple):
    """An output against FP64, [realisations]: mean KL over rows in nats, or relative distance; top-1 flips of all."""

    sizes: Array
    flips: int

    @property
    def size(self) -> float:
        """The mean over realisations."""
        return float(self.sizes.mean())

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(self.sizes.std(ddof=1) / len(self.sizes) ** 0.5)


@dataclass(frozen=True)
class Last:
    """The last recorded call of a program: its inputs, and the output that is looked at."""

    opened: Opened
    program: Program
    made: Tagged
    output: str

    @property
    def call(self) -> int:
        """Its number."""
        return self.opened.record.calls - 1

    def inputs(self, case: str) -> tuple[Any, ...]:
        """Return what a case's call was given."""
        return self.program.inputs(self.opened.tensors(case, self.call, "inputs"))

    def recorded(self, case: str) -> Array:
        """Return the output that is looked at as it was recorded, rows [R, N] in FP64."""
        return np.asarray(_rows(widen(self.opened.tensors(case, self.call, "outputs")[self.output])))

    def held(self, case: str) -> dict[str, Array]:
        """Return what the call's loops decided."""
        return states_of(self.opened.tensors(case, self.call, "taps"))

    def chained(self, calls: Sequence[Given], run: Callable[..., Any]) -> Any:
        """Return what the last of some calls gives, each on what ``run(*leaves, held=)`` made of the one before.

        The first is given what was recorded. Raises NotChained.
        """
        out, before = None, None
        for given, decided in calls:
            leaves = given if before is None else following(self.program, before, given)
            out = _unflatten(self, run(*jax.tree.leaves(self.program.params), *leaves, held=decided))
            before = jax.tree.unflatten(self.structure, leaves), out
        return out

    def calls(self, case: str, first: int) -> list[Given]:
        """Return what calls from the first on were given: their leaves, and what their loops decided."""
        every = range(first, self.call + 1)
        leaves = [jax.tree.leaves(self.program.inputs(self.opened.tensors(case, call, "inputs"))) for call in every]
        held = [states_of(self.opened.tensors(case, call, "taps")) for call in every]
        return list(zip(leaves, held, strict=True))

    @property
    def structure(self) -> Any:
        """The tree of a call's inputs."""
        return jax.tree.structure(next(iter(self.program.cases.values())))

    @cached_property
    def how(self) -> Realisation:
        """The program's own rounding, as its device makes it."""
        return as_on(units_of(self.opened.record), flushes_of(self.opened.record))

    @cached_property
    def jaxpr(self) -> Any:
        """The program; where it has loops whose decisions were recorded, with the taps of these."""
        if not self.made.states:
            return self.made.jaxpr
        inputs = next(iter(self.program.cases.values()))
        with jax.enable_x64(False):
            return jax.make_jaxpr(self.made.call)(self.program.params, *inputs)

    def of(self, out: Any) -> Any:
        """Return the output that is looked at as rows [R, N], out of all a call gave."""
        return _rows(self.program.named(out)[self.output])

    @property
    def distributions(self) -> bool:
        """Whether rows are logits."""
        return self.output == OUTPUT_LOGITS


def effects(opened: Opened, program: Program, made: Tagged, objective: str, tell: Advance) -> Effects:
    """Return what changed the outputs of a program's run, and what its lines gain."""
    names = [p.name for p in opened.record.outputs]
    if not names:
        return Effects(unknown=UNNAMED)
    last = Last(opened, program, made, OUTPUT_LOGITS if OUTPUT_LOGITS in names else names[0])
    objective = objective if last.distributions else DISTANCE
    found = held(opened.folder, "shares.jsonl", Shares)
    if not found or any(s.objective != objective or s.unknown for s in found):
        cases = opened.record.cases[:SHARED]
        found = tuple(
            msgspec.structs.replace(x, run=file_hash(opened.folder / MANIFEST))
            for x in _shares(last, cases, objective, tell)
        )
        keep(opened.folder, "shares.jsonl", found)
    lines = held(opened.folder, "lines.jsonl", LineRemedy)
    if lines is None:
        try:
            lines = tuple(_lines(last, tell))
        except UNLIFTED as error:
            return Effects(found, unknown=_first(error))
        keep(opened.folder, "lines.jsonl", lines)
    return Effects(found, lines)


def _shares(last: Last, cases: Sequence[str], objective: str, tell: Advance) -> Iterator[Shares]:
    """Yield the shares of every case."""
    ways = [partial(jax.jit, compiler_options=how) for how in (effort(last.made), None)]
    with jax.enable_x64(True):
        exactly = [compiled(whole(last.jaxpr, None)) for compiled in ways]
        for i, case in enumerate(cases):
            tell(i, len(cases), "gradients of the output")
            try:
                each = (_shared(last, case, objective, *way) for way in zip(exactly, ways, strict=True))
                yield next((x for x in each if x.unknown or _known(x)), unknown_shares(case, NOT_FINITE, objective))
            except UNLIFTED as error:
                yield unknown_shares(case, _first(error), objective)


def _known(found: Shares) -> bool:
    """Whether all numbers are finite; of a program that XLA optimises little they may not be, and are by default."""
    numbers = [found.fp64, found.change, found.explained, *(s.share for s in found.shares)]
    return bool(np.isfinite([value(x) for x in numbers]).all())


def _shared(last: Last, case: str, objective: str, exactly: Any, compiled: Callable[..., Any]) -> Shares:
    """Return the shares in the row of logits that is farthest from FP64's, or in the whole output."""
    if last.opened.record.layers is not None:
        return unknown_shares(case, "some layers were not recorded; trace without --layers", objective)
    recorded = last.recorded(case)
    values = {n: x for n, x in last.opened.tensors(case, last.call, "taps").items() if _floats(n, x)}
    if not all(np.isfinite(x).all() for x in (recorded, *map(widen, values.values()))):
        return unknown_shares(case, "values that were recorded are not finite", objective)
    steps = {p.name: prod(p.stacked) for p in last.opened.record.points if p.stacked and p.name in values}
    given = (last.program.params, *last.inputs(case))
    row, goal = None, _along(recorded.reshape(-1))
    if last.distributions:
        exact = np.asarray(last.of(_unflatten(last, exactly(0, *jax.tree.leaves(given), held=last.held(case)))))
        row, goal = _worst(exact, recorded), partial(goal_of, objective)

    def flat(*args: Any) -> Any:
        x = last.of(last.made.call(*args))
        return x.reshape(-1) if row is None else x[row]

    kept = recorded.reshape(-1) if row is None else recorded[row]
    found = split(flat, values, given, kept, goal, compiled=compiled, steps=steps, held=last.held(case))
    return found.record(case, objective, last.output)


def _along(recorded: Array) -> Callable[[Array], Goal]:
    """Return the distance from FP64 along the direction in which the output was off: linear, so that shares add up."""

    def goal(exact: Array) -> Goal:
        off = recorded - exact
        unit = off / size if (size := norm(off)) else off
        return lambda x: jnp.dot(x - exact, unit)

    return goal


@dataclass(frozen=True)
class Trial:
    """A program's lines that round to less than float32, and what its output is with some of them raised to it.

    ``sizes``: bytes that each line's results take more then; ``products``: lines whose products a device makes of
    narrower parts; ``calls``: what each case's calls were given that are run, one after another; ``exact``: rows [R, N]
    of each case in FP64; ``real``: how far the output was as it ran.
    """

    last: Last
    sizes: dict[Line, int]
    products: set[Line]
    calls: dict[str, list[Given]]
    exact: dict[str, Array]
    raised: Callable[..., Any]
    real: float

    @classmethod
    def of(cls, last: Last, cases: Sequence[str], options: dict[str, Any] | None) -> "Trial":
        """Compile a program for its lines to be tried on cases; raises as the FP64 shadow does.

        ``options``: the compiler's.
        """
        sizes = rounding_lines(last.made.jaxpr.jaxpr, last.how)
        products = product_lines(last.made.jaxpr.jaxpr, last.how)
        exactly = partial(jax.jit(whole(last.jaxpr, None), compiler_options=options), 0)
        raised = jax.jit(raising(last.jaxpr, last.how, tuple(sizes)), compiler_options=options)
        first = max(last.call + 1 - (CALLS if small(last.made) else FEW_CALLS), 0)
        calls = {c: last.calls(c, first) for c in cases if sizes}

        def ends() -> dict[str, Array]:
            return {c: np.asarray(last.of(last.chained(given, exactly))) for c, given in calls.items()}

        try:
            exact = ends()
        except NotChained:
            calls = {c: given[-1:] for c, given in calls.items()}
            exact = ends()
        each = [_distance(x, last.recorded(c), last.distributions)[0] for c, x in exact.items()]
        return cls(last, sizes, products, calls, exact, raised, float(np.mean(each)) if each else 0.0)

    @property
    def rows(self) -> int:
        """Rows of the output, of all cases."""
        return sum(map(len, self.exact.values()))

    @property
    def draws(self) -> int:
        """How many realisations of the rounding give each line enough rows."""
        return min(max(-(-ENOUGH // max(self.rows, 1)), FEWEST), MOST_DRAWS)

    def measured(self, which: Sequence[int], times: int = 1) -> Measured:
        """Return how far the output is from FP64 with some lines raised; ``times`` as many realisations."""
        mask = np.zeros(len(self.sizes), bool)
        mask[list(which)] = True
        each = []
        for case, exact in self.exact.items():
            for seed in range(1, times * self.draws + 1):
                run = partial(self.raised, np.uint64(seed), mask)
                out = self.last.of(self.last.chained(self.calls[case], run))
                each.append(_distance(exact, np.asarray(out), self.last.distributions))
        return Measured(np.asarray([size for size, _ in each]), sum(flips for _, flips in each))

    def remedy(self, which: Sequence[int], before: Measured, best: Measured) -> LineRemedy:
        """Return what raising some lines changes; ``before``: with none, ``best``: with all of them raised."""
        lines, after, size = list(self.sizes), self.measured(which), before.size or 1.0
        return LineRemedy(
            run=file_hash(self.last.opened.folder / MANIFEST), output=self.last.output,
            measure="kl" if self.last.distributions else "distance",
            sources=tuple(lines[i].source for i in which), text=tuple(lines[i].text for i in which),
            size=(number(before.size), number(after.size)), all=number(best.size),
            flips=(round(before.flips / BASE), after.flips), rows=self.rows * self.draws,
            gain=number((before.size - after.size) / size),
            error=number(float(np.hypot(before.error, after.error)) / size),
            bytes=sum(self.sizes[lines[i]] for i in which), real=number(self.real),
            calls=max(map(len, self.calls.values())),
            products=tuple(lines[i].source for i in which if lines[i] in self.products),
        )  # fmt: skip


def _lines(last: Last, tell: Advance) -> Iterator[LineRemedy]:
    """Yield what each line that rounds gains in float32 alone, largest gain first; then those that help, together."""
    with jax.enable_x64(True):
        for options in (effort(last.made), None):
            trial = Trial.of(last, last.opened.record.cases[:TRIED], options)
            n = len(trial.sizes)
            if not n:
                return
            tell(0, n + 2, "lines in float32")
            before, best = trial.measured((), BASE), trial.measured(range(n))
            if np.isfinite([before.size, best.size]).all():
                break
        else:
            raise ValueError(NOT_FINITE)
        found = []
        for i in range(n):
            tell(i + 1, n + 2, "lines in float32")
            found.append((i, trial.remedy((i,), before, best)))
        found = sorted((f for f in found if np.isfinite(value(f[1].gain))), key=lambda f: -float(f[1].gain))
        yield from (r for _, r in found)
        helps = [i for i, r in found if worth(r)][:MOST]
        if len(helps) > 1:
            yield trial.remedy(helps, before, best)
        tell(n + 2, n + 2, "lines in float32")


def worth(r: LineRemedy) -> bool:
    """Whether a line's gain is worth a word, and told from what other realisations of the rounding would give."""
    return float(r.gain) >= max(WORTH, 2 * float(r.error))


def _distance(exact: Array, made: Array, distributions: bool) -> tuple[float, int]:
    """Return how far rows [R, N] are from FP64's, and top-1 flips; the mean is of rows that are finite."""
    if not distributions:
        return ratio(norm(made - exact), norm(exact)), 0
    each = [kl(e, m) for e, m in zip(exact, made, strict=True) if np.isfinite(e).all() and np.isfinite(m).all()]
    flips = sum(int(top_ids(e, 1)[0] != top_ids(m, 1)[0]) for e, m in zip(exact, made, strict=True))
    return float(np.mean(each)) if each else 0.0, flips


def _worst(exact: Array, recorded: Array) -> int:
    """Return the row of logits that is farthest from FP64's, in KL."""
    each = [kl(e, r) for e, r in zip(exact, recorded, strict=True)]
    return int(np.nanargmax(each)) if np.isfinite(each).any() else 0


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def _unflatten(last: Last, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(last.made.structure, leaves)


def _floats(name: str, x: Array) -> bool:
    """Whether a recorded tensor is a point's values, which an error may be added to."""
    return not name.endswith(TAKEN) and bool(jnp.issubdtype(x.dtype, jnp.floating))


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""A program's own jaxpr as the reference of its run: segments between points, and the whole, call after call (JAX)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from precaudit.interpreters.jaxpr.opaque import Opaque, without_opaque
from precaudit.interpreters.jaxpr.shadow import CannotLift, refusal
from precaudit.interpreters.jaxpr.sites import unique_names
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.program import OUTPUT_LOGITS, NextInputs, Program
from precaudit.recording.runs.program_places import compared_places
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.references.traced.chosen import Choices
from precaudit.references.traced.decided import Decided
from precaudit.references.traced.forward import (
    DRAWS,
    MANY,
    CallValues,
    Chains,
    Ended,
    NotChained,
    forward_numbers,
    recorded_calls,
)
from precaudit.references.traced.infinities import few_infinite
from precaudit.references.traced.judged import ALIKE, Recomputed, lacks_of, record_of, step_of
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.units import flushes_of, units_of
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import forward_checks
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ForwardError, StateError

CHAINED = "calls in FP64 and with sampled rounding"
At = tuple[int, int | None, str]  # call, layer, point


class LogitRows(NamedTuple):
    """A call's FP64 logits, and the mean square error of them that draws of the program's rounding make."""

    exact: Array
    power: float

    @classmethod
    def of(cls, made: CallValues) -> "LogitRows":
        """Return those of a call."""
        exact = made.exact[OUTPUT_LOGITS]
        with np.errstate(invalid="ignore"):
            each = [np.mean(np.square(np.nan_to_num(x[OUTPUT_LOGITS] - exact))) for x in made.drawn]
        return cls(exact, float(np.mean(each)) if each else 0.0)


class ChainOptions(NamedTuple):
    """How a case's chains are run, as ``Chains.calls``; ``decided``: with what recorded values decide at thresholds."""

    strictly: bool = False
    drawn: int = DRAWS
    decided: bool = False
    shuffled: bool = False


class Traced:
    """An entry point beside a run of it: compiled once, a call's segments and a case's calls made when first asked for.

    ``exact``: every call's FP64 values of the case last looked at, as far as FP64 came; held only where they are
    ``kept``, since they are as large as the run's tensors four times. ``logits``: of that case, every call's.
    ``before``: the entry point that this one goes on from, and what makes the first inputs of what that ends with.
    ``accum``: formats that sums of products are made in. ``some``: the places that have local records, None: all.
    """

    def __init__(
        self,
        entry: OfRun,
        tell: Advance,
        kept: bool = False,
        before: tuple["Traced", NextInputs] | None = None,
        accum: Sequence[str] = (),
        some: Collection[Place] | None = None,
    ) -> None:
        opened, program, made = self.opened, self.program, self.made = entry
        self.tell, self.kept, self.some = tell, kept, some
        units, flush = units_of(opened.record), flushes_of(opened.record)
        seen, opaque = without_opaque(made, program.params, *next(iter(program.cases.values())))
        self.segments = Emulations(seen, opened.record.layers, units, opaque, flush, accum)
        self.choices = Choices(seen, opened.record.layers)
        self.chains = Chains(program, seen, units, flush)
        self._deciding = partial(Decided.of, program, seen, units, flush)
        self.following, self.unknown = opaque.following, _unknown(program, made, opaque)
        self.before, self.exact = before, list[dict[str, Array]]()
        self._call: tuple[str, int] | None = None
        self._locals: dict[tuple[int | None, str], list[Recomputed]] = {}
        self._case: str | None = None
        self._forwards: dict[At, ForwardError] = {}
        self._ends: dict[ChainOptions, list[Ended]] = {}
        self.logits: list[LogitRows] = []

    def values(self, place: Place) -> Array | None:
        """Return FP64 values of the whole program at a place; None where it did not come there, or none are kept."""
        self._run_chain(place.prompt)
        if self._lacks(place.step, place.point) is not None:
            return None
        found = self.exact[place.step].get(place.point) if place.step < len(self.exact) else None
        point = self._points().get(place.point)
        return None if found is None or point is None else step_of(self.opened.record, point, place.layer)(found)

    def local(self, place: Place) -> Iterator[Recomputed]:
        """Yield the record of a segment, and what other accumulation makes of it; nothing of an output, no point."""
        here = (place.prompt, place.step)
        if here != self._call:
            taps, args = self.opened.tensors(*here, "taps"), (self.program.params, *self.inputs(*here))
            made = self.segments.records(self.opened, *here, taps, args, self._some_of(*here))
            self._call, self._locals = here, {}
            for e in made:
                self._locals.setdefault((e.layer, e.point), []).append(e)
            calls = self.opened.record.calls
            done = self.opened.record.cases.index(place.prompt) * calls + place.step + 1
            self.tell(done, len(self.opened.record.cases) * calls, "segments in FP64 and emulated")
        yield from self._locals.get((place.layer, place.point), ())

    def _some_of(self, case: str, call: int) -> set[tuple[str, int | None]] | None:
        """Return which places of a call have local records, None: all."""
        if self.some is None:
            return None
        at = (case, self.opened.record.phase, call)
        return {(p.point, p.layer) for p in self.some if (p.prompt, p.phase, p.step) == at}

    def forward(self, place: Place) -> Iterator[ForwardError]:
        """Yield the record of a point or an output against the program in FP64, chained through its own state."""
        self._run_chain(place.prompt)
        yield self._forwards[place.step, place.layer, place.point]

    def chosen(self, case: str, call: int) -> Iterator[StateError]:
        """Yield the records of a call's choices."""
        taps = self.opened.tensors(case, call, "taps")
        yield from self.choices.records(self.opened, case, call, taps, (self.program.params, *self.inputs(case, call)))

    def inputs(self, case: str, call: int) -> tuple[Any, ...]:
        """Return what a call was given, as recorded."""
        return self.program.inputs(self.opened.tensors(case, call, "inputs"))

    def _lacks(self, call: int, point: str) -> str | None:
        """Return why there are no FP64 values of the whole program at a point of a call; None where there are."""
        return self.unknown.get(point) if call == 0 else self.following or self.unknown.get(point)

    def _points(self) -> dict[str, ProgramPoint]:
        record = self.opened.record
        return {p.name: p for p in (*record.points, *record.outputs)}

    def _run_chain(self, case: str) -> None:
        """Run a case in FP64 and as drawn realisations, unless that was the last one.

        These leave out what a compiler may leave unrounded. What is farther off than they are is held against those
        that round every result, and sums in their own format, as the program declares it. What is then is held against
        those that decide at thresholds as the recorded values do, and against those that add up in other orders: of a
        product that cancels one order may happen to leave nothing.
        """
        if case == self._case:
            return
        self._case, self.exact, self._ends, self.logits = case, [], {}, []
        self._forwards = self._calls(case, ChainOptions())
        if self._far() and self.chains.other:
            again = self._calls(case, ChainOptions(strictly=True))
            self._forwards |= {at: again[at] for at in self._far() if again[at].unknown is None}
        decides = self._far() != [] and self.decided is not None
        others = [ChainOptions(self.chains.other, decided=True)] if decides else []
        for way in (*others, ChainOptions(decided=decides, shuffled=True)):
            if self._far():
                again = self._calls(case, way)
                near = [at for at in self._far() if again[at].unknown is None and _near(again[at])]
                self._forwards |= {at: again[at] for at in near}
        if self.small and (masked := [at for at, e in self._forwards.items() if few_infinite(e)]):
            many = self._calls(case, ChainOptions(drawn=MANY))  # whether rounding decides of them
            self._forwards |= {at: many[at] for at in masked}

    def _far(self) -> list[At]:
        return [at for at, e in self._forwards.items() if not _near(e)]

    @cached_property
    def decided(self) -> Decided | None:
        """Chains that go on with what recorded values decide; None where nothing does, or steps were not recorded."""
        return None if self.opened.record.layers is not None else self._deciding()

    def alone(self, case: str) -> list[dict[str, Array]]:
        """Return every call's FP64 values from the first recorded inputs on, as far as FP64 comes."""
        if self.before is None:
            self._run_chain(case)
            return self.exact
        found = []
        try:
            with jax.enable_x64(True):
                for made in self.chains.calls(recorded_calls(self.opened, case), drawn=0):
                    found.append(self._of_recorded_steps(made.exact))  # what came before an exception is kept
        except (CannotLift, NotImplementedError, NotChained):
            return found
        return found

    @property
    def small(self) -> bool:
        """Whether many draws are affordable, of the entry points before, too."""
        return self.chains.small and (self.before is None or self.before[0].small)

    def ends(self, case: str, way: ChainOptions) -> list[Ended]:
        """Return what FP64 and the drawn chains of a case end with; raises NotChained where they do not come there."""
        self._run_chain(case)
        if way not in self._ends:
            self._calls(case, way)
        if not self._ends[way]:
            raise NotChained(f"{self.opened.record.entry} was not run in FP64 to its end")
        return self._ends[way]

    def _calls(self, case: str, way: ChainOptions) -> dict[At, ForwardError]:
        """Return the forward records of a case."""
        record = self.opened.record
        every, calls, done = compared_places(record), range(record.calls), 0
        told: dict[At, ForwardError] = {}
        first, self._ends[way] = way == ChainOptions(), []
        decided = self.decided if way.decided else None
        chains, recorded = (
            (self.chains, recorded_calls) if decided is None else (decided.chains, decided.recorded_calls)
        )
        try:
            with jax.enable_x64(True):
                begun = None if self.before is None else (self.before[1], self.before[0].ends(case, way))
                given = recorded(self.opened, case)
                for call, made in enumerate(chains.calls(given, way.drawn, way.strictly, begun, way.shuffled)):
                    made = CallValues(
                        self._of_recorded_steps(made.exact), tuple(map(self._of_recorded_steps, made.drawn))
                    )
                    stored = self.opened.tensors(case, call, "taps")
                    if record.outputs:
                        stored |= self.opened.tensors(case, call, "outputs")
                    for p, layer in every:
                        told[call, layer, p.name] = self._record(case, call, p, layer, stored, made)
                    if OUTPUT_LOGITS in made.exact and first:
                        self.logits.append(LogitRows.of(made))
                    self.exact += [made.exact] if self.kept and first else []
                    done = call + 1
                    self.tell(done, len(calls), f"{case}: {CHAINED}")
                self._ends[way] = chains.ends
        except (CannotLift, NotImplementedError, NotChained) as error:
            for call in calls[done:]:
                for p, layer in every:
                    why = refusal(error)
                    told[call, layer, p.name] = record_of(ForwardError, self.opened, case, call, p, layer, unknown=why)
        return told

    def _of_recorded_steps(self, values: dict[str, Array]) -> dict[str, Array]:
        """Return a call's values of the steps that the run holds."""
        layers, scanned = self.opened.record.layers, {p.name for p in self.opened.record.points if p.stacked}
        if layers is None:
            return values
        return {n: x[[i for i in layers if i < len(x)]] if n in scanned else x for n, x in values.items()}

    def _record(
        self, case: str, call: int, p: ProgramPoint, layer: int | None, stored: dict[str, Array], made: CallValues
    ) -> ForwardError:
        values = stored.get(p.name)
        if lacks := lacks_of(self.opened.record, p, layer, values, stored):
            return record_of(ForwardError, self.opened, case, call, p, layer, **lacks)
        assert values is not None
        if (why := ALIKE if p.dtype == "float64" else self._lacks(call, p.name)) is not None:
            return record_of(ForwardError, self.opened, case, call, p, layer, unknown=why)
        one = step_of(self.opened.record, p, layer)
        drawn = [one(each[p.name]) for each in made.drawn]
        numbers = forward_numbers(one(values), one(made.exact[p.name]), drawn, p.name == OUTPUT_LOGITS, p.shape)
        return record_of(ForwardError, self.opened, case, call, p, layer, **numbers)


@dataclass(frozen=True)
class _Output:
    """An output's format, and why it has no FP64 meaning."""

    dtype: Any
    why: str | None


def _unknown(program: Program, made: Tagged, opaque: Opaque) -> dict[str, str]:
    """Return why points and outputs of the whole program have no FP64 meaning, by name: of those that have none."""
    if not opaque.whole and opaque.following is None:
        return {}
    each = [_Output(a.dtype, why) for a, why in zip(made.jaxpr.out_avals, opaque.outputs, strict=True)]
    outputs = {n: x.why for n, x in program.named_outputs(jax.tree.unflatten(made.structure, each)).items()}
    points = {n: opaque.whole.get(s.name) for n, s in zip(unique_names(made.sites), made.sites, strict=True)}
    return {n: why for n, why in (points | outputs).items() if why is not None}


def _near(e: ForwardError) -> bool:
    """Whether a forward record is within every limit, or has no numbers that other realisations would change."""
    near = all(found <= limit for _, _, found, limit, _ in forward_checks(e, default_limits()))
    return near and not few_infinite(e)

"""Chains in FP64 that go on with what a run's own values decided at thresholds (JAX)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.decisions import decisions, tag_decisions
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.references.traced.forward import Chains, RecordedCall, as_on, effort, recorded_calls
from precaudit.references.traced.units import Units


class Decided:
    """The chains of a program and what decides in it, compiled once.

    The decisions are made again of recorded values. Those of a run that made others are not explained by them.
    """

    def __init__(self, program: Program, made: Tagged, units: Units | None, flush: bool) -> None:
        self.program, self.chains = program, Chains(program, made, units, flush)
        self.decide = jax.jit(decisions(made, as_on(units, flush)), compiler_options=effort(made))

    @classmethod
    def of(cls, program: Program, made: Tagged, units: Units | None, flush: bool) -> "Decided | None":
        """Return those of a program; None where rounding decides nothing in it."""
        tagged = tag_decisions(made, program.params, *next(iter(program.cases.values())))
        return None if tagged is None else cls(program, tagged, units, flush)

    def recorded_calls(self, opened: Opened, case: str) -> Iterator[RecordedCall]:
        """Yield every call of a case as its run has it, with its decisions. Raises as ``plant`` does."""
        for call in recorded_calls(opened, case):
            values = {n: jnp.asarray(x) for n, x in call.taps.items()}
            found = self.decide(values, self.program.params, *self.program.inputs(call.inputs))
            yield call._replace(taps=call.taps | {n: np.asarray(x) for n, x in found.items()})

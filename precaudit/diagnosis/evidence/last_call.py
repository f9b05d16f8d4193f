"""The last recorded call of a program, run again: its inputs, its calls in a chain, the output looked at (JAX)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from precaudit.interpreters.jaxpr.excess import Unrounded
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.programs.program import OUTPUT_LOGITS, Program
from precaudit.recording.runs.programs import Opened
from precaudit.references.traced.forward import as_on, chain_inputs, states_of
from precaudit.references.traced.units import flushes_of, units_of

NOT_FINITE = "in FP64, or as its equations round, it is not finite"


Given = tuple[list[Any], dict[str, Array]]  # a call's input leaves, and what its loops decided


@dataclass(frozen=True)
class Last:
    """The last recorded call of a program: its inputs, and the output that is looked at.

    ``unrounded``: which results the emulation does not round; None: those that ``ROUNDED`` does not.
    """

    opened: Opened
    program: Program
    made: Tagged
    output: str
    unrounded: Unrounded | None = None

    @property
    def call(self) -> int:
        """Its number."""
        return self.opened.record.calls - 1

    def inputs(self, case: str) -> tuple[Any, ...]:
        """Return what a case's call was given."""
        return self.program.inputs(self.opened.tensors(case, self.call, "inputs"))

    def recorded_output(self, case: str) -> Array:
        """Return the output that is looked at as it was recorded, rows [R, N] in FP64."""
        return np.asarray(output_rows(widen(self.opened.tensors(case, self.call, "outputs")[self.output])))

    def loop_decisions(self, case: str) -> dict[str, Array]:
        """Return what the call's loops decided."""
        return states_of(self.opened.tensors(case, self.call, "taps"))

    def run_chain(self, calls: Sequence[Given], run: Callable[..., Any]) -> Any:
        """Return what the last of some calls gives, each on what ``run(*leaves, held=)`` made of the one before.

        The first is given what was recorded. Raises NotChained.
        """
        out, before = None, None
        for given, decided in calls:
            leaves = given if before is None else chain_inputs(self.program.advance, before, given)
            out = call_outputs(self, run(*jax.tree.leaves(self.program.params), *leaves, held=decided))
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
        how = as_on(units_of(self.opened.record), flushes_of(self.opened.record))
        return how if self.unrounded is None else replace(how, unrounded=self.unrounded)

    @cached_property
    def jaxpr(self) -> Any:
        """The program; where it has loops whose decisions were recorded, with the taps of these."""
        if not self.made.states:
            return self.made.jaxpr
        inputs = next(iter(self.program.cases.values()))
        with jax.enable_x64(False):
            return jax.make_jaxpr(self.made.call)(self.program.params, *inputs)

    def of(self, out: object) -> Any:
        """Return the output that is looked at as rows [R, N], out of all a call gave."""
        return output_rows(self.program.named_outputs(out)[self.output])

    @property
    def distributions(self) -> bool:
        """Whether rows are logits."""
        return self.output == OUTPUT_LOGITS


def output_rows(x: Any) -> Any:
    """Return an output as rows [R, N]; a number as one row of one."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def call_outputs(last: Last, leaves: Sequence[Any]) -> Any:
    """Return leaves as the program's call gives its outputs."""
    return jax.tree.unflatten(last.made.structure, leaves)

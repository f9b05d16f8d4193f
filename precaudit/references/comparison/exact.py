"""The FP64 values of every call of a traced program, and which of its points reads which (JAX)."""

from collections.abc import Sequence
from typing import Any

import jax

from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.interpreters.jaxpr.reads import Reads, names_apart, reads
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.program import Program
from precaudit.references.entry_textbooks import goes_on
from precaudit.references.traced.forward import Begun, CallValues, Chains, recorded_calls


def exact_calls(entries: Sequence[OfRun], program: Program, case: str) -> list[list[CallValues]]:
    """Return the FP64 values of every call of a case, entry point by entry point, each on what the last one leaves.

    ``entries``: as ``traced_entries`` gives them. Raises CannotLift and NotChained.
    """
    found: list[list[CallValues]] = []
    before: tuple[OfRun, Chains] | None = None
    with without_mesh(), jax.enable_x64(True):
        for of in entries:
            begun: Begun | None = None
            if before is not None and goes_on(program, before[0], of.program):
                begun = program.then[of.program.entry].begin, before[1].ends
            chains = Chains(of.program, of.made)
            found.append([*chains.calls(recorded_calls(of.opened, case), drawn=0, begun=begun)])
            before = of, chains
    return found


def tapped_jaxpr(of: OfRun) -> Any:
    """Return the closed jaxpr of an entry point with its taps."""
    with jax.enable_x64(False):
        return jax.make_jaxpr(of.made.call)(of.program.params, *next(iter(of.program.cases.values())))


def tap_graph(of: OfRun, names: Sequence[str]) -> tuple[dict[str, Reads], Reads]:
    """Return which taps each tap of an entry point reads, and which its outputs do; ``names``: of its points."""
    closed = tapped_jaxpr(of)
    read, outputs = reads(closed.jaxpr, names_apart(closed.jaxpr, names))
    return read, frozenset().union(*outputs)

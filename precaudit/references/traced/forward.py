"""Forward errors of a program's run: against its FP64 shadow, call after call through its own state (JAX)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.effort import least_effort
from precaudit.interpreters.jaxpr.emulate import emulate_program
from precaudit.interpreters.jaxpr.multiplying import TF32
from precaudit.interpreters.jaxpr.realisations import Realisation, elidable
from precaudit.interpreters.jaxpr.sites import STATE, TAKEN
from precaudit.interpreters.jaxpr.sums import sums_narrow
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.programs.program import NextInputs, Program
from precaudit.recording.runs.programs import Opened
from precaudit.references.traced.infinities import as_decided
from precaudit.references.traced.units import Units
from precaudit.schema.metrics.axes import worst_line
from precaudit.schema.metrics.logits import distribution, expected_kl, roundoff_kl
from precaudit.schema.metrics.sizes import canonical, norm, ratio, sizes
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import Distribution

DRAWS = 8  # realisations of the rounding errors that forward noise is pooled over
MANY = 40  # of a small program, where few elements are infinite that FP64 has not so, or the other way round
ROUNDED = Realisation("converted", sums="single")
SMALL = 1 << 22  # values of all points


class RecordedCall(NamedTuple):
    """A call as a run has it: its input leaves by their numbers, and its taps."""

    inputs: dict[str, Array]
    taps: dict[str, Array]


class CallValues(NamedTuple):
    """A call's taps and named outputs in FP64, and the same of every drawn realisation of the program's rounding.

    ``inputs``: the leaves of the call's inputs in FP64.
    """

    exact: dict[str, Array]
    drawn: tuple[dict[str, Array], ...]
    inputs: Sequence[Any] = ()


def states_of(taps: dict[str, Array]) -> dict[str, Array]:
    """Return what a call's loops decided, out of its taps."""
    return {n: x for n, x in taps.items() if n.startswith(STATE) and not n.endswith(TAKEN)}


def recorded_calls(opened: Opened, case: str) -> Iterator[RecordedCall]:
    """Yield every call of a case as its run has it."""
    for call in range(opened.record.calls):
        yield RecordedCall(opened.tensors(case, call, "inputs"), opened.tensors(case, call, "taps"))


Ended = tuple[Any, Any]  # a chain's inputs and outputs of a call
Begun = tuple[NextInputs, Sequence[Ended]]


class NotChained(Exception):
    """What ``advance`` raised on a chain's own outputs: no forward error is known from that call on."""


class Chains:
    """The program as FP64 and as drawn realisations, compiled once and run call after call.

    ``units``: how the device makes products, None: as they declare. ``flush``: whether it makes 0 of subnormals.
    ``ends``: the last call's inputs and outputs of every chain that was run last.
    """

    def __init__(self, program: Program, made: Tagged, units: Units | None = None, flush: bool = False) -> None:
        self.ends: list[Ended] = []
        first = next(iter(program.cases.values()))
        self.program = program
        shape: Any
        with jax.enable_x64(False):
            collected = reap(made.call, {s.name for s in made.sites})
            jaxpr, shape = jax.make_jaxpr(collected, return_shape=True)(program.params, *first)
        self.structure = jax.tree.structure(shape)
        self.inputs, self.small = jax.tree.structure(first), small(made)
        how = effort(made)
        narrow = sums_narrow(jaxpr.jaxpr)
        self.other = narrow or elidable(jaxpr.jaxpr)  # whether ``declared`` rounds otherwise than ``rounded``
        self.exact = jax.jit(emulate_program(jaxpr, None), compiler_options=how)
        realisation = as_on(units, flush)
        self.rounded = jax.jit(emulate_program(jaxpr, realisation), compiler_options=how)
        declared = replace(realisation, unrounded="none", sums="own" if narrow else realisation.sums)
        if realisation.unit == "gpu":  # which makes again in each fusion what several read
            self.other, declared = True, replace(declared, apart=True)
        self.declared = jax.jit(emulate_program(jaxpr, declared), compiler_options=how)
        shuffled = replace(realisation, sums="shuffled")
        self.shuffled = jax.jit(emulate_program(jaxpr, shuffled), compiler_options=how)

    def calls(
        self,
        recorded: Iterable[RecordedCall],
        drawn: int = DRAWS,
        strictly: bool = False,
        begun: Begun | None = None,
        shuffled: bool = False,
    ) -> Iterator[CallValues]:
        """Yield every call's values; ``recorded``: each call's input leaves and taps.

        What a run decided is given to all chains: integers among the inputs, and what its loops' states held of them
        and when these ended. ``drawn``: with so many realisations; ``strictly``: they round every result,
        and a sum in a narrow format after every term. ``begun``: what the chains of the entry point before end with,
        and what makes the first inputs of that (None: these are the recorded ones). ``shuffled``: each realisation adds
        up sums in float32 in an order of its own, and not in this device's.

        Under ``jax.enable_x64(True)``. Raises CannotLift as ``shadow`` does, and NotChained.
        """
        chains: list[Callable[..., Any]] = [partial(self.exact, 0)]
        rounded = self.shuffled if shuffled else self.declared if strictly else self.rounded
        chains += [partial(rounded, np.uint64(seed + 1)) for seed in range(drawn)]
        make, ends = (self.program.advance, [None] * len(chains)) if begun is None else begun
        said = "advance" if begun is None else "begin"
        held: list[Ended | None] = [*ends]
        weights = jax.tree.leaves(self.program.params)
        for leaves, taps in recorded:
            given = jax.tree.leaves(self.program.inputs(leaves))
            decided = states_of(taps)
            made: list[dict[str, Array]] = []
            for i, run in enumerate(chains):
                before = held[i]
                mine = given if before is None else chain_inputs(make, before, given, said)
                out, values = jax.tree.unflatten(self.structure, run(*weights, *mine, held=decided))
                held[i] = (jax.tree.unflatten(self.inputs, mine), out)
                named = values | self.program.named_outputs(out)
                made.append({n: np.asarray(x) for n, x in named.items()})
            make, said = self.program.advance, "advance"
            self.ends = [x for x in held if x is not None]
            yield CallValues(made[0], tuple(made[1:]), jax.tree.leaves(self.ends[0][0]))


def as_on(units: Units | None, flush: bool) -> Realisation:
    """Return a program's own rounding as a device makes it; ``units``, ``flush``: as ``Chains`` takes them."""
    how = replace(ROUNDED, flush=flush)
    if units is None or units.cpu:
        return how if units is None else units.making(how)
    return replace(units.making(how), otherwise=TF32, sums="shuffled") if units.gpu else replace(how, unit="matrix")


def chain_inputs(make: NextInputs | None, before: Ended, given: list[Any], said: str = "advance") -> list[Any]:
    """Return the leaves of a chain's next call: floats as the chain has them, whatever is no float as it was recorded.

    ``make``: the program's ``advance``, or an entry point's ``begin``; ``before``: the chain's inputs and outputs of
    the call before; ``given``: the recorded leaves. Raises NotChained.
    """
    assert make is not None
    try:
        held = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, before)
        own = jax.tree.leaves(make(*held))
        shapes = [np.shape(x) for x in own]
    except Exception as error:  # the user's code, made for the program's own formats
        first = (str(error).strip().splitlines() or [""])[0]
        raise NotChained(f"{said}, on FP64 outputs: {type(error).__name__}: {first}") from error
    if shapes != [np.shape(x) for x in given]:
        raise NotChained(f"{said}, on FP64 outputs: gave shapes {shapes}, not those of the inputs")
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in given]
    return [mine if is_float else x for mine, x, is_float in zip(own, given, floats, strict=True)]


def effort(made: Tagged) -> dict[str, Any]:
    """Return how hard XLA is to optimise FP64 passes: their values do not depend on it.

    Of a small program most of the time would be the compiler's, of a large one it is the passes'.
    """
    return least_effort() if small(made) else {"xla_backend_optimization_level": 1}


def small(made: Tagged) -> bool:
    """Whether compiling takes more of a pass over a program than its values do."""
    return sum(prod((*s.stacked, *s.shape)) for s in made.sites) < SMALL


def forward_numbers(
    stored: Array, exact: Array, drawn: list[Array], logits: bool = False, shape: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Return a forward record's fields; arrays [rows, N]: what leads is rows.

    ``shape``: the point's own (None: [rows, N]), along all of whose axes lines are looked at. ``logits``: rows are
    those of a vocabulary, and their distributions are compared too.
    """
    rows = np.arange(len(stored))
    exact = as_decided(stored, exact, drawn)
    found = sizes(stored, canonical(exact, "TD"), "TD", rows)
    with np.errstate(invalid="ignore"):
        error, *errors = (np.nan_to_num(widen(x) - exact, nan=0.0, posinf=0.0, neginf=0.0) for x in (stored, *drawn))
    energy = np.zeros(exact.shape)
    for e in errors:
        energy += e**2 / len(errors)
    power = np.where(np.isfinite(exact), exact, 0.0) ** 2
    noise = float(np.sqrt(energy.sum()))
    found |= {
        "ratio": json_number(ratio(norm(error), noise)),
        "noise": json_number(ratio(noise, float(np.sqrt(power.sum())))),
    }
    # a line's draws are few: the tensor's relative noise is added to them
    floor = ratio(float(energy.sum()), float(power.sum())) if power.any() else 0.0
    if error.size:
        each = stored.shape if shape is None else shape
        worst = worst_line((error**2).reshape(each), (energy + floor * power).reshape(each))
        found["scopes"].setdefault("token", {})["ratio"] = (json_number(worst.excess), worst.row)
        found["slices"] = {"token": worst.slices}
    if logits:
        found["distribution"] = _distribution(widen(stored), exact, errors, energy.sum(axis=1))
    return found


def _distribution(stored: Array, exact: Array, errors: list[Array], energy: Array) -> Distribution:
    """Compare next-token distributions; the noise of KL is of the draws' errors of all rows, brought to a row's rms."""
    size = np.sqrt(energy)
    scale = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)[:, None]
    noise = size**2 * expected_kl(exact, (e * scale for e in errors)) + roundoff_kl(exact)
    return distribution(stored, exact, np.arange(len(stored)), noise)

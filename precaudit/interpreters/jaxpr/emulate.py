"""A program's own roundings emulated: its FP64 shadow with every result rounded to the format its equation declares.

Between taps, whose recorded values are planted, this makes each segment of a program again from what it read: strictly,
with the narrow roundings inside left out as a compiler may, or as other honest realisations of the same program.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.emulator import TWO, Emulator
from precaudit.interpreters.jaxpr.plant import Planted, Values, WantedSteps, fitting, planting
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.shadow import Lift
from precaudit.interpreters.jaxpr.sites import sites, unique_names
from precaudit.interpreters.jaxpr.wide import up


def emulate_segments(
    function: Callable[..., Any],
    how: Realisation,
    lift: Mapping[str, Lift] | None = None,
    steps: Sequence[int] | None = None,
    wanted: WantedSteps | None = None,
    seed: jax.Array | None = None,
) -> Callable[..., dict[str, tuple[Any, Any]]]:
    """Return ``g(values, *args) → {tap: (rounded, unrounded)}``, what its segment makes of the taps before it.

    ``values`` as ``plant`` takes them; every tap given is planted, so that each segment reads recorded inputs. Both are
    FP64 in the shape of values, as the tap's own format holds it and as it was before that: a compiler may hand a
    reader the latter. ``steps``: those of outermost scans that have values (None: all). ``wanted``: a tap, and at
    which steps it is asked for; in others only what leads there is made. ``seed``: instead of the realisation's own; a
    tracer may be one. Of values that are two of each both are as the format holds them: of the first, and of the
    second. Under ``jax.enable_x64(True)``. Raises as ``plant`` does.
    """

    def interpreter(names: Collection[str]) -> Planted:
        run = Emulator(dict(lift or {}), names, how, seed)
        run.wanted = wanted
        return run

    run = planting(function, interpreter, steps=steps)
    if not how.apart:
        return run

    def two(values: Values, *args: Any) -> dict[str, tuple[Any, Any]]:
        both = jax.vmap(lambda held: run(held, *args), axis_name=TWO)(values)
        return {name: (made[0], made[1]) for name, (made, _) in both.items()}

    return two


def exactly(
    function: Callable[..., Any], lift: Mapping[str, Lift] | None = None, steps: Sequence[int] | None = None
) -> Callable[..., Values]:
    """Return the same in FP64: what each segment makes of recorded inputs without any rounding."""
    return planting(function, lambda names: Planted(dict(lift or {}), "read", names), steps=steps)


def emulate_program(
    jaxpr: jex.ClosedJaxpr, how: Realisation | None, lift: Mapping[str, Lift] | None = None
) -> Callable[..., list[Any]]:
    """Return ``g(seed, *leaves) → outputs`` of a closed jaxpr: all of a program in FP64, or as its equations round.

    ``how``: None for FP64, where ``seed`` is not read; else each ``seed``, instead of its own, is another realisation
    of one compiled function. Leaves and outputs are FP64 where they are floats, whatever their declared formats, so
    that a call's outputs may be the next one's inputs. ``held``: values of taps, as ``plant`` takes them, that the
    program goes on with. Under ``jax.enable_x64(True)``.
    """

    def run(seed: jax.Array, *leaves: Any, held: Values | None = None) -> list[Any]:
        def interpreter(names: Collection[str]) -> Planted:
            known = dict(lift or {})
            return Planted(known, "read", names) if how is None else Emulator(known, names, how, seed)

        return evaluate_planted(interpreter, jaxpr, leaves, held)[0]

    if how is None or not how.apart:
        return run

    def first(seed: jax.Array, *leaves: Any, held: Values | None = None) -> list[Any]:
        seeds = jnp.stack([seed, seed + np.uint64(1 << 32)])
        both = jax.vmap(lambda one: run(one, *leaves, held=held), axis_name=TWO)(seeds)
        return [x[0] for x in both]

    return first


def evaluate_planted(
    interpreter: Callable[[Collection[str]], Planted],
    jaxpr: jex.ClosedJaxpr,
    leaves: Sequence[Any],
    held: Values | None,
) -> tuple[list[Any], Values]:
    """Return the outputs of a closed jaxpr by the interpreter of the taps that have values, which it goes on with.

    And what the interpreter tells of each of these taps.
    """
    given = held or {}
    names = frozenset(n.partition("#")[0] for n in given)
    found = sites(jaxpr.jaxpr, names)
    named = unique_names(found)
    values = [fitting(n, s, given.get(n)) for n, s in zip(named, found, strict=True)]
    out, told = interpreter(names).evaluate(jaxpr.jaxpr, jaxpr.consts, leaves, values)
    return [up(jnp.asarray(x)) for x in out], {n: x for n, x in zip(named, told, strict=True) if x is not None}

"""While loops as scans of a number of steps that is known: every iteration then has values of its own.

A step runs the loop's body while its condition holds, and nothing after that. How many steps a program needs is counted
by running it.

What a loop decided (whether a step ran, the integers and truth values of its state) is recorded beside the points, as
taps named ``@…``. FP64 and every emulation go on with it: the same tokens, and as many iterations, whatever their own
floats would have chosen.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.evaluated import Evaluated
from precaudit.interpreters.jaxpr.jax_versions import bodies, open_jaxpr, source
from precaudit.interpreters.jaxpr.labels import of_equation
from precaudit.interpreters.jaxpr.loops import while_loop
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.reap import reap
from precaudit.interpreters.jaxpr.rules import select_batched
from precaudit.interpreters.jaxpr.sites import STATE, sites

MORE = ".more"  # ends the name of the one that says whether a loop would have gone on


class Loop(NamedTuple):
    """A while loop that holds taps: its name, unique in its program, and the user's line."""

    name: str
    source: str


def bound_loops(function: Callable[..., Any], iterations: int, rest: bool = True) -> Callable[..., Any]:
    """Return ``function`` with its while loops that hold taps run as scans of ``iterations`` steps, then on without.

    Its results are those of ``function``; without ``rest``, what is left of a loop after that, those of loops that end
    by then, and they have derivatives backwards. What ``reap`` gives of a tap in such a loop, and ``plant`` takes, has
    a value for every step: [iterations, …], zeros where the loop had ended (``name@taken``).

    >>> import precaudit
    >>> from jax import lax
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def f(x):
    ...     return lax.while_loop(lambda v: v < 9, lambda v: checkpoint_name(v * 2, "doubled"), x)
    >>> out, taps = precaudit.reap(bounded(f, 4))(3)
    >>> int(out), taps["doubled"].tolist(), taps["doubled@taken"].tolist()
    (12, [6, 12, 0, 0], [True, True, False, False])
    """

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        found = tapped_loops(jaxpr.jaxpr, sites)
        run = Evaluated(loops=dict.fromkeys(found, partial(bounded_while, length=iterations, rest=rest)))
        out = run.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return evaluate


def tapped_loops(jaxpr: jex.Jaxpr, tapped: Callable[[Any], Any]) -> dict[int, Loop]:
    """Return the while loops of an open jaxpr whose bodies hold taps, by the ids of their equations, in its order."""
    found: dict[int, Loop] = {}
    met: Counter[str] = Counter()

    def look(inner: jex.Jaxpr) -> None:
        for e in inner.eqns:
            if e.primitive.name == "while" and id(e) not in found and tapped(open_jaxpr(e.params["body_jaxpr"])[0]):
                name = of_equation(e).name
                found[id(e)] = Loop(f"{name}~{met[name]}" if met[name] else name, of_equation(e).source)
                met[name] += 1
            for body in _within(e):
                look(body)

    look(jaxpr)
    return found


def unreachable(jaxpr: jex.Jaxpr) -> str | None:
    """Return which tap of an open jaxpr lies where it has no value of its own, and the line; None where none does."""
    for e in jaxpr.eqns:
        name, at = e.primitive.name, source(e).rpartition(" (")[0]
        refused = _within(e)
        if name in ("scan", "cond", "shard_map", *CALLS):
            refused = []
        elif name == "while":
            name, refused = "the condition of while", list(bodies(e.params["cond_jaxpr"]))
        for body in refused:
            for site in sites(body):
                return f"tap {site.name!r} lies inside {name}{f' at {at}' if at else ''}"
        for body in _within(e):
            if (found := unreachable(body)) is not None:
                return found
    return None


def _within(e: jex.JaxprEqn) -> list[Any]:
    return [body for value in e.params.values() for body in bodies(value)]


def bounded_while(
    run: Evaluated, params: Mapping[str, Any], inputs: Sequence[Any], length: int, name: str = "", rest: bool = False
) -> list[Any]:
    """Run a while loop as a scan of ``length`` steps.

    ``name``: of a loop whose decisions are taps, too: whether each step ran, what its state holds that is no float, and
    whether it would have gone on, in which case the result is not the loop's. ``rest``: it does go on, without taps.
    """
    first, going, once = _apart(run, params, inputs)

    def tap_state(x: ArrayLike, what: str) -> Any:
        return checkpoint_name(x, f"{STATE}{name}{what}") if name else x

    def tap_states(values: Sequence[Any]) -> list[Any]:
        return [tap_state(x, f".{i}") if _exact(x) else x for i, x in enumerate(values)]

    def step(values: list[Any], _: None) -> tuple[list[Any], jax.Array]:
        values = tap_states(values)
        goes = tap_state(going(values), ".going")
        some = jnp.any(goes)
        return list(lax.cond(some, once, lambda _, *same: list(same), goes, *values)), some

    values, went = lax.scan(step, first, None, length=length)
    values = tap_states(values)
    if name:  # what ended inside has ended: outside the condition may round otherwise
        tap_state(went[-1] & jnp.any(going(values)), MORE)
    if not rest:
        return values
    given = inputs[: params["cond_nconsts"] + params["body_nconsts"]]
    return while_loop(replace(run, own=()).run, jnp.asarray, params, [*given, *values])


def _apart(run: Evaluated, params: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[list[Any], Any, Any]:
    """Return a while loop's state at first, its condition of a state, and its body: of (condition, *state) the next."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    for_cond, for_body, first = inputs[:n_cond], inputs[n_cond : n_cond + n_body], inputs[n_cond + n_body :]
    test, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])

    def going(values: Sequence[Any]) -> Any:
        return run.run(*test, [*for_cond, *values])[0]

    def once(goes: Any, *values: Any) -> list[Any]:
        new = run.run(*body, [*for_body, *values])
        if np.ndim(goes):  # of a vmapped loop: elements that have ended stay as they are
            new = [select_batched(goes, a, b) for a, b in zip(new, values, strict=True)]
        return [jnp.asarray(x) for x in new]

    return [jnp.asarray(x) for x in first], going, once


def _exact(x: ArrayLike) -> bool:
    """Whether what a loop's state holds is exact and can be recorded: integers and truth values, but no keys."""
    return bool(jnp.issubdtype(x.dtype, jnp.integer)) or x.dtype == bool


def counting(jaxpr: jex.ClosedJaxpr, loops: Mapping[int, Loop]) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """Return ``g(*leaves) → (outputs, {loop: most iterations})`` of a closed jaxpr, loops as of ``tapped_loops``."""
    run = Evaluated(loops={key: partial(_counted_while, loops=loops, name=loop.name) for key, loop in loops.items()})
    return _counts(lambda *x: run.run(jaxpr.jaxpr, jaxpr.consts, x), [loop.name for loop in loops.values()])


def _counts(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return a function that also gives the most iterations that some loops in it tell of themselves."""

    def with_counts(*args: Any) -> tuple[Any, dict[str, Any]]:
        out, taps = reap(function, [f"{STATE}{name}" for name in names], missing="ignore")(*args)
        most = {name: jnp.int32(0) for name in names}
        for key, x in taps.items():
            name = key.removeprefix(STATE).partition("#")[0]
            if name in most:
                most[name] = jnp.maximum(most[name], jnp.max(x, initial=0))
        return out, most

    return with_counts


def _counted_while(
    run: Evaluated, params: Mapping[str, Any], inputs: Sequence[Any], loops: Mapping[int, Loop], name: str
) -> list[Any]:
    """Run a while loop that tells how many iterations it took, and of the loops inside how many they took at most."""
    first, going, once = _apart(run, params, inputs)
    body = open_jaxpr(params["body_jaxpr"])[0]
    inner = [loops[key].name for key in tapped_loops(body, lambda _: True) if key in loops]

    def step(state: Sequence[Any]) -> Any:
        values, count, most = state
        new, found = _counts(lambda *v: once(going(v), *v), inner)(*values)
        return new, count + 1, {k: jnp.maximum(most[k], found[k]) for k in most}

    start = (first, jnp.int32(0), {k: jnp.int32(0) for k in inner})
    values, count, most = lax.while_loop(lambda state: jnp.any(going(state[0])), step, start)
    for each, x in {**most, name: count}.items():
        checkpoint_name(x, f"{STATE}{each}")
    return list(values)

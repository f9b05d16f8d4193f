"""Automatic taps: a JAX program evaluated with ``checkpoint_name`` where its numbers are made, with no edit of it.

What is tapped: ``plan.py``. ``reap``, ``plant``, ``shadow`` and ``emulated`` take the tagged program as any other.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from precaudit.errors import UserError, nearest
from precaudit.interpreters.jaxpr.bounded import Loop, bounded_while, tapped_loops, unreachable
from precaudit.interpreters.jaxpr.evaluated import Evaluated
from precaudit.interpreters.jaxpr.own import Own, own_taps
from precaudit.interpreters.jaxpr.plan import Plan, Tag
from precaudit.interpreters.jaxpr.products import labels
from precaudit.interpreters.jaxpr.reap import Taps, Transform, reap
from precaudit.interpreters.jaxpr.sites import STATE, Site, sites

# Of the jitted program. JAX's cache of compiled programs leaves metadata out of its keys, and labels are metadata:
# where other equations get some (products.py), another name keeps text that was compiled before from being read
LABELLED = "captured_2"
Which = Literal["own", "automatic", "both"]  # taps of a program


@dataclass(frozen=True)
class Tagged:
    """A program with taps: ``call(params, *inputs)``, the taps as ``sites`` has them, and what is known of each name.

    ``automatic``: whether all taps are ours, none the program's own. ``jaxpr``: of
    the program as it is, whose outputs ``structure`` puts together. ``loops``: its while loops that hold taps, by the
    ids of their equations in ``jaxpr``; ``iterations``: the steps each has room for; ``states``: taps of what they
    decided, no points. ``aside``: names of the program's own taps that hold no floats, which are no points either.
    """

    call: Callable[..., Any]
    sites: tuple[Site, ...]
    tags: dict[str, Tag]
    automatic: bool
    jaxpr: Any
    structure: Any
    loops: dict[int, Loop]
    iterations: dict[str, int]
    states: tuple[Site, ...]
    aside: tuple[str, ...] = ()


def _floats(s: Site) -> bool:
    return bool(jnp.issubdtype(s.dtype, jnp.floating))


def _rename_tags(names: dict[Any, Tag], renamed: Mapping[str, str], own: Collection[str]) -> dict[Any, Tag]:
    """Return automatic taps under other names; ``own``: the program's. Raises UserError."""
    known = dict.fromkeys(tag.name for tag in names.values())
    other: dict[str, str] = {}
    for new, old in renamed.items():
        if old in own:
            raise UserError(f"points: {old!r} is the program's own, by checkpoint_name; automatic points are renamed")
        if old not in known:
            raise UserError(
                f"points: {new} = {old!r}: no point has that name{nearest(old, known)} (occurrences go along)"
            )
        if old in other:
            raise UserError(f"points: {old!r} is given two names, {other[old]!r} and {new!r}")
        other[old] = new
    for new, old in renamed.items():
        if new in own or (new in known and new not in other):
            raise UserError(f"points: {new} = {old!r}: the program has another point of that name; rename that, too")
    return {v: replace(tag, name=other.get(tag.name, tag.name)) for v, tag in names.items()}


def _in(only: Collection[str], name: str) -> bool:
    return name in only or name.startswith(STATE)


@dataclass(frozen=True)
class TapChoice:
    """Which taps a program gets.

    ``taps``: of both, what the program taps itself has no automatic tap; None: its own where it has any, else automatic
    ones. ``renamed``: other names of automatic taps, by the new one (None: the program's). ``only``: names of the taps
    that are left, beside states. ``carried``: tap the states of outermost loops, too. ``iterations``: how many steps
    each while loop that holds taps has room for, by its name (1).
    """

    taps: Which | None = None
    renamed: Mapping[str, str] | None = None
    only: Collection[str] | None = None
    carried: bool = False
    iterations: Mapping[str, int] = field(default_factory=dict)


ANY_TAPS = TapChoice()


def tag_program(function: Callable[..., Any], params: object, *inputs: Any, choice: TapChoice = ANY_TAPS) -> Tagged:
    """Return ``function(params, *inputs)`` with taps: its own, automatic ones, or both.

    Parameters are arguments that are recorded nowhere: what is made of them alone is no point. Raises UserError for a
    name that none has, or that is taken, for a tap that cannot be reached, and where the program's own are asked for
    and it has none.
    """
    taps, only, carried = choice.taps, choice.only, choice.carried
    if taps is not None and taps not in get_args(Which):
        raise UserError(f"taps = {taps!r}{nearest(str(taps), get_args(Which))}")
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
    structure = jax.tree.structure(shape)
    own = own_taps(jaxpr.jaxpr) if taps != "automatic" else Own({}, frozenset())
    if taps is None:
        taps = "own" if own.equations else "both"
    if taps == "own" and not own.equations:
        raise UserError("--taps own: the program has no checkpoint_name taps of floats")
    if taps != "automatic" and (hidden := unreachable(jaxpr.jaxpr)) is not None:
        raise UserError(f"{hidden}, where it has no value of its own; leave it out")
    plan = Plan(carried=carried, own=taps == "own", tapped=own.values)
    plan.reserve(own.equations)
    if taps != "own" or carried:
        weights = len(jax.tree.leaves(params))
        plan.covered.update(jaxpr.jaxpr.invars)
        for v, x in zip(jaxpr.jaxpr.invars[weights:], jax.tree.leaves(inputs), strict=True):
            plan.whole.given(v, x)
        plan.walk(jaxpr.jaxpr, [i < weights for i in range(len(jaxpr.jaxpr.invars))])
    if taps != "own":
        plan.results(jaxpr.jaxpr)
        plan.counts()
    if choice.renamed:
        plan.names = _rename_tags(plan.names, choice.renamed, own.equations)
    names = {v: tag.name for v, tag in plan.names.items() if only is None or _in(only, tag.name)}
    kept = () if taps == "automatic" else only
    automatic = Evaluated(names)

    def has_taps(body: object) -> bool:
        return (bool(own.equations) and bool(sites(body, kept))) or (taps != "own" and automatic.touches(body))

    loops = tapped_loops(jaxpr.jaxpr, has_taps)
    known = plan.own_tags(own.equations) | {tag.name: tag for tag in plan.names.values()}
    steps = {loop.name: choice.iterations.get(loop.name, 1) for loop in loops.values()}
    run = Evaluated(
        names,
        {i: partial(bounded_while, length=steps[loop.name], name=loop.name) for i, loop in loops.items()},
        labels(jaxpr.jaxpr),
        kept,
    )

    def call(*args: Any) -> Any:
        out = run.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(structure, out)

    if taps == "own" and not carried and not loops and only is None:
        call = function
    found = sites(jax.make_jaxpr(call)(params, *inputs).jaxpr)
    used = Counter(s.name for s in found)
    states = tuple(s for s in found if s.name.startswith(STATE))
    points = tuple(s for s in found if s not in states and _floats(s))
    aside = tuple(dict.fromkeys(s.name for s in found if s not in states and not _floats(s)))
    tags = {n: t for n, t in known.items() if n in used}
    return Tagged(call, points, tags, not own.equations, jaxpr, structure, loops, steps, states, aside)


def capturing(
    made: Tagged, layers: Sequence[int] | None = None, keep: Transform | None = None
) -> Callable[..., tuple[Any, Taps]]:
    """Return ``g(params, *inputs) → (outputs, taps)``: ``reap`` of a tagged program, of loops' decisions every step.

    ``keep``: what is kept of a point's value, by its name, where it is made; None: all of it.
    """
    points = keep and (lambda name, x: x if name.startswith(STATE) else keep(name, x))
    if not made.states or layers is None:
        selected = {s.name for s in (*made.sites, *made.states)} if made.aside else None
        capture = reap(made.call, selected, layers, points)
    else:
        decided = reap(made.call, {s.name for s in made.states})

        def capture(*args: Any) -> tuple[Any, Taps]:
            (out, states), taps = reap(decided, {s.name for s in made.sites}, layers, points)(*args)
            return out, taps | states

    capture.__name__ = LABELLED
    return capture

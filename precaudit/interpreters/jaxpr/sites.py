"""Where a program's taps are: every tap of a jaxpr in program order, read without evaluating it."""

from collections import Counter
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any, NamedTuple

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.jax_versions import bodies, manual_axes, open_jaxpr
from precaudit.interpreters.jaxpr.primitives import CALLS

STATE = "@"  # begins the names of taps that say what a loop decided: no points, but recorded beside them
TAKEN = "@taken"  # ends the name of what says whether a branch with a point was taken


class Site(NamedTuple):
    """One tap: its name, what it is stacked over, its own shape and format, and the loop it is in that stacks nothing.

    ``stacked``: lengths of the scans around it and numbers of shards, outermost first. ``sharded``: whether numbers
    of shards are among these. ``inside``: the name of the
    outermost primitive around it that is no call, scan, cond or shard_map; empty where there is none.
    """

    name: str
    stacked: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    inside: str = ""
    sharded: bool = False


def sites(jaxpr: jex.Jaxpr, names: Collection[str] | None = None) -> tuple[Site, ...]:
    """Return the taps of an open jaxpr, bodies included; ``names``: of these names only."""
    return tuple(s for equation in jaxpr.eqns for s in sites_of(equation, names))


def sites_of(equation: jex.JaxprEqn, names: Collection[str] | None = None) -> tuple[Site, ...]:
    """Return the taps of one equation: of a while, its condition's first; of a cond, each branch's, merged."""
    name, params = equation.primitive.name, equation.params
    if name == "name":
        aval, tap = equation.outvars[0].aval, params["name"]
        return (Site(tap, (), tuple(aval.shape), aval.dtype),) if names is None or tap in names else ()
    if name == "cond":
        return merge_branches([sites(open_jaxpr(b)[0], names) for b in params["branches"]])[0]
    keys = ("cond_jaxpr", "body_jaxpr") if name == "while" else params
    found = [s for key in keys for body in bodies(params[key]) for s in sites(body, names)]
    if name == "scan":
        return tuple(s._replace(stacked=(params["length"], *s.stacked)) for s in found)
    if name == "shard_map":
        shards = prod(params["mesh"].shape[axis] for axis in manual_axes(params))
        return tuple(s._replace(stacked=(shards, *s.stacked), sharded=True) for s in found)
    return tuple(s if name in CALLS else s._replace(inside=name) for s in found)


def merge_branches(branches: Sequence[Sequence[Site]]) -> tuple[tuple[Site, ...], list[list[int]]]:
    """Return the taps of a cond and, for every branch, the place of each of its taps among them.

    A tap of the same name, stacking, shape and format in several branches is one; another shape or format is another.
    """
    places: dict[tuple[Site, int], int] = {}
    maps = []
    for branch in branches:
        met: Counter[Site] = Counter()
        of_branch = []
        for site in branch:
            of_branch.append(places.setdefault((site, met[site]), len(places)))
            met[site] += 1
        maps.append(of_branch)
    return tuple(site for site, _ in places), maps


def unique_names(found: Sequence[Site]) -> list[str]:
    """Return the taps' names as keys: a name met again gets #1, #2, … in program order."""
    given: dict[str, None] = {}
    for site in found:
        free, i = site.name, 0
        while free in given:
            i += 1
            free = f"{site.name}#{i}"
        given[free] = None
    return list(given)


def unknown_tap(name: str, known: Collection[str]) -> str:
    """Return the message about a name the program has no tap of."""
    names = sorted(set(known))
    near = get_close_matches(name, names, 3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no tap is named {name!r}: {hint}" + (f"this program has {', '.join(names)}" if names else "there is none")

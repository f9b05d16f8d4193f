"""Which taps the segment of each tap reads: what its value is made of, back to the taps before it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.jax_versions import bodies, body_of_call, open_jaxpr, scan_counts, walk_equations
from precaudit.interpreters.jaxpr.primitives import CALLS

Reads = frozenset[str]
NONE: Reads = frozenset()
MULTIPLIED: Reads = frozenset(("",))  # which no tap is named: among what is read, a matrix product


class _Found(defaultdict[str, Reads]):
    """What each tap reads; ``names``: of tags by the ids of their equations, where these are not the tags' own."""

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__(lambda: NONE)
        self.names = names or {}

    def name(self, e: jex.JaxprEqn) -> str:
        return self.names.get(id(e), str(e.params["name"]))


def reads(jaxpr: jex.Jaxpr, names: Mapping[int, str] | None = None) -> tuple[dict[str, Reads], list[Reads]]:
    """Return the names of the taps that each tap of an open jaxpr may be made of, and those that each output may be.

    Without going through another tap. Names are the tags' own: of a name met several times, what any of these reads;
    ``names``: others, as ``names_apart`` gives them. What is inside a primitive that is no call, scan, cond or
    shard_map is said to read whatever that does.
    """
    return reads_of_arguments(jaxpr, [NONE] * len(jaxpr.invars), names)


def names_apart(jaxpr: jex.Jaxpr, unique: Sequence[str]) -> dict[int, str]:
    """Return a name of its own for every tag of an open jaxpr, by the ids of the equations.

    ``unique``: ``unique_names`` of its sites. Empty where a tag is several: bodies are shared, or branches merge.
    """
    tags = [e for e in walk_equations(jaxpr) if e.primitive.name == "name"]
    own = [str(e.params["name"]) for e in tags]
    if own != [name.partition("#")[0] for name in unique] or len({id(e) for e in tags}) < len(tags):
        return {}
    return {id(e): name for e, name in zip(tags, unique, strict=True)}


def reads_of_arguments(
    jaxpr: jex.Jaxpr, given: list[Reads], names: Mapping[int, str] | None = None
) -> tuple[dict[str, Reads], list[Reads]]:
    """Return the same where the arguments are made of ``given``, each of its own."""
    found = _Found(names)
    outputs = _walk(jaxpr, given, found)
    return {name: read - MULTIPLIED for name, read in found.items()}, [read - MULTIPLIED for read in outputs]


def multiplied_taps(jaxpr: jex.Jaxpr) -> frozenset[str]:
    """Return the names of the taps of an open jaxpr whose segments hold a matrix product."""
    found = _Found()
    _walk(jaxpr, [NONE] * len(jaxpr.invars), found)
    return frozenset(name for name, read in found.items() if read & MULTIPLIED)


def through(read: Reads, found: Mapping[str, Reads]) -> Reads:
    """Return the taps that what reads some may be made of, through others too; ``found``: as of ``reads``."""
    known, new = NONE, read
    while new:
        known |= new
        new = NONE.union(*(found.get(name, NONE) for name in new)) - known
    return known


def _walk(jaxpr: jex.Jaxpr, given: list[Reads], found: _Found) -> list[Reads]:
    """Return what the outputs of an open jaxpr read; ``given``: what its arguments do."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(v: object) -> Reads:
        return NONE if hasattr(v, "val") else known.get(v, NONE)

    for e in jaxpr.eqns:
        known.update(zip(e.outvars, _through(e, [of(v) for v in e.invars], found), strict=True))
    return [of(v) for v in jaxpr.outvars]


def _through(e: jex.JaxprEqn, inputs: list[Reads], found: _Found) -> list[Reads]:
    """Return what the results of an equation read."""
    name, params = e.primitive.name, e.params
    if name == "name":
        found[found.name(e)] |= inputs[0]
        return [frozenset({found.name(e)})]
    if name == "scan":
        return _scan(params, inputs, found)
    if name == "cond":
        branches = [_walk(open_jaxpr(b)[0], inputs[1:], found) for b in params["branches"]]
        return [inputs[0].union(*each) for each in zip(*branches, strict=True)]
    if name == "shard_map" or (name in CALLS and CALLS[name] in params):
        return _walk(body_of_call(params, CALLS.get(name, "jaxpr"))[0], inputs, found)
    if name == "dot_general":
        return [MULTIPLIED.union(*inputs)]
    return [NONE.union(*inputs, *_inside(e, NONE.union(*inputs), found))] * len(e.outvars)


def _scan(params: Any, inputs: list[Reads], found: _Found) -> list[Reads]:
    """Return what a scan gives reads: its state at any step what it does at any other."""
    body, (consts, carried) = open_jaxpr(params["jaxpr"])[0], scan_counts(params)
    given = list(inputs)
    while True:
        out = _walk(body, given, found)
        state = [a | b for a, b in zip(given[consts : consts + carried], out, strict=False)]
        if state == given[consts : consts + carried]:
            return [*state, *out[carried:]]
        given[consts : consts + carried] = state


def _inside(e: jex.JaxprEqn, everything: Reads, found: _Found) -> list[Reads]:
    """Return what the bodies of another equation read, all of them everything that it is given."""
    inner = [b for value in e.params.values() for b in bodies(value)]
    taps: list[Reads] = []
    for body in inner:
        seen = _Found(found.names)
        taps += _walk(body, [everything] * len(body.invars), seen)
        names = frozenset(seen)
        for name in names:
            found[name] |= everything | names
        taps.append(names)
    return taps

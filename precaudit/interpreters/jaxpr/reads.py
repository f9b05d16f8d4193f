"""Which taps the segment of each tap reads: what its value is made of, back to the taps before it."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from precaudit.interpreters.jaxpr.jax_versions import bodies, called, closed, scanned
from precaudit.interpreters.jaxpr.primitives import CALLS

Reads = frozenset[str]
NONE: Reads = frozenset()


def reads(jaxpr: Any) -> tuple[dict[str, Reads], list[Reads]]:
    """Return the names of the taps that each tap of an open jaxpr may be made of, and those that each output may be.

    Without going through another tap. Names are the tags' own: of a name met several times, what any of these reads.
    What is inside a primitive that is no call, scan, cond or shard_map is said to read whatever that does.
    """
    return read_by(jaxpr, [NONE] * len(jaxpr.invars))


def read_by(jaxpr: Any, given: list[Reads]) -> tuple[dict[str, Reads], list[Reads]]:
    """Return the same where the arguments are made of ``given``, each of its own."""
    found: dict[str, Reads] = defaultdict(lambda: NONE)
    outputs = _walk(jaxpr, given, found)
    return dict(found), outputs


def through(read: Reads, found: Mapping[str, Reads]) -> Reads:
    """Return the taps that what reads some may be made of, through others too; ``found``: as of ``reads``."""
    known, new = NONE, read
    while new:
        known |= new
        new = NONE.union(*(found.get(name, NONE) for name in new)) - known
    return known


def _walk(jaxpr: Any, given: list[Reads], found: dict[str, Reads]) -> list[Reads]:
    """Return what the outputs of an open jaxpr read; ``given``: what its arguments do."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(v: Any) -> Reads:
        return NONE if hasattr(v, "val") else known.get(v, NONE)

    for e in jaxpr.eqns:
        known.update(zip(e.outvars, _through(e, [of(v) for v in e.invars], found), strict=True))
    return [of(v) for v in jaxpr.outvars]


def _through(e: Any, inputs: list[Reads], found: dict[str, Reads]) -> list[Reads]:
    """Return what the results of an equation read."""
    name, params = e.primitive.name, e.params
    if name == "name":
        found[params["name"]] |= inputs[0]
        return [frozenset({params["name"]})]
    if name == "scan":
        return _scan(params, inputs, found)
    if name == "cond":
        branches = [_walk(closed(b)[0], inputs[1:], found) for b in params["branches"]]
        return [inputs[0].union(*each) for each in zip(*branches, strict=True)]
    if name == "shard_map" or (name in CALLS and CALLS[name] in params):
        return _walk(called(params, CALLS.get(name, "jaxpr"))[0], inputs, found)
    return [NONE.union(*inputs, *_inside(e, NONE.union(*inputs), found))] * len(e.outvars)


def _scan(params: Any, inputs: list[Reads], found: dict[str, Reads]) -> list[Reads]:
    """Return what a scan gives reads: its state at any step what it does at any other."""
    body, (consts, carried) = closed(params["jaxpr"])[0], scanned(params)
    given = list(inputs)
    while True:
        out = _walk(body, given, found)
        state = [a | b for a, b in zip(given[consts : consts + carried], out, strict=False)]
        if state == given[consts : consts + carried]:
            return [*state, *out[carried:]]
        given[consts : consts + carried] = state


def _inside(e: Any, everything: Reads, found: dict[str, Reads]) -> list[Reads]:
    """Return what the bodies of another equation read, all of them everything that it is given."""
    inner = [b for value in e.params.values() for b in bodies(value)]
    taps: list[Reads] = []
    for body in inner:
        seen: dict[str, Reads] = defaultdict(lambda: NONE)
        taps += _walk(body, [everything] * len(body.invars), seen)
        names = frozenset(seen)
        for name in names:
            found[name] |= everything | names
        taps.append(names)
    return taps

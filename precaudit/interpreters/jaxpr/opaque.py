"""What has no FP64 meaning in a program: its results are left blank, and which taps are made of them is known.

Points that such a result reaches are unknown, in the segments that read it and in FP64 of the whole program. The others
are judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from precaudit.interpreters.jaxpr.evaluated import Evaluated, Meaning
from precaudit.interpreters.jaxpr.jax_versions import bodies, walk_equations
from precaudit.interpreters.jaxpr.reads import Reads, reads, through
from precaudit.interpreters.jaxpr.shadow import reads_sign, refused_of
from precaudit.interpreters.jaxpr.tag import Tagged

BLANK = "!"  # begins the names of taps on blank results; what follows says why they are


@dataclass(frozen=True)
class Opaque:
    """Why what a program makes has no FP64 meaning; taps by their own names, those that have one are left out.

    ``segment``: what makes a tap of those before it; ``whole``: the program so far; ``outputs``: the same of the
    program's outputs, in their structure's order, None where they have one.
    """

    segment: Mapping[str, str]
    whole: Mapping[str, str]
    outputs: tuple[str | None, ...] = ()

    @property
    def following(self) -> str | None:
        """Why nothing is known of calls that go on with the outputs of this one."""
        return next((why for why in self.outputs if why is not None), None)


KNOWN = Opaque({}, {})


def without_opaque(made: Tagged, *args: Any) -> tuple[Tagged, Opaque]:
    """Return a program that leaves blank what has no FP64 meaning, and what that leaves unknown.

    ``args``: as its call takes them. A program is left as it is where such a result is a key or a token, and where
    it has while loops that hold no taps: of blank values these might not end.
    """
    if not any(refused_of(e) for e in walk_equations(made.jaxpr.jaxpr)):
        return made, KNOWN
    with jax.enable_x64(False):
        jaxpr, shape = jax.make_jaxpr(made.call, return_shape=True)(*args)
    blanks: dict[int, Meaning] = {}
    if not _find_opaque(jaxpr.jaxpr, blanks) or not blanks:
        return made, KNOWN
    run, structure = Evaluated(loops=blanks), jax.tree.structure(shape)

    def call(*given: Any) -> Any:
        return jax.tree.unflatten(structure, run.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(given)))

    with jax.enable_x64(False):
        taps, outputs = reads(jax.make_jaxpr(call)(*args).jaxpr)
    whole = {name: through(read, taps) for name, read in taps.items()}
    return replace(made, call=call), Opaque(
        _reasons(taps), _reasons(whole), tuple(_reason(through(read, taps)) for read in outputs)
    )


def _find_opaque(jaxpr: jex.Jaxpr, blanks: dict[int, Meaning]) -> bool:
    """Add what has no FP64 meaning to ``blanks``, by the ids of equations; return whether all may be left blank."""
    for e in (e for e in jaxpr.eqns if not reads_sign(e)):
        if (refused := refused_of(e)) is not None:
            if not all(_is_array(v.aval) for v in e.outvars):
                return False
            blanks[id(e)] = partial(_blank, e, f"{BLANK}{refused.said}")
        elif e.primitive.name == "while" or not all(
            _find_opaque(body, blanks) for value in e.params.values() for body in bodies(value)
        ):
            return False
    return True


def _is_array(aval: object) -> bool:
    """Whether a result is an array of numbers, or memory that holds one: no key or token."""
    return isinstance(getattr(aval, "dtype", None), np.dtype)


def _blank(equation: jex.JaxprEqn, name: str, *_: Any) -> list[Any]:
    """Return blank results of an equation, each a tap of a name."""
    return [checkpoint_name(_of(v.aval), name) for v in equation.outvars]


def _of(aval: Any) -> Any:
    """Return an array of no value: not a number, or zero where the format has no such thing."""
    return jnp.full(aval.shape, np.nan if jnp.issubdtype(aval.dtype, jnp.inexact) else 0, aval.dtype)


def _reasons(found: Mapping[str, Reads]) -> dict[str, str]:
    every = {name: _reason(read) for name, read in found.items() if not name.startswith(BLANK)}
    return {name: why for name, why in every.items() if why is not None}


def _reason(read: Reads) -> str | None:
    return next((name[len(BLANK) :] for name in sorted(read) if name.startswith(BLANK)), None)

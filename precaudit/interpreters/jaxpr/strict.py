"""Roundings that a program declares and a compiler leaves out: programs compiled without excess precision.

XLA may keep a result wider than its equation declares, and by default does: a conversion to bfloat16 and back is gone,
and of operations in bfloat16 that a backend makes in float32 what lies between two. Another device may round there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.jaxpr.jax_versions import source, with_bodies
from precaudit.interpreters.jaxpr.rounding import EXACT
from precaudit.interpreters.jaxpr.sums import float_bits

STRICTLY = {"xla_allow_excess_precision": False}
TRIED = 8  # lines; each is compiled


def left_out(jaxpr: jex.ClosedJaxpr, leaves: Sequence[Any], lines: Sequence[str]) -> list[str]:
    """Return the lines whose declared roundings the compiler does not make: with one of them kept, other bits come out.

    ``lines``: as ``jax_versions.source`` gives them; the first TRIED are tried. ``leaves``: what a closed jaxpr takes.
    """
    as_it_is = _bits(jex.jaxpr_as_fun(jaxpr), leaves)
    return [line for line in lines[:TRIED] if _bits(keeping(jaxpr, line), leaves) != as_it_is]


def keeping(jaxpr: jex.ClosedJaxpr, line: str) -> Callable[..., list[Any]]:
    """Return a closed jaxpr as a function of its leaves, in which the roundings of one line cannot be left out."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(_with_reductions(jaxpr.jaxpr, line), jaxpr.consts))


def _bits(run: Callable[..., list[Any]], leaves: Sequence[Any]) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.jit(run)(*leaves)]


def _with_reductions(jaxpr: jex.Jaxpr, line: str) -> Any:
    """Return an open jaxpr with a ``reduce_precision`` behind every narrow result of a line, kernels' inside too."""
    made: list[Any] = []
    for e in jaxpr.eqns:
        inside = e.replace(
            params={n: with_bodies(x, lambda body: _with_reductions(body, line)) for n, x in e.params.items()}
        )
        if e.primitive.name in EXACT or source(e) != line:
            made.append(inside)
            continue
        outs = [jex.Var(v.aval) if _has_16_bits(v) else v for v in e.outvars]
        made.append(inside.replace(outvars=outs))
        made += [_reduce_equation(x, v) for x, v in zip(outs, e.outvars, strict=True) if x is not v]
    return jaxpr.replace(eqns=made)


def _has_16_bits(v: jex.Var | jex.Literal) -> bool:
    """Whether a variable is of a format of 16 bits: smaller ones are meant, and no compiler keeps them wider."""
    return not hasattr(v.aval, "inner_aval") and float_bits(getattr(v.aval, "dtype", None)) == 16


def _reduce_equation(wide: jex.Var | jex.Literal, v: jex.Var | jex.Literal) -> Any:
    info = jnp.finfo(v.aval.dtype)
    shape = jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    traced = jax.make_jaxpr(lambda x: lax.reduce_precision(x, info.nexp, info.nmant))(shape)
    return traced.jaxpr.eqns[0].replace(invars=[wide], outvars=[v])

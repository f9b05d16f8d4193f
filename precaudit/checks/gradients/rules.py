"""Derivative rules of a function's own traced so that their equations keep the lines they were written in."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend import linear_util, source_info_util

from precaudit.interpreters.jaxpr.jax_versions import with_bodies


def with_own_lines(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function whose ``custom_vjp`` and ``custom_jvp`` rules, once differentiated, are traced at their lines.

    ``inputs``: arrays of the shapes and formats it will be called on. JAX gives what a backward rule binds the line of
    the call it differentiates: that of the rule is lost.
    """
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*inputs)
    flat = jex.jaxpr_as_fun(jex.ClosedJaxpr(_run_rules_without_line(jaxpr.jaxpr), jaxpr.consts))

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(out), flat(*jax.tree.leaves(args)))

    return run


class _NoLine:
    """A traceback that JAX takes for none, where ``None`` would leave the one that is set."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """Return nothing to add to an error."""


def _run_without_line(rule: Callable[..., Any], *args: Any) -> Any:
    with source_info_util.user_context(_NoLine()):
        return rule(*args)


def _run_rules_without_line(jaxpr: jex.Jaxpr) -> Any:
    """Return an open jaxpr whose equations' rules, which JAX keeps as wrapped functions, are run without a line."""
    equations = [e.replace(params={n: _parameter(x) for n, x in e.params.items()}) for e in jaxpr.eqns]
    return jaxpr.replace(eqns=equations)


def _parameter(value: object) -> Any:
    if isinstance(value, linear_util.WrappedFun):
        return linear_util.transformation2(_run_without_line)(value)
    return with_bodies(value, _run_rules_without_line)

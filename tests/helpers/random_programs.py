"""Random small JAX programs: operations on one array inside every construct, as trees that Hypothesis can shrink."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def trees(unary, binary, loops=True, taps=False, leaves=8):
    """Return a strategy of programs: ("x",), (operation, …), or a construct with bodies that are programs of "x".

    ``unary``, ``binary``: names of operations; ``loops``: while loops too; ``taps``: ("tap", program) in every body.
    """

    def larger(inner):
        body = st.tuples(st.just("tap"), inner) if taps else inner
        kinds = [
            st.tuples(st.sampled_from(sorted(unary)), inner),
            st.tuples(st.sampled_from(sorted(binary)), inner, inner),
            *[st.tuples(st.sampled_from(sorted(WRAPPED)), body, inner)] * 2,
            st.tuples(st.just("scan"), st.integers(0, 3), body, inner),
            st.tuples(st.just("cond"), body, body, inner),
        ]
        if loops:
            kinds.append(st.tuples(st.just("while"), st.integers(0, 3), st.booleans(), body, body, inner))
        return st.one_of(kinds)

    return larger(st.recursive(st.just(("x",)), larger, max_leaves=leaves))


def program(tree, operations):
    """Return the function of one array that a tree stands for; every tap has a name of its own, t0, t1, …."""
    return lambda x: _value(_named(tree, [0]), operations, x)


def _named(tree, count):
    """Return the tree with a name in every tap."""
    if tree[0] == "tap":
        count[0] += 1
        return ("tap", f"t{count[0] - 1}", _named(tree[1], count))
    return tuple(_named(t, count) if isinstance(t, tuple) else t for t in tree)


def _value(tree, operations, x):
    def body(t):
        return lambda v: _value(t, operations, v)

    kind, *rest = tree
    if kind == "x":
        return x
    if kind == "tap":
        return checkpoint_name(_value(rest[1], operations, x), rest[0])
    if kind == "cond":
        y = _value(rest[2], operations, x)
        return lax.cond(y.sum() > 0, body(rest[0]), body(rest[1]), y)
    inner = _value(rest[-1], operations, x)
    if kind == "scan":
        carry, ys = lax.scan(lambda c, _: (body(rest[1])(c), c), inner, None, length=rest[0])
        return carry + ys[0] if rest[0] else carry
    if kind == "while":
        return _loop(body(rest[3]), body(rest[2]), rest[0], rest[1], inner)
    if kind == "grad" and _loops(rest[0]):  # a while loop has no derivative backwards
        return body(rest[0])(inner)
    if kind in WRAPPED:
        return WRAPPED[kind](body(rest[0]))(inner)
    return operations[kind](*(_value(t, operations, x) for t in rest))


def _loop(body, watched, n, by_value, x):
    """Run a body up to n times; ``watched`` is in the condition, ``by_value``: it ends where values are large."""

    def goes_on(state):
        seen = watched(state[1]).sum()
        return (state[0] < n) & ((seen < 4) if by_value else (seen == seen))

    return lax.while_loop(goes_on, lambda s: (s[0] + 1, body(s[1])), (jnp.int32(0), x))[1]


def _jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda p, t: (g(p[0]), t[0] * 2))
    return g


def _vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), None), lambda _, t: (t * 2,))
    return g


def _vmap(f):
    return lambda x: jax.vmap(f)(x) if x.ndim else f(x)


def _grad(f):
    return jax.grad(lambda x: f(x).sum())


def _loops(tree):
    return tree[0] == "while" or any(_loops(t) for t in tree if isinstance(t, tuple))


WRAPPED = {"jit": jax.jit, "remat": jax.checkpoint, "jvp": _jvp, "vjp": _vjp, "vmap": _vmap, "grad": _grad}


X = np.array([[1.0, -2.0, 3.0], [-1.0, 0.0, 2.0]], np.float32)

OPERATIONS = {
    "negated": lax.neg, "size": lax.abs, "halved": lambda x: x * 0.5, "clipped": lambda x: jnp.clip(x, -4, 4),
    "reversed": lambda x: x[..., ::-1] if x.ndim else x, "positive": lambda x: jnp.where(x > 0, x, 0),
}  # fmt: skip

PAIRS = {"add": lax.add, "sub": lax.sub, "max": lax.max, "min": lax.min}

EXACT = OPERATIONS | PAIRS

QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}

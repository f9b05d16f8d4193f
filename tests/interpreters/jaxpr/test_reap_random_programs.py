"""reap and plant on random programs, against a reading of the jaxpr equation by equation in plain Python.

All operations are exact on the small numbers given, so that values agree in every bit however they were compiled.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from precaudit.interpreters.jaxpr import plant, reap
from precaudit.interpreters.jaxpr.jax_versions import scan_counts
from tests.helpers.random_programs import EXACT, OPERATIONS, PAIRS, QUICK, X, program, trees


class Reading:
    """Reads a jaxpr with concrete values; ``seen[path][steps]`` is what a tap had at those steps of the scans.

    ``path`` is the tap's place: the numbers of the equations, and of the bodies in them, that lead to it.
    """

    def __init__(self):
        self.seen = {}

    def read(self, jaxpr, consts, args, path, steps):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for i, equation in enumerate(jaxpr.eqns):
            inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
            out = self.equation(equation, inputs, (*path, i), steps)
            values.update(zip(equation.outvars, out, strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    def body(self, jaxpr, args, path, steps):
        inner, consts = (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())
        return self.read(inner, consts, args, path, steps)

    def equation(self, equation, inputs, path, steps):
        name, params = equation.primitive.name, equation.params
        if name == "name":
            self.seen.setdefault(path, {})[steps] = np.asarray(inputs[0])
            return inputs
        if name in ("scan", "while", "cond"):
            return getattr(self, name)(params, inputs, path, steps)
        bodies = [v for v in params.values() if isinstance(v, ClosedJaxpr | Jaxpr)]
        if bodies:
            return self.body(bodies[0], inputs, (*path, 0), steps)
        found = equation.primitive.get_bind_params(params)
        functions, given = found if isinstance(found, tuple) else ((), found)
        out = equation.primitive.bind(*functions, *inputs, **given)
        return out if equation.primitive.multiple_results else [out]

    def scan(self, params, inputs, path, steps):
        (n, m), length = scan_counts(params), params["length"]
        consts, carry, stacked = inputs[:n], inputs[n : n + m], inputs[n + m :]
        rows = [None] * length
        for i in reversed(range(length)) if params["reverse"] else range(length):
            out = self.body(params["jaxpr"], [*consts, *carry, *(x[i] for x in stacked)], (*path, 0), (*steps, i))
            carry, rows[i] = out[:m], out[m:]
        avals = params["jaxpr"].out_avals[m:]
        columns = list(zip(*rows, strict=True)) if length else [()] * len(avals)
        return [*carry, *(jnp.stack(c) if length else jnp.zeros((0, *a.shape), a.dtype)
                          for c, a in zip(columns, avals, strict=True))]  # fmt: skip

    def cond(self, params, inputs, path, steps):
        at = int(np.clip(int(inputs[0]), 0, len(params["branches"]) - 1))
        return self.body(params["branches"][at], inputs[1:], (*path, at), steps)

    def forget(self, path, steps):
        for place, seen in self.seen.items():
            if place[: len(path)] == path:
                for at in [s for s in seen if s[: len(steps)] == steps]:
                    del seen[at]

    def while_(self, params, inputs, path, steps):
        n, m = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body, state = inputs[:n], inputs[n : n + m], inputs[n + m :]
        while True:
            self.forget((*path, 0), steps)
            (going,) = self.body(params["cond_jaxpr"], [*for_cond, *state], (*path, 0), steps)
            if not np.any(going):
                return state
            self.forget((*path, 1), steps)
            new = self.body(params["body_jaxpr"], [*for_body, *state], (*path, 1), steps)
            going = np.asarray(going)
            state = [np.where(going.reshape(going.shape + (1,) * (np.ndim(a) - going.ndim)), a, b)
                     for a, b in zip(new, state, strict=True)]  # fmt: skip


setattr(Reading, "while", Reading.while_)


def places(jaxpr, path=()):
    """Yield (path, name) of every tap in program order, run or not."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for i, e in enumerate(jaxpr.eqns):
        if e.primitive.name == "name":
            yield (*path, i), e.params["name"]
        given = e.params["branches"] if e.primitive.name == "cond" else (
            (e.params["cond_jaxpr"], e.params["body_jaxpr"]) if e.primitive.name == "while" else
            [v for v in e.params.values() if isinstance(v, ClosedJaxpr | Jaxpr)])  # fmt: skip
        for k, body in enumerate(given):
            yield from places(body, (*path, i, k))


def expected(f, x):
    """Return f's output, and for every key that reap should give: its values by steps of the scans."""
    jaxpr = jax.make_jaxpr(f)(x)
    reading, keys = Reading(), {}
    out = reading.read(jaxpr.jaxpr, jaxpr.consts, [x], (), ())
    for path, name in places(jaxpr):
        count = sum(k == name or k.startswith(f"{name}#") for k in keys)
        keys[f"{name}#{count}" if count else name] = reading.seen.get(path, {})
    return out[0], keys


def check_reaped(tree):
    f = program(tree, EXACT)
    out, taps = jax.jit(reap(f))(X)
    wanted, keys = expected(f, X)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(f(X)))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(wanted))
    assert {k for k in taps if not k.endswith("@taken")} == set(keys)
    for key, seen in keys.items():
        value, taken = np.asarray(taps[key]), np.asarray(taps.get(f"{key}@taken", True))
        for steps, x in seen.items():
            np.testing.assert_array_equal(value[steps], x)
            assert np.all(taken[steps[: taken.ndim]])
        ran = np.zeros(taken.shape, bool)
        for steps in seen:
            ran[steps[: taken.ndim]] = True
        np.testing.assert_array_equal(taken & (value.size > 0), ran)
        assert not value[~taken].any() if taken.ndim else taken or not value.any()


def check_planted(tree):
    f = program(tree, EXACT)
    out, taps = reap(f)(X)
    with jax.enable_x64(True):
        again, errors = plant(f, "force")(taps, X)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(out))
    assert set(errors) == {k for k in taps if not k.endswith("@taken")}
    for name, e in errors.items():
        assert e.shape == taps[name].shape
        assert not np.asarray(e).any(), name


@pytest.mark.turn  # 4 s
@settings(max_examples=15, **QUICK)
@given(trees(OPERATIONS, PAIRS, taps=True))
def test_reap_gives_what_the_program_computes(tree):
    check_reaped(tree)


@pytest.mark.turn  # 4 s
@settings(max_examples=8, **QUICK)
@given(trees(OPERATIONS, PAIRS, taps=True, loops=False))
def test_what_reap_gives_planted_has_no_errors(tree):
    check_planted(tree)


@pytest.mark.slow
@settings(max_examples=150, **QUICK)
@given(trees(OPERATIONS, PAIRS, taps=True, leaves=10))
def test_reap_gives_what_many_programs_compute(tree):
    check_reaped(tree)


@pytest.mark.slow
@settings(max_examples=150, **QUICK)
@given(trees(OPERATIONS, PAIRS, taps=True, loops=False, leaves=10))
def test_what_reap_gives_of_many_programs_planted_has_no_errors(tree):
    check_planted(tree)

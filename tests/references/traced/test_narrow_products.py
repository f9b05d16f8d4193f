"""Products that a backend sums in a format of 16 bits: they fail, and what made them is told."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest

from precaudit import Program
from precaudit.diagnosis.evidence.held import held_cause
from precaudit.interpreters.jaxpr.multiplying import in_own_format
from precaudit.judging.rules import judge
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from precaudit.schema.limits import default_limits
from precaudit.schema.records.errors import Narrow

DRAW = np.random.default_rng(4)
X, W = (jnp.asarray(DRAW.standard_normal(s), jnp.bfloat16) for s in ((1, 16, 8, 128), (8, 128, 64)))


def experts(w, x):
    mixed = jnp.einsum("bsef,efd->bsed", x, w)
    return mixed * jnp.bfloat16(1.5)


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def term_by_term(x, w):
    """The sum over f in bfloat16, fused multiply-add after multiply-add."""
    total = np.zeros((*x.shape[:3], w.shape[2]))
    for f in range(x.shape[3]):
        total = rounded(total + np.einsum("bse,ed->bsed", x[..., f], w[:, f]))
    return total


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    program = Program(experts, W, {"a": (X,)}, outputs="out")
    opened = trace_program(program, tmp_path_factory.mktemp("experts") / "run")
    (point,) = (p for p in opened.record.points if p.primitive == "dot_general")
    taps = opened.tensors("a", 0, "taps")
    wide = [np.asarray(y).astype(np.float64) for y in (X, W)]

    def records(made):
        """Judge a product [B, S, E, D], laid out as the point is."""
        (order,) = {o for o in ((0, 1, 2, 3), (2, 3, 0, 1)) if tuple(made.shape[i] for i in o) == point.shape}
        given = taps | {point.name: made.transpose(order).astype(ml_dtypes.bfloat16)}
        found = Emulations(prepare_program(program)).records(opened, "a", 0, given, (W, X))
        return next(e for e in found if e.point == point.name)

    return records, wide, point


def test_a_product_summed_in_its_own_format_fails_and_says_so(recorded):
    records, wide, point = recorded
    e = records(term_by_term(*wide))
    assert not closes(e)
    assert e.summed == "bfloat16"
    assert judge(e, default_limits()).status == "fail"
    cause = held_cause(e, point)
    assert cause.cause == "XLA sums this product in bfloat16"
    exact = np.einsum("bsef,efd->bsed", *wide)
    gain = np.linalg.norm(term_by_term(*wide) - exact) / np.linalg.norm(rounded(exact) - exact)
    assert float(re.search(r"× (\S+) less error", cause.says)[1]) == pytest.approx(gain, rel=0.02)
    narrow = Narrow("sums in float16, fused", "sums are rounded to float16", 1e-3, 1e-4)  # what the textbook tells
    assert held_cause(msgspec.structs.replace(e, narrow=narrow), point).cause == narrow.cause


def test_an_honest_product_says_nothing(recorded):
    records, wide, _ = recorded
    e = records(rounded(np.einsum("bsef,efd->bsed", *wide)))
    assert closes(e)
    assert e.summed is None


@pytest.mark.parametrize("fault", ["scale", "transposed", "halves"])
def test_another_fault_is_not_called_so(recorded, fault):
    records, (x, w), _ = recorded
    made = {
        "scale": 1.02 * np.einsum("bsef,efd->bsed", x, w), "transposed": np.einsum("bsef,efd->bsed", x, w[::-1]),
        "halves": rounded(term_by_term(x, w) * 1.02),
    }[fault]  # fmt: skip
    e = records(rounded(made))
    assert not closes(e)
    assert e.summed is None


def test_the_emulation_is_the_sum_term_by_term():
    x, w = (DRAW.standard_normal(s) for s in ((1, 3, 2, 40), (2, 40, 5)))
    x, w = rounded(x), rounded(w)
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.einsum("bsef,efd->bsed", x, w))(*(y.astype(np.float32) for y in (x, w)))
    inner = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general")
    order = [{0: x, 1: w}[jaxpr.jaxpr.invars.index(v)] for v in inner.invars]
    with jax.enable_x64(True):
        made = in_own_format(inner, order, lambda y: y.astype(jnp.bfloat16).astype(np.float64))
    want = term_by_term(x, w)
    assert np.array_equal(np.asarray(made), want.transpose(2, 3, 0, 1) if order[0] is w else want.transpose(2, 0, 1, 3))

"""Results that some of their readers see unrounded and others rounded, which no usual way to round makes."""

import jax.numpy as jnp
import numpy as np
import pytest

from precaudit import Program
from precaudit.judging.gate import gate
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced import excess_precision, remade, search
from precaudit.references.traced.excess_precision import EXCESS_PRECISION
from precaudit.schema.emulations import Emulation
from tests.helpers.runs import altered

FACTORS = 1.55, 1.5
EQUATIONS = Emulation("equations").name


def cancelling(factors, x):
    """Return differences times their sum over a row, for which they are made again in float32."""
    y, z = x * factors[0], x * factors[1]
    total = jnp.sum(y.T.astype(jnp.float32) - z.T.astype(jnp.float32), 0)[:, None]
    return ((y - z).astype(jnp.float32) * total).astype(x.dtype)


def rounded(x):
    return x.astype(jnp.bfloat16).astype(np.float64)


def by_hand(x, wrong=0.0):
    """Return the same where the sum alone reads one of its operands unrounded."""
    y, z = (x * rounded(np.float64(factor)) for factor in FACTORS)
    total = np.sum(y - rounded(z), -1, keepdims=True) * (1 + wrong)
    return rounded(rounded(rounded(y) - rounded(z)) * total)


def judged(tmp_path, rows, change, columns=32, seed=0, call=cancelling):
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(jnp.bfloat16)
    program = Program(call, jnp.array(FACTORS, jnp.bfloat16), {"a": (jnp.asarray(x),)})
    opened = trace_program(program, tmp_path / "run")
    other = altered(opened, tmp_path / "other", "cancelling", lambda y: change(x.astype(np.float64)).astype(y.dtype))
    errors = compare_program(other, program)
    return next(e for e in errors if e.kind == "local"), gate(other.folder).counts


@pytest.mark.parametrize("small", [True, False], ids=["", "of a large program"])
def test_the_reads_are_found(small, tmp_path, monkeypatch):
    if not small:
        monkeypatch.setattr(remade, "small", lambda _: False)
    e, counts = judged(tmp_path, 24, by_hand)
    assert counts == {"pass": 2}
    assert e.elided == {EQUATIONS: EXCESS_PRECISION}
    assert e.unexplained.u == 0  # bit for bit


def test_the_reads_are_found_in_a_program_of_many(tmp_path, monkeypatch):
    """More reads than are searched, of which the point depends on few."""
    monkeypatch.setattr(excess_precision, "MOST_READS", 12)

    def call(factors, x):
        out, z = cancelling(factors, x), x
        for i in range(4):
            z = z + jnp.tanh(z * factors[0] + jnp.bfloat16(i)) * factors[1]
        return out, z

    e, _ = judged(tmp_path, 24, by_hand, call=call)
    assert e.elided == {EQUATIONS: EXCESS_PRECISION}
    assert e.unexplained.u == 0
    for name, limit in {"MOST_READS": 2, "READS": 12}.items():  # of the point's own, and of the program's
        with monkeypatch.context() as patched:
            patched.setattr(excess_precision, name, limit)
            e, _ = judged(tmp_path / name, 24, by_hand, call=call)
        assert EXCESS_PRECISION not in (e.elided or {}).values()


def test_points_are_searched_until_some_do_not_close(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MOST_POINTS", 1)
    x = np.random.default_rng(0).standard_normal((24, 32)).astype(jnp.bfloat16)

    def call(factors, x, y):
        return cancelling(factors, x), cancelling(factors, y)

    program = Program(call, jnp.array(FACTORS, jnp.bfloat16), {"a": (jnp.asarray(x), jnp.asarray(x[::-1]))})
    opened = trace_program(program, tmp_path / "run")
    for i, given in enumerate((x, x[::-1])):
        name, made = opened.record.points[i].name, by_hand(given.astype(np.float64))
        opened = altered(opened, tmp_path / str(i), name, lambda y, made=made: made.astype(y.dtype))
    compare_program(opened, program)
    assert gate(opened.folder).counts == {"pass": 4}


@pytest.mark.turn  # 3 s
def test_without_the_search_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MOST_POINTS", 0)
    e, counts = judged(tmp_path, 24, by_hand)
    assert counts == {"pass": 1, "fail": 1}
    assert e.scopes["token"]["excess"][0] > 1.5  # its limit


@pytest.mark.turn  # 3 s
@pytest.mark.parametrize("wrong", [0.3, -0.5])  # of a sum that rounding moves by 0.06
def test_a_fault_beside_them_fails(wrong, tmp_path):
    e, counts = judged(tmp_path, 24, lambda x: by_hand(x, wrong))
    assert counts["fail"] >= 1
    assert EXCESS_PRECISION not in (e.elided or {}).values()


@pytest.mark.turn  # 5 s
def test_a_point_of_few_elements_does_not_speak_for_a_choice(tmp_path, monkeypatch):
    """Of eight elements a choice closes, as one might of a fault, and none is made."""
    e, counts = judged(tmp_path, 1, by_hand, columns=8, seed=12)
    assert counts["fail"] == 1
    assert EXCESS_PRECISION not in (e.elided or {}).values()
    monkeypatch.setattr(excess_precision, "ELEMENTS", 1)
    e, _ = judged(tmp_path / "freely", 1, by_hand, columns=8, seed=12)
    assert e.elided == {EQUATIONS: EXCESS_PRECISION}

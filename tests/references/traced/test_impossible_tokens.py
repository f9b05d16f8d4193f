"""Logits that are −∞ at tokens that cannot be: padding of the vocabulary, a grammar's mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit import Entry, Program
from precaudit.diagnosis.programs import diagnose_program
from precaudit.judging.gate import gate
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.prefill_decode import View, compare_views
from precaudit.references.comparison.programs import compare_program
from precaudit.reports.program_diagnosis import program_diagnosis_report
from precaudit.schema.filed import of_kinds
from precaudit.schema.records.errors import ForwardError

VOCAB, PADDED, WIDTH = 50, 64, 32
DRAW = np.random.default_rng(5).normal
P = {
    "embed": jnp.asarray(DRAW(size=(PADDED, WIDTH)), jnp.bfloat16),
    "up": jnp.asarray(DRAW(size=(WIDTH, 64)) / 6, jnp.bfloat16),
    "head": jnp.asarray(DRAW(size=(64, PADDED)) / 8, jnp.bfloat16),
}
MASK = jnp.where(jnp.arange(PADDED) < VOCAB, 0.0, -jnp.inf)


def step(p, tokens):
    h = jax.nn.silu(p["embed"][tokens] @ p["up"])
    return {"logits": (h @ p["head"]).astype(jnp.float32) + MASK}


def again(_inputs, outputs):
    return (outputs["logits"].argmax(-1)[-1:],)


PROGRAM = Program(
    step, P, {"a": (jnp.arange(9),)}, outputs="logits", tokens=0, then={"decode": Entry(step, again, outputs="logits")}
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    opened = trace_program(PROGRAM, tmp_path_factory.mktemp("run") / "run")
    return compare_program(opened, PROGRAM)


def test_a_correct_program_passes_with_distributions(compared):
    assert {*gate(compared).counts} == {"pass"}
    each = [e.distribution for e in of_kinds(compared.errors, ForwardError) if e.distribution is not None]
    assert each
    assert all(0 <= x < 1e-3 for d in each for x in d.kl)
    assert all(0 < x < 1e-3 for d in each for x in d.kl_noise)


def test_lines_are_tried_on_what_is_left(compared):
    found = diagnose_program(compared.run, PROGRAM, objective="kl")
    assert not found.findings
    (told,) = [x for x in program_diagnosis_report(found, []).lines if x.startswith("To change, emulated")]
    assert "KL from FP64" in told
    assert found.effects.lines[0].size[0] > 0


@pytest.mark.parametrize("objective", ["margin", "kl"])
def test_what_changed_the_output_is_told(objective, compared):
    """Points and logits that are −∞ in FP64, too, have no share; all others add up."""
    (shares, *_) = diagnose_program(compared.run, PROGRAM, objective=objective).effects.shares
    assert shares.unknown is None
    assert shares.change != 0
    assert shares.remainder < 0.02


def test_views_of_a_position_agree():
    exact = DRAW(size=PADDED) + np.asarray(MASK, float)
    off = 1e-3 * DRAW(size=(2, PADDED))
    views = tuple(View.of_row(0, 8, exact + e) for e in off)
    found = compare_views("a", "prefill", views, (exact, exact), 1e-3)
    assert (found.match, found.f64_match, found.near_tie) == (True, True, None)
    assert found.f64_top1 == int(exact.argmax())
    assert found.max_diff == pytest.approx(np.abs(off[0] - off[1])[:VOCAB].max())
    assert 0 < found.kl < 1e-5


def test_a_token_too_much_that_cannot_be_is_found():
    """A mask that is one token longer in decode makes the divergence infinite, and a top-1 that is lost."""
    exact = DRAW(size=PADDED) + np.asarray(MASK, float)
    lost = exact.copy()
    lost[exact.argmax()] = -np.inf
    found = compare_views("a", "prefill", (View.of_row(0, 8, exact), View.of_row(0, 8, lost)), (exact, exact), 1e-3)
    assert not found.match
    assert not found.f64_match
    assert found.kl == found.max_diff == "inf"

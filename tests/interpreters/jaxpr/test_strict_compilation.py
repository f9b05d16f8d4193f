"""Programs compiled without excess precision: roundings that XLA leaves out, by line, and a run that makes them all."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program, gate
from precaudit.cli import run
from precaudit.interpreters.jaxpr.jax_versions import source, walk_equations
from precaudit.interpreters.jaxpr.strict import left_out
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.references.comparison.programs import compare_program

RANDOM = np.random.default_rng(0)
X, W = (jnp.asarray(RANDOM.standard_normal(shape), jnp.bfloat16) for shape in ((4, 16), (16, 8)))


def shares(w, x):
    logits = (x @ w).astype(jnp.float32)
    return jax.nn.softmax(logits)


def stored(w, x):
    return jax.lax.reduce_precision(jnp.dot(x, w, preferred_element_type=jnp.float32), 8, 7)


def test_the_line_of_a_rounding_that_xla_leaves_out_is_found():
    for function, left in ((shares, "x @ w"), (stored, None)):
        made = jax.make_jaxpr(function)(W, X)
        lines = list(dict.fromkeys(source(e) for e in walk_equations(made.jaxpr) if source(e)))
        text, start = inspect.getsourcelines(function)
        expected = [start + next(i for i, line in enumerate(text) if left in line)] if left else []
        assert [int(line.split(":")[1]) for line in left_out(made, (W, X), lines)] == expected


def test_a_strict_run_says_what_the_default_leaves_out_and_is_judged_by_itself(tmp_path):
    for function, told in ((shares, "declared roundings are left out"), (stored, "has the same bits")):
        program = Program(function, W, {"a": (X,)})
        opened = trace_program(program, tmp_path / function.__name__, options=ProgramTraceOptions(strict=True))
        assert told in opened.record.warnings[0]
        compare_program(opened, program)
        found = gate(opened.folder)
        assert found.exit_code == 0
        assert any("--strict" in note for note in found.notes)


def test_a_model_is_recorded_strictly_by_its_policy(capsys):
    assert run(["trace", "tiny", "--strict"]) == 2
    assert "--set excess_precision=off" in capsys.readouterr().err

"""The operation that makes what is not finite: its word, its value in FP64, its line, and what follows from it."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from precaudit import Program, gate
from precaudit.diagnosis.programs import diagnose_program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.reports.headline import headline
from tests.helpers.selected import few

FILE = Path(__file__).name
HALF = jnp.float16
RANDOM = np.random.default_rng(0)
X, W = (jnp.asarray(RANDOM.standard_normal(shape), HALF) for shape in ((4, 8), (8, 8)))


def squared(w, x):
    h = (x @ w) * HALF(300)
    return jnp.sum(h * h, -1) @ w[:4]  # here, and no point


def masked(w, x):
    h = x @ w
    seen = jnp.where(jnp.tril(jnp.ones(h.shape, bool)), h, -jnp.inf)  # the formula's own infinity
    raised = seen * HALF(3e4)  # here
    return jax.nn.softmax(raised.astype(jnp.float32), -1).astype(HALF) @ w


def absorbed(w, x):
    h = x @ w
    soft = 1 / (1 + jnp.exp(h * HALF(8)))  # overflows, and its inverse is 0 as it should be
    large = h * HALF(6e4)  # here
    return (soft * large) @ w


def logarithm(w, x):
    h = x @ w
    open_ = jnp.log(jnp.tril(jnp.ones(h.shape, HALF)))  # of a mask: -inf in FP64, too
    return jax.nn.softmax(h * HALF(3e4) + open_, -1) @ w  # here


def underflowed(w, x):
    h = x @ w
    size = jnp.sum(jnp.square(h * HALF(1e-5)), -1, keepdims=True)
    return (h / size) @ w  # here


def nothing(w, x):
    small = (x @ w) * HALF(1e-7)
    return ((small * small) / (small * small)) @ w  # here


def layered(w, x):
    def layer(x, scale):
        h = x @ w
        grown = h * scale  # here
        return x, grown @ w

    return lax.scan(layer, x, jnp.asarray([1, 10, 6e4, 1], HALF))


def branched(w, x):
    h = x @ w
    return lax.cond(x[0, 0] > -9, lambda h: h * HALF(6e4), lambda h: h / HALF(2), h) @ w  # here


CASES = {
    squared: "overflow", masked: "overflow", absorbed: "overflow", logarithm: "overflow", layered: "overflow",
    branched: "overflow", underflowed: "division by zero", nothing: "invalid",
}  # fmt: skip


def judged(folder, call):
    program = Program(call=call, params=W, cases={"a": (X,)})
    run = trace_program(program, folder / "run", options=ProgramTraceOptions(force=True))
    return gate(compare_program(run, program)), diagnose_program(run, program)


def line(call):
    lines, first = inspect.getsourcelines(call)
    return f"test_nonfinite_causes.py:{first + next(i for i, x in enumerate(lines) if '# here' in x)}"


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("call", few(CASES, squared, logarithm), ids=lambda c: c.__name__)
def test_the_operation_that_makes_it_is_named_by_its_word_and_line(call, tmp_path):
    found, diagnosed = judged(tmp_path, call)
    standing = [v for v in found.verdicts if v.status != "input suspect"]
    assert [(v.status, v.kind) for v in standing] == [("nonfinite", "local")]
    assert standing[0].text.startswith(f"{CASES[call]}: ")
    assert standing[0].text.endswith(f" at {line(call)}")
    assert standing[0].text in headline(found, "run").sentence
    assert [(f.kind, f.cause, f.says) for f in diagnosed.findings] == [("format", CASES[call], standing[0].text)]


def test_an_overflow_is_told_with_its_value_in_fp64(tmp_path):
    found, _ = judged(tmp_path, squared)
    h = np.asarray((X @ W) * HALF(300)).astype(np.float64)  # rounded as the program rounds it
    (told,) = {v.text for v in found.verdicts if v.text}
    value, largest = re.search(r"overflow: (\S+) exceeds float16's (\d+)", told).groups()
    assert float(value) == pytest.approx((h * h).max(), rel=0.05)
    assert int(largest) == 65504


def test_a_step_of_a_scan_is_told_as_its_layer(tmp_path):
    found, diagnosed = judged(tmp_path, layered)
    assert {v.layer for v in found.verdicts if v.text} == {2}
    assert diagnosed.findings[0].layers == (2,)


def test_a_row_that_a_mask_leaves_nothing_of_is_no_matter_of_formats(tmp_path):
    """FP64 makes it of its formula, too: another format helps nothing."""

    def call(w, x, mask):
        scores = jnp.where(mask, (x @ w) @ x.T, -jnp.inf)
        return jax.nn.softmax(scores, -1) @ x

    mask = jnp.tril(jnp.ones((4, 4), bool)) & (jnp.arange(4) >= 2)[None]
    program = Program(call, W, {"a": (X, mask)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    judged = gate(opened.folder)
    line = call.__code__.co_firstlineno + 2
    says = f"invalid: inf − inf at {FILE}:{line}, in FP64, too"
    assert headline(judged, "run").text.endswith(f": {says}; 8 elements are NaN or infinite.")
    (found,) = diagnose_program(opened, program).findings
    assert (found.kind, found.cause, found.says) == ("semantics", "invalid", says)


def test_nan_in_an_input_is_said_of_it(tmp_path):
    """An infinite one is a mask, of which nothing is said."""
    x = np.array(X)
    x[1, 2], mask = np.nan, jnp.full((4, 8), -jnp.inf, HALF)
    program = Program(lambda w, x, mask: (x @ w) + mask, W, {"a": (jnp.asarray(x), mask)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    assert [note for note in opened.record.warnings if note.startswith("inputs")] == ["inputs: 0 of case a holds 1 NaN"]
    compare_program(opened, program)
    assert "inputs: 0 of case a holds 1 NaN" in gate(opened.folder).notes


def test_an_overflow_in_a_function_of_jax_is_at_the_line_that_calls_it(tmp_path):
    """JAX keeps no line of the user's inside of its own jitted functions; here a tap of the user's is beside it."""

    def call(w, x):
        def layer(h, scale):
            total = jnp.cumsum(h * scale, axis=0)
            return checkpoint_name(h + total * HALF(0), "h"), None

        return jax.lax.scan(layer, x, jnp.asarray([1, 2.5e4], HALF))[0] @ w

    program = Program(call, W, {"a": (jnp.ones_like(X),)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    line = call.__code__.co_firstlineno + 2
    told = [v.text for v in gate(opened.folder).verdicts if v.metric == "nonfinite" and v.text]
    assert told
    assert all(f" at {FILE}:{line}" in x for x in told)


@pytest.mark.parametrize("later", [1 / 64, 1.5])
def test_infinities_that_a_step_is_handed_are_told_as_what_made_them(later, tmp_path):
    """A stream that no point shows overflows in the first step of a scan, or in all; the norm of the next reads it."""

    def call(w, x):
        def layer(x, w):
            y = x.astype(jnp.float32)
            n = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
            mlp = (n @ w) * 3e4
            return x + mlp.astype(HALF), None

        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).mean(-1)

    draw = np.random.default_rng(0).normal
    weights = jnp.asarray(draw(size=(3, 16, 16)) / 4, jnp.float32)
    weights = weights.at[0].multiply(1.1).at[1:].multiply(later)
    program = Program(call, weights, {"a": (jnp.asarray(draw(size=(6, 16)), HALF),)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    found = gate(compare_program(opened, program))
    line = call.__code__.co_firstlineno + 5
    told = {(v.point, v.layer): v.text for v in found.verdicts if v.status == "nonfinite"}
    assert told["n", 1].startswith("overflow: ")
    assert all(f" exceeds float16's 65504 at {FILE}:{line}" in x for x in told.values())
    assert told["n", 1].partition(";")[0].endswith(", in layer 0")
    assert told["n", 2].partition(";")[0] == told["n", 1].partition(";")[0]

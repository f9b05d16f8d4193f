"""What changed a program's outputs, and what its lines gain in float32: against the program edited so, and run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import precaudit
from precaudit.cli import run as command
from precaudit.diagnosis.evidence import raised_lines
from precaudit.diagnosis.evidence.effects import Effects
from precaudit.diagnosis.evidence.raised_lines import OutputDistance, is_worth_a_word
from precaudit.diagnosis.evidence.records import LineRemedy
from precaudit.diagnosis.programs import Diagnosed, diagnose_program
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.raised import raising, rounding_lines
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.tracing.predicting import target_of
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.comparison.programs import compare_program
from precaudit.reports.program_diagnosis import growth_sentences, program_diagnosis_report
from precaudit.schema.metrics.logits import kl
from precaudit.schema.records.errors import ForwardError

ROWS, WIDTH, LAYERS, VOCAB = 96, 64, 6, 128
DRAW = np.random.default_rng(3)
WEIGHTS = {
    "mlp": jnp.asarray(DRAW.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, jnp.bfloat16),
    "head": jnp.asarray(DRAW.standard_normal((WIDTH, VOCAB)) / WIDTH**0.5, jnp.bfloat16),
}
INPUT = jnp.asarray(4 * DRAW.standard_normal((ROWS, WIDTH)), jnp.bfloat16)


def said_of(found):
    return program_diagnosis_report(found, []).lines


def stream(stored, acted):
    """Return a residual network whose stream is held in one format and whose activations in another."""

    def call(params, x):
        def layer(x, w):
            mid = jnp.tanh(x.astype(jnp.bfloat16).astype(jnp.float32)).astype(acted)
            mixed = jnp.dot(mid, w, preferred_element_type=jnp.float32)
            x = (x.astype(jnp.float32) + mixed).astype(stored)  # the stream
            return x, None

        x, _ = jax.lax.scan(layer, x.astype(stored), params["mlp"])
        return jnp.dot(x, params["head"], preferred_element_type=jnp.float32)

    return call


def run(call, folder, outputs="logits", **cases):
    program = Program(call, WEIGHTS, cases or {"a": (INPUT,)}, outputs=outputs)
    opened = trace_program(program, folder)
    return program, opened


def in_fp64():
    """Return the network's logits in FP64."""
    x = np.asarray(INPUT, np.float64)
    for w in np.asarray(WEIGHTS["mlp"], np.float64):
        x = x + np.tanh(x) @ w
    return x @ np.asarray(WEIGHTS["head"], np.float64)


def off(call):
    """Return the mean KL of a program as it runs, from itself in FP64."""
    exact = in_fp64()
    made = np.asarray(jax.jit(call)(WEIGHTS, INPUT), np.float64)
    return np.mean([kl(e, m) for e, m in zip(exact, made, strict=True)])


@pytest.mark.turn  # 4 s
def test_a_line_in_float32_gains_what_the_program_edited_so_gains(tmp_path):
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "run")
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin").effects
    streamed = next(r for r in found.lines if "# the stream" in r.text[0])
    narrow = off(stream(jnp.bfloat16, jnp.bfloat16))
    edited = off(stream(jnp.float32, jnp.bfloat16))
    assert float(streamed.size[0]) == pytest.approx(narrow, rel=0.25)
    assert float(streamed.gain) == pytest.approx(1 - edited / narrow, abs=0.1)
    assert float(streamed.gain) > 0.3
    assert streamed is found.lines[0]
    assert streamed.bytes == 2 * ROWS * WIDTH * LAYERS
    said = said_of(diagnose_program(opened, program, objective="margin"))
    assert any("the stream" in line for line in said)
    assert any(line.startswith("To change, emulated: KL") for line in said)


@pytest.mark.turn  # 4 s
def test_shares_of_a_programs_points_add_up_to_what_changed(tmp_path):
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "run")
    compare_program(opened, program)
    for objective in ("margin", "kl", "logprob:5"):
        (one,) = diagnose_program(opened, program, objective=objective).effects.shares
        assert one.objective == objective
        assert one.unknown is None
        assert float(one.explained) == pytest.approx(float(one.change), rel=0.02)
        assert {s.layer for s in one.shares if s.point == "mixed"} == set(range(LAYERS))
    exact, recorded = in_fp64(), np.asarray(opened.tensors("a", 0, "outputs")["outputs.logits"], np.float64)
    farthest = exact[np.argmax([kl(e, r) for e, r in zip(exact, recorded, strict=True)])]
    second, first = np.sort(farthest)[-2:]
    (one,) = diagnose_program(opened, program, objective="margin").effects.shares
    assert float(one.fp64) == pytest.approx(first - second, rel=1e-6)


def test_the_share_of_what_rounds_nothing_is_nothing(tmp_path):
    def call(params, x):
        exact = x @ (2 * jnp.eye(WIDTH, dtype=jnp.float32))
        inexact = exact @ params["w"]
        return inexact.astype(jnp.bfloat16)

    weights = {"w": jnp.asarray(DRAW.standard_normal((WIDTH, 8)), jnp.float32)}
    program = Program(call, weights, {"a": (INPUT.astype(jnp.float32),)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin").effects
    (one,) = found.shares
    assert one.objective == "distance"
    sizes = {s.point: abs(float(s.share)) for s in one.shares}
    assert sizes["exact"] <= 1e-12 < sizes["inexact"]
    assert float(one.explained) == pytest.approx(float(one.change), rel=1e-9)
    exact = np.asarray(INPUT, np.float64) @ (2 * np.asarray(weights["w"], np.float64))
    recorded = np.asarray(opened.tensors("a", 0, "outputs")["outputs.y"], np.float64)
    assert float(one.change) == pytest.approx(np.linalg.norm(recorded - exact), rel=1e-9)
    (line,) = found.lines
    assert line.measure == "distance"
    assert float(line.gain) == pytest.approx(1.0, abs=1e-3)
    assert line.text == ("return inexact.astype(jnp.bfloat16)",)


def test_a_program_with_taps_of_its_own_has_shares_and_lines(tmp_path):
    def call(params, x):
        mid = checkpoint_name(x @ params["head"], "mid")
        return (jnp.tanh(mid) * 2).astype(jnp.bfloat16)

    program, opened = run(call, tmp_path / "run", outputs="y")
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin").effects
    assert {s.point for s in found.shares[0].shares} == {"mid", "outputs.y"}
    assert float(found.shares[0].explained) == pytest.approx(float(found.shares[0].change), rel=1e-6)
    assert found.lines


def test_effects_are_kept_beside_the_run_and_made_again_for_another_objective(tmp_path, monkeypatch):
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "run")
    compare_program(opened, program)
    first = diagnose_program(opened, program, objective="margin").effects
    made = []
    monkeypatch.setattr("precaudit.diagnosis.evidence.effects.line_remedies", lambda *_: made.append("lines") or ())
    monkeypatch.setattr("precaudit.diagnosis.evidence.effects.split_change", lambda *_, **__: made.append("split"))
    assert diagnose_program(opened, program, objective="margin").effects == first
    assert made == []
    monkeypatch.undo()
    assert diagnose_program(opened, program, objective="kl").effects.shares[0].objective == "kl"
    trace_program(program, opened.folder, options=ProgramTraceOptions(force=True))  # nothing of ours stands in the way


@pytest.mark.turn  # 8 s
def test_what_cannot_be_told_is_said(tmp_path, capsys):
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "bare", outputs=None)
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin")
    assert found.exit_code == 0
    assert (
        program_diagnosis_report(found, [])
        .lines[-1]
        .startswith('To change: unknown: no output is named: Program(..., outputs="logits")')
    )
    program, opened = run(lambda p, x: {"a": x @ p["head"]}, tmp_path / "tree", outputs="out")
    compare_program(opened, program)
    told = diagnose_program(opened, program, objective="margin").effects.unknown
    assert told.startswith("no output that is named is an array of floats")
    # a run of someone else's program: its code is not run, the findings are told all the same
    assert command(["diagnose", str(tmp_path / "bare")]) == 0
    assert "To change: unknown" in capsys.readouterr().out
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "nan", a=(INPUT.at[0, 0].set(jnp.nan),))
    compare_program(opened, program)
    (one,) = diagnose_program(opened, program, objective="margin").effects.shares
    assert one.unknown == "values that were recorded are NaN"


@pytest.mark.parametrize("objective", ["foo", "kl:3", "logprob:x", f"logprob:{VOCAB}"])
def test_an_objective_that_is_none_is_refused(objective, tmp_path):
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "run")
    with pytest.raises(UserError, match=f"objective '{objective}'"):
        diagnose_program(opened, program, objective=objective)


def test_only_lines_that_round_to_less_than_float32_are_tried(tmp_path):
    def call(_params, x):
        wide = jnp.tanh(x.astype(jnp.float32))
        moved = x.reshape(-1)[:4]
        return wide.sum() + moved.astype(jnp.float32).max()

    program = Program(call, {}, {"a": (INPUT,)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    made = traced_entries(opened, program)[0].made
    assert rounding_lines(made.jaxpr.jaxpr) == {}
    compare_program(opened, program)
    assert diagnose_program(opened, program, objective="margin").effects.lines == ()


def test_where_nothing_was_judged_nothing_is_explained():
    found = Diagnosed((), (), 0)
    assert found.exit_code == 3
    assert said_of(found) == ["? nothing was judged."]


def test_growth_is_told_by_steps_and_occurrences(tmp_path):
    program, opened = run(stream(jnp.bfloat16, jnp.bfloat16), tmp_path / "run")
    errors = compare_program(opened, program)
    told = growth_sentences(errors)
    assert any(f"at its last of {LAYERS}" in x and "at its first step" in x for x in told)

    def jumps(params, x):
        for w in params["mlp"]:
            x = x + jnp.tanh(x) @ w
        return x

    program, opened = run(jumps, tmp_path / "loop", outputs="y")
    told = growth_sentences(compare_program(opened, program))
    assert any(f"at its last of {LAYERS}" in x and "at its first occurrence" in x for x in told)


@pytest.mark.slow
def test_what_only_moves_a_raised_value_rounds_nothing(tmp_path):
    def call(params, x):
        made = (x.astype(jnp.float32) @ params["head"].astype(jnp.float32)).astype(jnp.bfloat16)
        moved = made.T.reshape(-1)
        return moved.astype(jnp.float32)

    program, opened = run(call, tmp_path / "run", outputs="y")
    compare_program(opened, program)
    (line,) = diagnose_program(opened, program, objective="margin").effects.lines
    assert line.text[0].startswith("made = ")
    assert float(line.gain) > 0.99


def test_a_rounding_by_reduce_precision_is_tried_and_told_beside_the_real_size(tmp_path):
    def call(params, x):
        wide = jnp.dot(x, params["head"], preferred_element_type=jnp.float32)
        return jax.lax.reduce_precision(wide, 8, 3)

    program, opened = run(call, tmp_path / "run")
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin")
    (line,) = found.effects.lines
    assert line.text == ("return jax.lax.reduce_precision(wide, 8, 3)",)
    assert float(line.gain) > 0.99
    exact = np.asarray(INPUT, np.float64) @ np.asarray(WEIGHTS["head"], np.float64)
    made = np.asarray(jax.jit(call)(WEIGHTS, INPUT), np.float64)
    assert float(line.real) == pytest.approx(np.mean([kl(e, m) for e, m in zip(exact, made, strict=True)]), rel=1e-6)
    (told,) = (x for x in said_of(found) if x.startswith("To change"))
    assert "as it ran), and" in told


def test_a_size_that_is_far_from_the_real_one_is_said_to_be_the_emulations():
    line = LineRemedy(
        run="", output="outputs.logits", measure="kl", sources=("a.py:1",), text=("x",), size=(8.3e-2, 1e-2), all=0.0,
        flips=(0, 0), rows=1, gain=0.88, error=0.01, bytes=0, real=1.3e-4,
    )  # fmt: skip
    said = said_of(Diagnosed((), (), 1, effects=Effects(lines=(line,))))
    assert any("8.3e-2 (1.3e-4 as it ran)" in x for x in said)
    assert any("error is larger than the program's" in x for x in said)


def test_what_is_not_finite_is_said_and_no_share_of_it(tmp_path):
    def call(_params, x):
        return (1e4 * x.astype(jnp.float32)).astype(jnp.float8_e4m3fn).astype(jnp.float32)

    program, opened = run(call, tmp_path / "run", outputs="y")
    compare_program(opened, program)
    said = said_of(diagnose_program(opened, program, objective="margin"))
    assert not any("nan" in x for x in said if x.startswith(("To change", "  ", "Output")))
    line = call.__code__.co_firstlineno + 1
    finite = f"as its equations round it is not finite; it is with test_line_effects.py:{line} alone in float32"
    assert f"To change: unknown: {finite}" in said


def test_the_bytes_a_line_takes_more_are_to_float32():
    def call(x):
        eight = x.astype(jnp.float8_e4m3fn)
        sixteen = (x * 3).astype(jnp.bfloat16)
        return eight.astype(jnp.float32) + sixteen.astype(jnp.float32)

    jaxpr = jax.make_jaxpr(call)(jnp.ones((5, 2), jnp.float32))
    assert {line.text.split(" ")[0]: size for line, size in rounding_lines(jaxpr.jaxpr).items()} == {
        "eight": 3 * 10, "sixteen": 2 * 10,
    }  # fmt: skip


def test_a_jump_is_told_before_what_grows_more():
    sizes = {"steady": (1e-3, 2.5e-3, 6e-3, 1.5e-2), "jumps": (1e-3, 1e-3, 4e-3, 4e-3), "short": (1e-3, 1e-1)}
    errors = [
        ForwardError(
            prompt="a", phase="call", step=0, layer=i, point=name, candidate="", reference="fp64",
            rel_l2=x,
        )
        for name, each in sizes.items() for i, x in enumerate(each)
    ]  # fmt: skip
    assert [line.partition(" ")[0] for line in growth_sentences(errors)] == ["jumps", "steady"]
    assert "with a jump at step 2 (× 4)" in growth_sentences(errors)[0]


@pytest.mark.parametrize(("gain", "error", "told"), [(0.15, 0.1, False), (0.15, 0.05, True), (0.05, 0.001, False)])
def test_a_gain_within_its_error_or_too_small_is_not_told(gain, error, told):
    line = LineRemedy(
        run="", output="outputs.logits", measure="kl", sources=("a.py:1",), text=("x",), size=(1.0, 1 - gain), all=0.0,
        flips=(0, 0), rows=1, gain=gain, error=error, bytes=0,
    )  # fmt: skip
    assert is_worth_a_word(line) is told


def test_the_last_call_is_looked_at_on_the_inputs_it_was_given(tmp_path):
    weights = {"w": jnp.asarray(DRAW.standard_normal((8, 8)), jnp.bfloat16)}
    first = jnp.asarray(DRAW.standard_normal((4, 8)), jnp.bfloat16)
    program = Program(
        lambda p, x: x @ p["w"], weights, {"a": (first,)}, steps=2, advance=lambda _inputs, out: (out,), outputs="y"
    )
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    (one,) = diagnose_program(opened, program, objective="margin").effects.shares
    given = np.asarray(opened.tensors("a", 2, "inputs")["0"], np.float64)
    made = np.asarray(opened.tensors("a", 2, "outputs")["outputs.y"], np.float64)
    assert float(one.change) == pytest.approx(np.linalg.norm(made - given @ np.asarray(weights["w"], np.float64)))


def averaged(stored):
    """Return a step of an optimizer that is given its second moment, which is held in one format from call to call."""

    def call(_params, w, moment, gradient):
        before = moment.astype(jnp.float32)
        w = w - 0.05 * gradient / jnp.sqrt(before)
        moment = (0.98 * before + 0.02 * jnp.square(gradient)).astype(stored)  # the second moment
        return w, moment

    return call


@pytest.mark.turn  # 5 s
def test_a_second_moment_that_earlier_calls_rounded_is_the_line_to_change(tmp_path):
    """Against the optimizer edited so, and FP64; the last call alone reads the moment as it was given."""
    steps = 20
    w, gradient = (jnp.asarray(DRAW.standard_normal(256), jnp.float32) for _ in range(2))

    def started(stored):
        return w, jnp.full(256, 4, stored), gradient

    def advance(inputs, out):
        return (*out, inputs[2])

    program = Program(
        averaged(jnp.bfloat16), {}, {"a": started(jnp.bfloat16)}, steps=steps - 1, advance=advance,
        outputs=("new", "second"),
    )  # fmt: skip
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin").effects
    (line,) = found.lines
    assert "# the second moment" in line.text[0]
    assert line.calls == steps

    def ends(stored):
        x = started(stored)
        for _ in range(steps):
            x = advance(x, jax.jit(averaged(stored))({}, *x))
        return np.asarray(x[0], np.float64)

    exact, moment, g = np.asarray(w, np.float64), np.full(256, 4.0), np.asarray(gradient, np.float64)
    for _ in range(steps):
        exact = exact - 0.05 * g / np.sqrt(moment)
        moment = 0.98 * moment + 0.02 * g * g
    narrow, edited = (np.linalg.norm(ends(f) - exact) / np.linalg.norm(exact) for f in (jnp.bfloat16, jnp.float32))
    assert float(line.real) == pytest.approx(narrow, rel=1e-3)
    assert float(line.size[0]) == pytest.approx(narrow, rel=0.5)
    assert float(line.gain) == pytest.approx(1 - edited / narrow, abs=0.02)
    assert float(line.gain) > 0.9
    assert any(f"after {steps} calls" in x for x in said_of(diagnose_program(opened, program, objective="margin")))


def test_a_product_that_a_tpu_makes_in_one_pass_is_a_line_to_change(tmp_path):
    """Against the product of operands rounded to bfloat16, which a CPU multiplies in float32 exactly enough."""
    w, x = (jnp.asarray(DRAW.standard_normal(shape), jnp.float32) for shape in ((64, 32), (32, 64)))

    def call(params, x):
        y = jnp.dot(x, params, precision="default")  # one pass
        return jnp.tanh(y) + jnp.dot(x, params, precision="highest")

    program = Program(call, w, {"a": (x,)}, outputs="y")
    opened = trace_program(program, tmp_path / "run", options=ProgramTraceOptions(target=target_of("tpu-emulated:v5e")))
    compare_program(opened, program)
    found = diagnose_program(opened, program, objective="margin").effects
    narrow = jnp.tanh(x.astype(jnp.bfloat16).astype(jnp.float32) @ w.astype(jnp.bfloat16).astype(jnp.float32))
    product = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    exact = np.tanh(product) + product
    off = np.linalg.norm(np.asarray(narrow, np.float64) - np.tanh(product)) / np.linalg.norm(exact)
    (line,) = (r for r in found.lines if len(r.sources) == 1)
    assert "# one pass" in line.text[0]
    assert line.products == line.sources
    assert float(line.size[0]) == pytest.approx(off, rel=0.1)
    assert float(line.gain) > 0.99
    said = said_of(diagnose_program(opened, program, objective="margin"))
    assert any(x.endswith(f'precision="highest" at {line.sources[0]}') for x in said)


def test_a_line_of_a_function_of_jax_is_the_line_that_calls_it():
    """JAX keeps no line of the user's inside of its own jitted functions."""

    def call(x):
        y = x.astype(jnp.bfloat16)
        return jnp.cumsum(y, axis=0)

    x = jnp.asarray(np.random.default_rng(1).standard_normal((64, 8)), jnp.float32)
    jaxpr = jax.make_jaxpr(call)(x)
    lines = rounding_lines(jaxpr.jaxpr)
    assert [line.text for line in lines] == ["y = x.astype(jnp.bfloat16)", "return jnp.cumsum(y, axis=0)"]
    with jax.enable_x64(True):
        run = jax.jit(raising(jaxpr, Realisation("converted"), tuple(lines)))
        made = [np.asarray(run(np.uint64(1), np.full(2, raised), x)[0]) for raised in (False, True)]
    off = [float(np.abs(y - np.cumsum(x, 0)).max()) for y in made]
    assert off[0] > 1e-2
    assert off[1] < 1e-5


def test_a_line_of_a_function_of_jax_inside_of_a_loop_is_raised():
    def call(x):
        return jax.lax.map(jnp.tanh, x)

    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(call)(x)
    lines = rounding_lines(jaxpr.jaxpr)
    assert [line.text for line in lines] == ["return jax.lax.map(jnp.tanh, x)"]
    with jax.enable_x64(True):
        run = jax.jit(raising(jaxpr, Realisation("converted"), tuple(lines)))
        made = [np.asarray(run(np.uint64(1), np.full(1, raised), x)[0]) for raised in (False, True)]
    off = [float(np.abs(y - np.tanh(np.asarray(x, np.float64))).max()) for y in made]
    assert off[0] > 1e-3
    assert off[1] < 1e-6


def test_a_pair_of_conversions_that_is_kept_is_a_line_to_raise(tmp_path):
    """Where the emulation that removes it leaves less than the program did, one that keeps it is tried."""

    def call(p, x):
        h = jnp.tanh(x @ p["a"])
        h = h.astype(jnp.bfloat16).astype(jnp.float32)
        return h @ p["b"]

    draw = np.random.default_rng(1).standard_normal
    p = {n: jnp.asarray(draw(shape) * 0.2, jnp.float32) for n, shape in {"a": (32, 64), "b": (64, 128)}.items()}
    program = precaudit.Program(call, p, {"a": (jnp.asarray(draw((4, 32)), jnp.float32),)}, outputs="logits")
    run = precaudit.trace(program, tmp_path / "run")
    precaudit.compare(run, program=program)
    found = diagnose_program(run, program, objective="margin")
    (told,) = [x for x in said_of(found) if x.startswith("To change")]
    assert told.endswith(" with the only line that rounds to less in float32")
    (line,) = found.effects.lines
    assert line.text == ("h = h.astype(jnp.bfloat16).astype(jnp.float32)",)
    assert line.gain > 0.9
    assert 0.3 < line.size[0] / line.real < 3


def test_lines_that_make_an_output_finite_are_named(tmp_path):
    """In float16 a small probability is 0, and its logarithm infinite."""

    def call(p, x):
        h = x @ p
        probs = jnp.exp(h - h.max(-1, keepdims=True))
        probs = probs / probs.sum(-1, keepdims=True)
        return -jnp.log(probs)[:, 0].mean()

    draw = np.random.default_rng(1).standard_normal
    p, x = (jnp.asarray(draw(shape) * size, jnp.float16) for shape, size in (((32, 64), 4), ((4, 32), 1)))
    program = precaudit.Program(call, p, {"a": (x,)}, outputs="loss")
    run = precaudit.trace(program, tmp_path / "run")
    precaudit.compare(run, program=program)
    said = said_of(diagnose_program(run, program, objective="margin"))
    (told,) = [x for x in said if x.startswith("To change")]
    finite = "as its equations round it is not finite; it is with all 4 lines that round to less in float32"
    assert told == f"To change: unknown: {finite}"


def test_where_no_emulation_is_as_far_off_as_the_program_the_farthest_is_taken(monkeypatch):
    """Of three ways, each a tenth of what the program was."""
    sizes = iter((0.1, 0.3, 0.2))
    made = []

    class Tried:
        def __init__(self):
            made.append(self)
            self.sizes, self.real, self.size = {"line": 1}, 4.0, next(sizes)

        def measure(self, *_):
            return OutputDistance(np.full(2, self.size), 0)

    monkeypatch.setattr(raised_lines, "replace", lambda last, **_: last)
    monkeypatch.setattr(raised_lines.Trial, "of", lambda *_: Tried())
    last = SimpleNamespace(opened=SimpleNamespace(record=SimpleNamespace(cases=("a",))))
    trial, before = raised_lines._trial_as_it_ran(last, None)
    assert (len(made), trial, before.size) == (3, made[1], 0.3)


def test_rows_that_rounding_makes_infinite_are_not_left_out_of_the_mean():
    """Two of three rows agree; the third is NaN as it is made. A row that FP64 has no softmax of says nothing."""
    exact = np.log(np.full((3, 4), 0.25))
    made = exact.copy()
    assert raised_lines._distance(exact, made, True) == (0.0, 0)
    made[1, 2] = np.nan
    assert raised_lines._distance(exact, made, True) == (np.inf, 0)
    exact[1, 2] = np.nan
    assert raised_lines._distance(exact, made, True) == (0.0, 0)

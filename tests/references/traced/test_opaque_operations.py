"""What has no FP64 meaning makes what it gives unknown, by name, and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap
from jax.experimental import pallas as pl

import precaudit
from precaudit import Program, gate
from precaudit.interpreters.jaxpr import primitives
from precaudit.interpreters.jaxpr.opaque import KNOWN, without_opaque
from precaudit.progress import silent
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import open_program_run
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.reference import Traced
from precaudit.reports.program import program_sentences
from precaudit.schema.places import Place

DRAW = np.random.default_rng(11)
W = DRAW.standard_normal((3, 32, 32)).astype(np.float32).astype(ml_dtypes.bfloat16)
X = DRAW.standard_normal((8, 32)).astype(np.float32).astype(ml_dtypes.bfloat16)


def kernel(x):
    def body(x_ref, out):
        out[...] = x_ref[...] * 2

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="twice")(x)


def bits(x):
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16) & jnp.uint16(0xFFF0), jnp.bfloat16)


def callback(x):
    return jax.pure_callback(lambda y: np.asarray(y), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def straight(middle, w, x):
    a = tap(x @ w[0], "a")
    b = tap(middle(a), "b")
    return tap(b @ w[1], "c"), tap(jnp.tanh(a), "d")


def layers(middle, w, x):
    def layer(x, w):
        inner = tap(x @ w, "inner")
        return tap(jnp.tanh(middle(inner)), "carried"), None

    return lax.scan(layer, tap(x @ w[0], "first"), w)[0]


def again(middle, w, x):
    """A function whose first result, of what has no meaning, the next call begins with."""
    return middle(tap(x @ w[0], "a")), tap(jnp.tanh(x @ w[1]), "next")


def judged(tmp_path, program):
    """Return {(kind, point): reasons} of a program's run, None where there are numbers."""
    trace_program(program, tmp_path / "run")
    errors = compare_program(tmp_path / "run", program)
    assert all((e.rel_l2 is None) == (e.unknown is not None) for e in errors)
    assert all(closes(e) for e in errors if e.kind == "local")
    found = {}
    for e in errors:
        found.setdefault((e.kind, e.point), set()).add(e.unknown)
    return found


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (kernel, "twice cannot be lifted to FP64 (its meaning lies outside the jaxpr)"),
        (bits, "bitcast_convert_type cannot be lifted to FP64 (it reads the bits of a float)"),
        (callback, "pure_callback cannot be lifted to FP64 (its meaning lies outside the jaxpr)"),
    ],
)
def test_what_it_makes_is_unknown_and_what_is_before_and_after_is_judged(tmp_path, middle, says):
    program = Program(partial(straight, middle), W, {"a": (X,)}, outputs=("c", "d"))
    found = judged(tmp_path, program)
    unknown = {place: reasons for place, reasons in found.items() if reasons != {None}}
    assert set(unknown) == {("local", "b"), ("forward", "b"), ("forward", "c"), ("forward", "outputs.c")}
    for (why,) in unknown.values():
        assert why.startswith(f"{says} at ")
        assert f"({middle.__name__})" in why
    said = list(program_sentences(open_program_run(tmp_path / "run"), compare_program(tmp_path / "run", program)))
    assert said[0].startswith("3 of 4 operations recomputed from recorded inputs")
    assert "Formula: not checked; compare with --model PATH, --map FILE or --reference NAME." in said
    judged_so = gate(tmp_path / "run")
    assert ({v.status for v in judged_so.verdicts}, judged_so.exit_code) == ({"unknown"}, 3)


def test_in_a_scan_no_layer_is_known_as_a_whole_and_the_others_are_alone(tmp_path):
    found = judged(tmp_path, Program(partial(layers, kernel), W, {"a": (X,)}))
    unknown = {place for place, reasons in found.items() if reasons != {None}}
    assert unknown == {("local", "carried"), ("forward", "carried"), ("forward", "inner")}


def test_layers_that_are_not_recorded_cut_nothing_off(tmp_path):
    """The second layer's input was made by the first, which is not in the run, in FP64 of what has no meaning there."""
    program = Program(partial(layers, kernel), W, {"a": (X,)})
    trace_program(program, tmp_path / "run", ProgramSelection(layers=(1,)))
    found = compare_program(tmp_path / "run", program)
    assert {e.point for e in found if e.kind == "local" and e.unknown} == {"carried", "inner", "layers.out"}
    assert {e.point for e in found if e.kind == "local" and not e.unknown} == {"first"}


def test_calls_that_go_on_with_it_are_unknown_from_the_second_on(tmp_path):
    program = Program(partial(again, bits), W, {"a": (X,)}, steps=1, advance=lambda _, out: (out[0],), outputs=None)
    trace_program(program, tmp_path / "run")
    found = compare_program(tmp_path / "run", program)
    known = {(e.step, e.point) for e in found if e.kind == "forward" and e.unknown is None}
    assert known == {(0, "a"), (0, "next")}
    assert not [e for e in found if e.kind == "local" and e.unknown is not None]


@pytest.mark.turn  # 4 s
def test_a_fault_beside_it_is_flagged(tmp_path):
    program = Program(partial(straight, kernel), W, {"a": (X,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    made, opaque = without_opaque(prepare_program(program), W, X)
    taps = opened.tensors("a", 0, "taps")
    for point in ("a", "c", "d"):
        off = (np.asarray(taps[point], np.float32) * 1.02).astype(ml_dtypes.bfloat16)
        found = Emulations(made, opaque=opaque).records(opened, "a", 0, taps | {point: off}, (W, X))
        assert not closes(next(e for e in found if e.point == point))
        assert [e.point for e in found if e.unknown] == ["b"]


def test_beside_a_loop_without_taps_all_is_unknown_as_it_might_not_end(tmp_path):
    def call(w, x):
        y = tap(bits(x) @ w[0], "y")
        return lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c / 2, jnp.abs(y).astype(jnp.float32))

    program = Program(call, W, {"a": (X,)}, outputs=None)
    made = prepare_program(program)
    assert without_opaque(made, W, X) == (made, KNOWN)
    trace_program(program, tmp_path / "run")
    errors = compare_program(tmp_path / "run", program)
    assert errors
    assert all("bits of a float" in e.unknown for e in errors)


def test_a_program_without_it_is_left_as_it_is():
    made = prepare_program(Program(partial(straight, jnp.tanh), W, {"a": (X,)}))
    assert without_opaque(made, W, X) == (made, KNOWN)


def test_of_inputs_read_unrounded_what_it_makes_is_read_as_recorded(tmp_path):
    """The activation was made of gate and up before these were rounded, and of what a kernel gave."""

    def call(w, x):
        gate, up = tap(x @ w[0], "gate"), tap(x @ w[1], "up")
        made = tap(kernel(x @ w[2]), "made")
        return tap(gate.astype(jnp.float32) * up.astype(jnp.float32) * made.astype(jnp.float32), "act")

    program = Program(call, W, {"a": (X,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    seen, opaque = without_opaque(prepare_program(program), W, X)
    taps = opened.tensors("a", 0, "taps")
    gate, up = (X.astype(np.float64) @ W[i].astype(np.float64) for i in (0, 1))
    act = (gate * up * np.asarray(taps["made"], np.float64)).astype(np.float32)
    found = Emulations(seen, opaque=opaque).records(opened, "a", 0, taps | {"act": act}, (W, X))
    (of_act,) = [e for e in found if e.point == "act"]
    assert closes(of_act)
    assert of_act.elided == {"policy:equations": ("inputs",)}


def test_of_the_whole_program_it_leaves_no_values(tmp_path):
    program = Program(partial(straight, kernel), W, {"a": (X,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    reference = Traced(OfRun(opened, program, prepare_program(program)), silent, kept=True)
    known = {p: reference.values(Place("a", "call", 0, None, p)) for p in ("a", "b", "c", "d")}
    assert {p for p, values in known.items() if values is None} == {"b", "c"}
    assert all(np.isfinite(values).all() for values in known.values() if values is not None)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references to memory")
def test_what_is_read_of_memory_is_unknown(tmp_path):
    def call(w, x):
        ref = jax.new_ref(tap(x @ w[0], "a"))
        ref[...] = ref[...] * 2
        return tap(tap(ref[...], "b") @ w[1], "c")

    found = judged(tmp_path, Program(call, W, {"a": (X,)}, outputs=None))
    unknown = {place for place, reasons in found.items() if reasons != {None}}
    assert unknown == {("local", "b"), ("forward", "b"), ("forward", "c")}


def test_what_gives_a_key_leaves_all_unknown(tmp_path, monkeypatch):
    """No primitive without FP64 meaning gives one in a program that JAX traces: one is said to have none."""
    monkeypatch.setitem(primitives.TABLE, "random_wrap", primitives.Lifting("refused", "for this test"))

    def call(w, x):
        key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))
        return tap(x @ w[0] + jax.random.normal(key, x.shape, x.dtype), "a")

    program = Program(call, W, {"a": (X,)}, outputs=None)
    trace_program(program, tmp_path / "run")
    errors = compare_program(tmp_path / "run", program)
    assert errors
    assert all(e.unknown and "random_wrap cannot be lifted" in e.unknown for e in errors)


def test_a_nan_that_it_gives_is_said(tmp_path):
    def call(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return tap(
            jax.pure_callback(lambda y: np.where(np.arange(32) < 2, np.nan, y).astype(y.dtype), shape, x @ w[0]), "y"
        )

    program = Program(call, W, {"a": (X,)}, outputs=None)
    trace_program(program, tmp_path / "run")
    compare_program(tmp_path / "run", program)
    judged_so = gate(tmp_path / "run")
    assert [(v.status, v.value) for v in judged_so.verdicts if v.kind == "local"] == [("nonfinite", 16.0)]
    assert judged_so.exit_code == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sign_of_a_float_is_known(dtype):
    """Keras' accuracy asks whether a logit is the negative zero."""

    def accuracy(w, x, label):
        y = x @ w
        best = jnp.argmax(jnp.where((y == 0) & jnp.signbit(y), -1e-30, y), -1)
        return (best == label).astype(y.dtype) * y[:, 0]

    w, x = (jnp.asarray(DRAW.standard_normal((n, 16)), dtype) for n in (16, 8))
    precaudit.assert_explained(accuracy, w, x, jnp.int32(3))


def test_other_bits_of_a_float_are_not():
    def exponent(w, x, scale):
        return (jax.lax.bitcast_convert_type(x @ w, jnp.int32) >> 23).astype(jnp.float32) * scale

    w, x = (DRAW.standard_normal((n, 16)).astype(np.float32) for n in (16, 8))
    judged_so = precaudit.check(exponent, w, x, jnp.float32(1))
    assert judged_so.exit_code == 3
    assert any("it reads the bits of a float" in v.text for v in judged_so.verdicts)

"""Programs of operations that the decoders lack: honest ones pass in every format, what is altered is flagged."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from safetensors.numpy import load_file, save_file

from precaudit import Program, gate
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.emulate import emulate_program, emulate_segments, exactly
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import OWN_SUMS, file_name, open_program_run
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.remade import Tapped
from precaudit.schema.filed import of_kinds
from precaudit.schema.records.errors import LocalError
from tests.helpers.selected import few

pytestmark = pytest.mark.usefixtures("neutral")

DRAW = np.random.default_rng(5)
ROWS, WIDTH = 24, 16


@pytest.fixture(autouse=True)
def promotion():
    """A user's programs mix formats as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def values(*shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(DRAW.standard_normal(shape) * scale, dtype)


def convolved(x, weights):
    """Grouped, with a stride."""
    return lax.conv_general_dilated(x.T[None], weights["kernel"], (2,), [(2, 2)], feature_group_count=4)[0]


def pooled(x, _weights):
    """Averages over windows; the start is an array, so the reducer is a function."""
    return lax.reduce_window(x, jnp.asarray(0, x.dtype), lax.add, (8, 1), (8, 1), "VALID") / 8


def spread(x, _weights):
    """Rows added up by where they go."""
    return jax.ops.segment_sum(jnp.tanh(x), jnp.arange(ROWS) % 3, 3)


def running(x, _weights):
    return jnp.cumsum(x, 0)


def growing(x, _weights):
    return jnp.cumprod(1 + x * jnp.asarray(0.05, x.dtype), 0)


def turned(x, _weights):
    """RoPE by complex numbers."""
    pairs = x.astype(jnp.float32).reshape(ROWS, WIDTH // 2, 2)
    angle = jnp.arange(ROWS)[:, None] * 100.0 ** (-jnp.arange(WIDTH // 2) / 8)
    whole = lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angle)
    return jnp.stack([whole.real, whole.imag], -1).reshape(x.shape).astype(x.dtype)


def filtered(x, _weights):
    wide = x.astype(jnp.float32)
    return jnp.fft.irfft(jnp.fft.rfft(wide, axis=0) * jnp.fft.rfft(wide[::-1], axis=0), n=ROWS, axis=0).astype(x.dtype)


def special(x, _weights):
    wide = jnp.abs(x.astype(jnp.float32))
    return jax.scipy.special.gammaln(wide + 1) + jax.scipy.special.digamma(wide + 0.5)


def solved(x, _weights):
    square = (x.T @ x).astype(jnp.float32) / ROWS + jnp.eye(WIDTH)
    return jnp.linalg.inv(square)


FEW = (convolved, spread, turned)
OPERATIONS = (*FEW, pooled, running, growing, filtered, special, solved)


def program(dtype, operations):
    def call(weights, x):
        return tuple(f(x, weights) for f in operations)

    kernel = values(32, WIDTH // 4, 5, dtype=dtype, scale=0.2)
    names = tuple(f.__name__ for f in operations)
    return Program(call, {"kernel": kernel}, {"a": (values(ROWS, WIDTH, dtype=dtype),)}, outputs=names)


def scaled_row(x):
    """One row times 1.02."""
    made = x.astype(np.float64)
    made[len(x) // 2] *= 1.02
    return made.astype(x.dtype)


def altered(opened, *points):
    """Return a run with a row of some points times 1.02, as a fault in making it would leave it."""
    name = file_name(opened.record, "a", 0, "taps")
    taps = load_file(opened.folder / name)
    save_file(taps | {p: scaled_row(taps[p]) for p in points}, opened.folder / name)
    hashes = {**opened.record.hashes, name: file_hash(opened.folder / name)}
    record = msgspec.structs.replace(opened.record, hashes=hashes)
    (opened.folder / "run.json").write_bytes(msgspec.json.encode(record))
    return open_program_run(opened.folder)


CASES = {
    "few in bfloat16": ("bfloat16", FEW),
    **{f"all in {dtype}": (dtype, OPERATIONS) for dtype in ("bfloat16", "float16", "float32")},
}


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("case", few(CASES, "few in bfloat16"))  # the others 31 to 55 s each
def test_operations_that_decoders_lack_pass_and_what_is_altered_is_flagged(case, tmp_path):
    dtype, operations = CASES[case]
    made = program(jnp.dtype(dtype), operations)
    opened = trace_program(made, tmp_path / "run")
    found = compare_program(opened, made)
    assert gate(opened.folder).counts == {"pass": len(found)}
    if dtype != "float32":
        narrow = {
            e.point for e in of_kinds(found, LocalError) if OWN_SUMS in (e.elided or {}).get("policy:equations", ())
        }
        assert len(narrow) >= (1 if operations is FEW else 3)
    results = [p.name for p in opened.record.points][-len(operations) :]
    compare_program(altered(opened, *results), made)
    judged = gate(opened.folder)
    assert {v.point for v in judged.verdicts if v.status == "fail"} >= set(results)


def test_what_reads_a_long_product_before_it_is_rounded_reads_nearly_what_was_recorded(tmp_path):
    """Emulated in FP64 a product of 128 bfloat16 factors is percents away: read so, it would excuse a row's 2 %."""

    def grown(w, x):
        return jnp.cumprod(1 + x * jnp.asarray(0.05, x.dtype), 0) @ w

    weights = values(32, 32, dtype=jnp.bfloat16, scale=0.2)
    made = Program(grown, weights, {"a": (values(128, 32, dtype=jnp.bfloat16),)})
    opened = trace_program(made, tmp_path / "run")
    result = opened.record.points[-1].name
    compare_program(altered(opened, result), made)
    failed = {(v.point, v.kind) for v in gate(opened.folder).verdicts if v.status == "fail"}
    assert (result, "local") in failed


@pytest.mark.parametrize("function", [jax.lax.lgamma, jax.lax.digamma, jax.lax.erf_inv], ids=lambda f: f.__name__)
def test_a_formula_of_the_platforms_own_is_drawn_as_it_is_there(function):
    x = abs(values(256, dtype=jnp.float32, scale=0.2)) + 0.2

    def tapped(x):
        return checkpoint_name(function(x), "y")

    with jax.enable_x64(True):
        like = {"y": np.zeros(256)}
        drawn = np.asarray(emulate_segments(tapped, Realisation(sums="single"))(like, x)["y"][0])
        exact = np.asarray(exactly(tapped)(like, x)["y"])
    stored = np.asarray(jax.jit(tapped)(x), np.float64)
    off = np.linalg.norm(stored - exact)
    assert np.linalg.norm(stored - drawn) < 0.5 * off
    assert off > np.linalg.norm(exact.astype(np.float32) - exact)


def test_a_reducer_of_two_operations_is_lifted_in_every_draw():
    """A sum that is no single operation, under draws of a seed that the compiled program is given."""
    x = values(64, 8, dtype=jnp.bfloat16)

    def call(x):
        return lax.reduce_window(x, jnp.asarray(0, x.dtype), lambda a, b: a + b * 2, (8, 1), (8, 1), "VALID")

    with jax.enable_x64(True):
        run = jax.jit(emulate_program(jax.make_jaxpr(call)(x), Realisation("converted", sums="single")))
        (made,) = run(np.uint64(1), x)
    rows = np.asarray(x, np.float64).reshape(8, 8, 8)
    assert np.allclose(made, 2 * rows.sum(1), rtol=2.0**-7, atol=2.0**-7 * np.abs(rows).max())


NARROW_SUMS = {
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cumprod": lambda x: jnp.cumprod(1 + x / 16, 0),
    "scatter-add": lambda x: jnp.zeros((3, x.shape[1]), x.dtype).at[jnp.arange(len(x)) % 3].add(x),
    "reduce_window": lambda x: lax.reduce_window(x, jnp.asarray(0, x.dtype), lax.add, (16, 1), (16, 1), "VALID"),
    "reduce": lambda x: lax.reduce(x[:16], jnp.asarray(0, x.dtype), lax.mul, (0,)),
}


@pytest.mark.parametrize("name", NARROW_SUMS)
def test_what_adds_up_in_a_narrow_format_is_made_as_the_machine_makes_it(name):
    x = values(64, 8, dtype=jnp.bfloat16)

    def tapped(x):
        return checkpoint_name(NARROW_SUMS[name](x), "total")

    with jax.enable_x64(True):
        shape = np.zeros(jax.eval_shape(tapped, x).shape)
        own = emulate_segments(tapped, Realisation(sums="own"))({"total": shape}, x)["total"][0]
        once = emulate_segments(tapped, Realisation())({"total": shape}, x)["total"][0]
    stored = np.asarray(jax.jit(tapped)(x), np.float64)
    assert np.array_equal(np.asarray(own), stored)
    assert not np.array_equal(np.asarray(once), stored) or name == "reduce"


def converted(factor, x):
    """The gradient of a loss in float32."""
    return jax.grad(lambda s: jnp.sum((x * s.astype(x.dtype)).astype(jnp.float32) ** 2))(factor)


def unconverted(factor, x):
    """A gradient without any conversion, of which a compiler could leave a rounding out."""
    return jax.vjp(lambda s: x * s, factor.astype(x.dtype))[1](x)[0]


@pytest.mark.parametrize(
    ("call", "dtype"), [(converted, "float16"), (converted, "bfloat16"), (unconverted, "bfloat16")]
)
def test_the_gradient_of_a_factor_is_summed_in_its_format_in_the_whole_program_too(call, dtype, tmp_path):
    """The gradient of a broadcast adds 2,304 terms in the format of the values, percents off; the program says so."""
    factor = jnp.asarray(2, jnp.float32 if call is converted else dtype)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((48, 48)), dtype)  # whichever tests ran before
    made = Program(call, factor, {"a": (x,)}, outputs="slope")
    opened = trace_program(made, tmp_path / "run")
    found = compare_program(opened, made)
    assert max(float(e.rel_l2) for e in found if e.kind == "forward") > 2e-3
    assert gate(opened.folder).counts == {"pass": len(found)}


@pytest.mark.parametrize("sums", ["single", "reversed", "shuffled"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_in_another_order_is_the_same_one(sums, groups):
    x, kernel = values(2, 16, 20), values(8, 16 // groups, 3)

    def tapped(x):
        return checkpoint_name(lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=groups), "y")

    with jax.enable_x64(True):
        like = {"y": np.zeros((2, 8, 20))}
        made = emulate_segments(tapped, Realisation(seed=3, sums=sums))(like, x)["y"][0]
        exact = exactly(tapped)(like, x)["y"]
        plain = emulate_segments(tapped, Realisation(seed=3, sums="single"))(like, x)["y"][0]
    off = np.abs(np.asarray(made) - np.asarray(exact)) / np.abs(exact).max()
    assert 0 < off.max() < 1e-6
    assert np.array_equal(made, plain) is (sums == "single")


def test_whole_numbers_stay_whole_in_every_realisation():
    x = values(64, scale=9.0)

    def tapped(x):
        return checkpoint_name(jnp.round(x).astype(jnp.int8).astype(jnp.float32), "y")

    with jax.enable_x64(True):
        made = emulate_segments(tapped, Realisation(seed=1, sums="single"))({"y": np.zeros(64)}, x)["y"][1]
    assert np.allclose(made, np.round(x), rtol=1e-6, atol=0)


@pytest.mark.turn  # 3 s
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rounding_that_is_meant_is_made_again(dtype, tmp_path):
    """``reduce_precision`` to fewer bits than the format has; a compiler keeps it, and so do all emulations."""

    def call(weights, x):
        y = x @ weights
        few, brief = lax.reduce_precision(y, 5, 4), lax.reduce_precision(jnp.tanh(y).astype(jnp.float32), 8, 7)
        return few.astype(jnp.float32) @ weights.astype(jnp.float32), brief @ weights.astype(jnp.float32)

    made = Program(
        call, values(WIDTH, WIDTH, dtype=dtype), {"a": (values(ROWS, WIDTH, dtype=dtype),)}, outputs=("few", "brief")
    )
    opened = trace_program(made, tmp_path / "run")
    found = compare_program(opened, made)
    assert gate(opened.folder).counts == {"pass": len(found)}
    result = opened.record.points[-1].name
    compare_program(altered(opened, result), made)
    assert result in {v.point for v in gate(opened.folder).verdicts if v.status == "fail"}


def test_a_rounding_that_is_meant_is_drawn_on_other_grids():
    """Else draws would leave its noise out; each is within a unit roundoff of four bits, on a grid of its own."""
    x = values(64)

    def drawn(seed):
        tapped = lambda x: checkpoint_name(lax.reduce_precision(x, 8, 4), "y")  # noqa: E731
        with jax.enable_x64(True):
            return np.asarray(emulate_segments(tapped, Realisation(seed=seed))({"y": np.zeros(64)}, x)["y"][1])

    made = [drawn(seed) for seed in range(3)]
    assert made[0].tolist() == np.asarray(lax.reduce_precision(x, 8, 4), np.float64).tolist()
    for other in made[1:]:
        assert (np.abs(other / made[0] - 1) > 1e-3).mean() > 0.5
    assert all((np.abs(y / x - 1) <= 2.0**-5 * 1.001).all() for y in made)


@pytest.mark.parametrize("how", [Realisation(), Realisation(seed=1), Realisation("all", seed=2, sums="shuffled")])
def test_integers_are_no_floats_in_any_realisation(how):
    """Quotients, powers and orders of integers are what they are; what they choose of floats is made."""

    def call(x, i):
        j = (i // 3) ** 2 % 7 + lax.population_count(i) + (-i // 2) * 2
        order = jnp.argsort(j, stable=True)
        return checkpoint_name(jnp.tanh(x)[order % 5, order // 5], "picked"), j

    x, i = values(5, 5), jnp.arange(20, dtype=jnp.int32)
    with jax.enable_x64(True):
        made = jax.jit(emulate_segments(call, how))({"picked": np.zeros(20, np.float32)}, x, i)
    np.testing.assert_allclose(made["picked"][0], call(x, i)[0], rtol=1e-6)


@pytest.mark.parametrize("unrounded", ["none", "converted", "unshared", "all"])
def test_float8_is_rounded_whatever_a_compiler_leaves_out(unrounded):
    x = values(64)

    def tapped(x):
        return checkpoint_name(x.astype(jnp.float8_e4m3fn).astype(jnp.float32), "y")

    with jax.enable_x64(True):
        made = emulate_segments(tapped, Realisation(unrounded))({"y": np.zeros(64)}, x)["y"][0]
    assert np.array_equal(made, np.asarray(x.astype(jnp.float8_e4m3fn), np.float64))


def test_float8_is_read_as_recorded(tmp_path):
    """What is 6 % from a recorded float8 value is no value that a compiler hands on."""

    def call(p, x):
        return checkpoint_name(x.astype(jnp.float8_e4m3fn), "narrow").astype(jnp.float32) @ p

    made = Program(call, values(8, 8), {"a": (values(4, 8),)})
    opened = trace_program(made, tmp_path / "run")
    assert Tapped(prepare_program(made), None).narrow(opened.tensors("a", 0, "taps")) == []


def test_a_product_of_complex_numbers_rounds_its_parts_products():
    """(a + bi)(c + di) where ac and bd cancel: float32 keeps the difference of two rounded products."""
    a = np.float32(1 + 2**-12)
    x, y = np.complex64(complex(a, a)), np.complex64(complex(a, np.nextafter(a, np.float32(2))))

    def tapped(x, y):
        return checkpoint_name((x * y).real, "y")

    with jax.enable_x64(True):
        made = emulate_segments(tapped, Realisation())({"y": np.zeros(())}, x, y)["y"][0]
    assert float(made) == float(np.float32(x.real * y.real) - np.float32(x.imag * y.imag))


@pytest.mark.turn  # 4 s
def test_arrays_of_64_bits_are_those_that_the_program_reads(tmp_path):
    """NumPy makes float64 and int64; JAX reads float32 and int32, and so does the reference."""
    table, ids = DRAW.standard_normal((40, 8)), DRAW.integers(-40, 40, 12)

    def looked_up(table, ids, x):
        return jnp.tanh(table[jnp.where(ids < 0, ids + 40, ids)] * x) @ table.T, ids + 1

    def advance(inputs, out):
        return np.asarray(out[1], np.int64) % 40, np.asarray(inputs[1], np.float64)

    cases = {"a": (ids, DRAW.standard_normal(8))}
    made = Program(looked_up, table, cases, steps=1, advance=advance, outputs=("y", "ids"))
    assert made.params.dtype == np.float32
    assert [x.dtype.name for x in made.cases["a"]] == ["int32", "float32"]
    before = made.inputs({"0": ids, "1": np.ones(8)})  # as runs of before hold them
    assert [x.dtype.name for x in before] == ["int32", "float32"]
    opened = trace_program(made, tmp_path / "run")
    inputs = opened.tensors("a", 1, "inputs")
    assert [inputs[i].dtype.name for i in "01"] == ["int32", "float32"]
    found = compare_program(opened, made)
    assert gate(opened.folder).counts == {"pass": len(found)}
    operand = next(e for e in found if e.kind == "local")
    exact = np.tanh(np.float64(made.params)[ids] * np.float64(made.cases["a"][1]))
    stored = np.float64(opened.tensors("a", 0, "taps")[operand.point])
    assert float(operand.rel_l2) == pytest.approx(np.linalg.norm(stored - exact) / np.linalg.norm(exact), rel=1e-6)


def quantised(p, v):
    """float8 and back: what is meant is rounded, and no compiler leaves it out."""
    scale = jnp.max(jnp.abs(v)).astype(jnp.float32) / 448
    narrow = (v.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn)
    return (jnp.dot(narrow.astype(v.dtype), p, preferred_element_type=jnp.float32) * scale).astype(v.dtype)


def without_elements(p, v):
    jax.debug.print("no value of a program: {}", v[0, 0])
    return v @ p, v[:0] @ p, lax.scan(lambda c, _z: (jnp.tanh(c @ p), c @ p), v, jnp.zeros((0, 3), v.dtype))[0] @ p


def narrow_square(_p, v):
    """A square in float16 whose inverse shows how it was rounded; XLA:CPU rounds it, where it would not bfloat16."""
    return jnp.linalg.inv((v.T @ v).astype(jnp.float32) / ROWS + jnp.eye(WIDTH))


@pytest.mark.parametrize(
    ("call", "dtype"), [(quantised, jnp.bfloat16), (without_elements, jnp.bfloat16), (narrow_square, jnp.float16)]
)
def test_what_is_rounded_on_purpose_or_holds_nothing_is_judged_by_what_is_declared(call, dtype, tmp_path):
    weights = values(WIDTH, WIDTH, dtype=dtype, scale=0.25)
    made = Program(call, weights, {"a": (values(ROWS, WIDTH, dtype=dtype),)})
    opened = trace_program(made, tmp_path / "run")
    found = compare_program(opened, made)
    assert gate(opened.folder).counts == {"pass": len(found)}


def test_a_tap_of_an_array_without_elements_is_refused_by_name(tmp_path):
    made = Program(lambda p, v: checkpoint_name(v[:0], "none_left") @ p, values(8, 8), {"a": (values(4, 8),)})
    with pytest.raises(UserError, match="the tap 'none_left' is of an array without elements"):
        trace_program(made, tmp_path / "run")


QUOTIENTS = {
    "constant": lambda x, *_: x / jnp.asarray(0.9, x.dtype),
    "scalar": lambda x, y, _z: x / y[0, 0],
    "column": lambda x, y, _z: x / y[:, :1],
    "row": lambda x, y, _z: x / y[0],
    "argument": lambda x, _y, z: x / z,
    "repeated": lambda x, _y, z: x / jnp.broadcast_to(z, x.shape),
    "elements": lambda x, y, _z: x / y,
    "inverse": lambda _x, y, _z: 1 / y,
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_quotients_are_those_of_the_machine(dtype):
    """XLA multiplies by the inverse of what is smaller, rounded, but in bfloat16; bit for bit.

    Each in a program of its own: a repeated divisor that several read, XLA divides by.
    """
    x, y = values(32, 32, dtype=jnp.dtype(dtype)), 1 + abs(values(32, 32, dtype=jnp.dtype(dtype)))
    z = 1 + abs(values(32, dtype=jnp.dtype(dtype)))

    def apart(quotient):
        def tapped(x, y, z):
            return checkpoint_name(quotient(x, y, z), "y")

        stored = np.asarray(jax.jit(tapped)(x, y, z), np.float64)
        with jax.enable_x64(True):
            made = emulate_segments(tapped, Realisation())({"y": np.zeros((32, 32))}, x, y, z)["y"][0]
        return int(np.sum(np.asarray(made) != stored))

    assert {k: apart(f) for k, f in QUOTIENTS.items()} == dict.fromkeys(QUOTIENTS, 0)


def test_a_program_that_traces_and_does_not_run_is_said_with_its_line(tmp_path):
    """A CPU does not take this precision of a product, and says so when it compiles."""

    def call(p, x):
        return lax.dot_general(x, p, (((1,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.F16_F16_F32)

    made = Program(call, values(8, 8, dtype=jnp.float16), {"a": (values(4, 8, dtype=jnp.float16),)})
    with pytest.raises(UserError, match=r"a, call 0: the program does not run: ValueError: .*F16_F16_F32") as said:
        trace_program(made, tmp_path / "run")
    assert "test_program_operations.py:" in str(said.value)

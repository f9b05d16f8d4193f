"""Assertions in other projects' tests: faults fire, honest rounding does not, and the plugin works where it is used."""

import os
import re
import shutil
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import precaudit
from precaudit import assert_close, assert_within_budget
from precaudit.numbers.arrays import as_format
from precaudit.schema.policies import Policy
from precaudit.schema.records.errors import StateError
from precaudit.schema.records.lines import encode
from tests.helpers.paths import ROOT

BF16 = ml_dtypes.bfloat16
HALF = Policy(name="fp16", activations="float16")
POLICIES = {"bfloat16": "bf16", "float16": HALF, "float32": "fp32"}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def one_nan(c):
    c[17, 3] = np.nan


def one_infinity(c):
    c[17, 3] = np.inf


def token_zeroed(c):
    c[17] = 0


def token_halved(c):
    c[17] *= BF16(0.5)


def element_times_1000(c):
    c[17, 3] *= BF16(1000)


def scaled_up(c):
    c[:] = (c.astype(np.float32) * 1.02).astype(BF16)


def scaled_down(c):
    c[:] = (c.astype(np.float32) * 0.98).astype(BF16)


def tokens_swapped(c):
    c[[17, 18]] = c[[18, 17]]


FAULTS = {
    one_nan: "nonfinite: kernel [local] 1 element is NaN", one_infinity: "nonfinite: kernel [local] 1 element is",
    token_zeroed: "worst element [17, ", token_halved: "worst element [17, ", element_times_1000: "element [17, 3]",
    scaled_up: " gain ", scaled_down: " gain ", tokens_swapped: "worst element [1",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("stored_wider", [False, True])
@pytest.mark.parametrize("shape", [(256, 512), (2000, 64)])
def test_faults_fire(fault, stored_wider, shape):
    r = normal(0, *shape)
    c = as_format(r, "bfloat16")
    fault(c)
    with pytest.raises(AssertionError) as caught:
        assert_close(c.astype(np.float32) if stored_wider else c, r, name="kernel")
    assert FAULTS[fault] in str(caught.value)


@pytest.mark.parametrize("form", POLICIES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_faults_fire_against_a_function(fault, form):
    x, w = (as_format(y, form) for y in (normal(0, 256, 64), normal(1, 64, 512)))
    c = honest(x, w, form).astype(BF16)
    fault(c)
    whole = c.astype(form) if form != "float32" else faulty(fault, x, w)
    with pytest.raises(AssertionError):
        assert_close(whole, np.matmul, inputs=[x, w], policy=POLICIES[form])


def faulty(fault, x, w):
    """The same fault in float32, where the one made in bfloat16 would be lost in rounding."""
    c = np.float32(x) @ np.float32(w)
    before = np.ones(c.shape, BF16)
    after = before.copy()
    fault(after)
    if fault is tokens_swapped:
        c[[17, 18]] = c[[18, 17]]
        return c
    return c * after.astype(np.float32)


def honest(x, w, form):
    return (x.astype(np.float32) @ w.astype(np.float32)).astype(form)


@pytest.mark.parametrize("shape", [(), (7,), (1, 96), (96, 1), (64, 33), (12, 3, 16), (2, 6, 3, 16)])
@pytest.mark.parametrize("form", POLICIES)
def test_rounding_once_passes(form, shape):
    for seed in range(50):
        r = normal(seed, *shape)
        c = as_format(r, form).reshape(shape)
        assert_close(c, r, policy=POLICIES[form])
        assert_close(c.astype(np.float32), r, policy=POLICIES[form])


@pytest.mark.parametrize("shape", [(1, 300, 5), (40, 96, 24), (9, 700, 8), (64, 8, 1)])
@pytest.mark.parametrize("form", POLICIES)
def test_sums_in_float32_pass(form, shape):
    rows, inner, columns = shape
    for seed in range(50):
        x = as_format(normal(seed, rows, inner), form)
        w = as_format(normal(seed + 1000, inner, columns), form)
        assert_close(honest(x, w, form), np.matmul, inputs=[x, w], policy=POLICIES[form])


def test_jax_arrays_and_integer_inputs():
    x, w, ids = jnp.asarray(normal(0, 10, 16), BF16), jnp.asarray(normal(1, 16, 8), BF16), jnp.arange(4)
    out = jnp.matmul(x[ids], w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    assert_close(out, lambda ids, x, w: x[ids] @ w, inputs=[ids, x, w])
    with pytest.raises(AssertionError, match=r"^fail: the relative error of candidate "):
        assert_close(out * 2, lambda ids, x, w: x[ids] @ w, inputs=[ids, x, w])


def test_equal_infinities_agree_and_nan_never_does():
    r = normal(0, 4, 8)
    r[1, 2] = -np.inf
    assert_close(as_format(r, "bfloat16"), r)
    r[1, 2] = np.nan
    with pytest.raises(AssertionError, match=r"nonfinite.*worst element \[1, 2\]: NaN, reference NaN"):
        assert_close(as_format(r, "bfloat16"), r)


@pytest.mark.parametrize("saturated", [np.inf, 65504])
def test_what_overflows_the_format_is_no_noise(saturated):
    r = normal(0, 16, 64)
    c = r.astype(np.float16)
    r[3, 5], c[3, 5] = 1e6, saturated
    with pytest.raises(AssertionError):
        assert_close(c, r)
    with pytest.raises(AssertionError):
        assert_close(c, lambda x: x, inputs=[r])


def test_shapes_and_empty_comparisons():
    r = normal(0, 4, 8)
    with pytest.raises(AssertionError, match=r"kernel has shape \[4, 8\], the reference \[8, 4\]"):
        assert_close(as_format(r, "bfloat16"), r.T, name="kernel")
    with pytest.raises(AssertionError, match="asserts nothing"):
        assert_close(as_format(r[:0], "bfloat16"), r[:0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones(3), np.matmul), "needs inputs"),
        ((np.ones(3), np.ones(3), [np.ones(3)]), "this one is an array"),
        ((np.ones(3), np.ones(3, np.float32)), "float64"),
        ((np.ones(3, int), np.ones(3)), "int64"),
        ((np.ones(3), np.abs, [np.array(["a"])]), "an input is"),
    ],
)
def test_what_cannot_be_compared_is_a_type_error(arguments, words):
    candidate, reference, *inputs = arguments
    with pytest.raises(TypeError, match=words):
        assert_close(candidate, reference, inputs=inputs[0] if inputs else None)


# What a kernel's author is told


def head_scaled(c):
    c[:, 3] *= 1.02


def token_lost(c):
    c[17] = 0


def heads_exchanged(c):
    c[:, [3, 4]] = c[:, [4, 3]]


def told(*arguments, **options):
    """Return the lines that an assertion fails with, each checked to be short."""
    with pytest.raises(AssertionError) as caught:
        assert_close(*arguments, name="kernel", **options)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 160
    for number in re.findall(r"(?<![\d,.])\d+\.\d+", str(caught.value)):
        assert len(number.replace(".", "").lstrip("0")) <= 3, number
    return lines


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (head_scaled, ["2,048 of 16,384 (12.5 %)", "100 % of it in head 3 (axis 1, of 8)", "+2 % in head 3",
                       "head 3 (axis 1, of 8) is times 1.02 (100 % of the error; the rest is rounding)"]),
        (token_lost, ["256 of 16,384 (1.56 %)", "in token 17 (axis 0, of 64)", "-100 % in token 17",
                      "token 17 (axis 0, of 64) is zero"]),
        (heads_exchanged, ["in heads 3, 4 (axis 1, of 8)", "explained by: none that was tried"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_a_failure_names_size_slice_scale_and_cause(fault, words):
    r = normal(0, 64, 8, 32)
    c = r.copy()
    fault(c)
    text = "\n".join(told(as_format(c, "bfloat16"), r))
    for word in words:
        assert word in text
    assert "rounding to bfloat16 alone gives 0.00167" in text  # √(1/3 · mean over a binade of u²) ≈ 0.43 u


def test_a_failure_names_axes_as_the_author_does():
    r = normal(0, 2, 16, 8, 32)
    c = r.copy()
    c[:, :, 5] *= 1.02
    assert "in kv 5 (axis 2, of 8)" in "\n".join(
        told(as_format(c, "bfloat16"), r, axes=("batch", "query", "kv", "dim"))
    )
    assert "in head 5 (axis 2, of 8)" in "\n".join(told(as_format(c, "bfloat16"), r))
    with pytest.raises(TypeError, match="axes names 2 axes, the candidate has 4"):
        assert_close(as_format(r, "bfloat16"), r, axes=("a", "b"))


def test_a_failure_names_where_nan_is():
    r = normal(0, 64, 8, 32)
    c = as_format(r, "bfloat16")
    c[5, 3, 7] = np.nan
    first, where = told(c, r)
    assert first.startswith("nonfinite: kernel [local] 1 element is NaN or infinite; worst element [5, 3, 7]: NaN")
    assert all(word in where for word in ("token 5 (axis 0", "head 3 (axis 1", "channel 7 (axis 2"))


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_failure_names_a_narrow_accumulator(form, transposed):
    x, w = as_format(normal(0, 32, 300), "bfloat16"), as_format(normal(1, 300, 24), "bfloat16")
    total = np.zeros((32, 24))
    for i in range(300):
        product = as_format(np.outer(np.float64(x[:, i]), np.float64(w[i])), form)
        total = np.float64(as_format(total + np.float64(product), form))
    c = as_format(total, "bfloat16")
    given = (lambda a, b: a @ b.T, [x, np.ascontiguousarray(w.T)]) if transposed else (np.matmul, [x, w])
    lines = told(c, given[0], inputs=given[1])
    assert lines[-1].startswith(f"explained by: sums in {form} (")
    assert "the rest is rounding" in lines[-1]
    assert_close(honest(x, w, "bfloat16"), given[0], inputs=given[1])


def test_a_failure_names_formats_and_cut_digits():
    r = normal(0, 64, 128)
    assert (
        "explained by: rounding to float8_e4m3fn" in told(as_format(as_format(r, "float8_e4m3fn"), "bfloat16"), r)[-1]
    )
    cut = (r.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(BF16)
    lines = told(cut, r)
    assert "explained by: digits truncated, not rounded" in lines[-1]
    assert "elements: no single error is beyond rounding" in lines[2]


def record(point, **fields):
    return StateError(
        prompt="p", phase="decode", step=0, layer=1, point=point, candidate="run", reference="state",
        **fields,
    )  # fmt: skip


@pytest.fixture
def errors(tmp_path):
    """Return the function that writes a file of error records."""

    def write(*records):
        path = tmp_path / "errors.jsonl"
        path.write_bytes(b"".join(encode(r) for r in records))
        return path

    return write


def test_only_what_passes_is_within_budget(errors):
    assert_within_budget(errors(record("k_cache", mismatched=0)))
    for bad, words in (
        ({"mismatched": 3}, "fail: layer 1 k_cache"), ({"missing": "lost"}, "missing"), ({"unknown": "x"}, "unknown"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            assert_within_budget(str(errors(record("k_cache", **bad))))
    with pytest.raises(AssertionError, match="nothing was judged"):
        assert_within_budget(errors())


def test_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, precaudit.workflows.pytest_plugin\n"
        "assert not {'numpy', 'jax', 'pandas', 'numba', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def inner(folder, *arguments, python=sys.executable, **environment):
    """Run pytest in a project of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | environment
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def test_the_option_names_the_fixture_s_budgets(errors, tmp_path):
    errors(record("k_cache", unknown="inputs were not recorded"), record("v_cache", mismatched=0))
    (tmp_path / "tests").mkdir()
    (tmp_path / "budgets.toml").write_text(
        '[[budget]]\npoints = "k_cache"\nkind = "state"\nunknown = "allow"\nwhy = "not ours"\n'
    )
    (tmp_path / "tests" / "test_it.py").write_text("def test_it(precaudit_gate):\n    precaudit_gate('errors.jsonl')\n")
    plugin = ("-p", "precaudit.workflows.pytest_plugin")
    without = inner(tmp_path, *plugin, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert without.returncode == 1, without.stdout + without.stderr
    assert "unknown: layer 1 k_cache" in without.stdout
    assert "assertions.py" not in without.stdout
    found = inner(tmp_path, *plugin, "--precaudit-budgets", "budgets.toml", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert found.returncode == 0, found.stdout + found.stderr


PROJECT = """
import numpy as np
import precaudit

def product(a, b):
    return a @ b

def inputs():
    random = np.random.default_rng(0)
    return [random.standard_normal(s).astype(np.float32) for s in ((32, 64), (64, 16))]

def test_honest(precaudit_gate):
    a, b = inputs()
    precaudit.assert_close(a @ b, product, inputs=[a, b], policy="fp32", name="product")
    precaudit_gate("errors.jsonl")

def test_wrong():
    a, b = inputs()
    c = a @ b
    c[5] *= 1.001
    precaudit.assert_close(c, product, inputs=[a, b], policy="fp32", name="product")
"""


@pytest.mark.slow
def test_a_project_of_its_own(errors, tmp_path):
    source = tmp_path / "source"  # building leaves files beside what is built
    shutil.copytree(ROOT / "precaudit", source / "precaudit", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "docs").mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "docs/description.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", source, "pytest"]
    subprocess.run(install, check=True, cwd=tmp_path)
    shutil.rmtree(source)
    errors(record("k_cache", mismatched=0))
    (tmp_path / "test_product.py").write_text(PROJECT)
    found = inner(tmp_path, python=python)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "1 failed, 1 passed" in found.stdout
    assert "AssertionError: fail: product [local] excess" in found.stdout
    assert "token 5" in found.stdout
    assert "assertions.py" not in found.stdout  # the frames shown are the project's own
    assert precaudit.__file__ not in found.stdout

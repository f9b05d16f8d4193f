"""Kernels that others maintain: against FP64 written in NumPy, compiled for TPUs, listed, and what gradcheck finds."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.experimental import pallas as pl

from precaudit.checks import kernels
from precaudit.checks.gradients.check import gradcheck
from precaudit.checks.gradients.shipped import shipped_checks
from precaudit.checks.gradients.subjects import import_kernel
from precaudit.checks.kernels import flash, paged, sdpa, splash
from precaudit.checks.kernels.attention import NO_KEY, float32_attention
from precaudit.errors import UserError
from precaudit.interpreters.tpu.target import compile_for, parse_target
from tests.helpers.tpus import needs_libtpu

pytestmark = pytest.mark.usefixtures("promoting")
OFF = {"float32": 2e-6, "bfloat16": 4e-3}  # of the norm; a rounding to bfloat16 is 1.7e-3 of it


@pytest.fixture
def promoting():
    """JAX's own kernels mix formats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def exactly(q, k, v, seen, scale, g=None):
    """Attention of one head [T, D] and, for a cotangent, its derivatives in FP64, rows without keys 0."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    p = np.where(seen, np.exp(scale * q @ k.T), 0.0)
    p /= np.maximum(p.sum(1, keepdims=True), 1e-300)
    if g is None:
        return p @ v
    g = np.asarray(g).astype(np.float64)
    ds = scale * p * (g @ v.T - (g * (p @ v)).sum(1, keepdims=True))
    return p @ v, ds @ k, ds.T @ q, p.T @ g


def off(found, exact):
    return np.linalg.norm(np.asarray(found).astype(np.float64) - exact) / np.linalg.norm(exact)


def head(module, x):
    """The first head [T, D] of what a module takes or gives."""
    return {flash: lambda: x[0, 0], splash: lambda: x[0], sdpa: lambda: x[0, :, 0]}[module]()


@pytest.mark.parametrize("dtype", OFF)
@pytest.mark.parametrize("module", [flash, splash, sdpa], ids=lambda m: m.__name__.rpartition(".")[2])
def test_outputs_and_gradients_are_the_formulas(module, dtype):
    given = module.inputs(0, dtype)[""]
    g = jnp.asarray(np.random.default_rng(1).standard_normal(given[0].shape), dtype)
    causal = np.tri(head(module, given[0]).shape[0], dtype=bool)
    seen = causal & np.asarray(given[3])[0] if module is sdpa else causal & np.equal.outer(*[np.ravel(given[3])] * 2)
    scale = 1.0 if module is splash else 0.25
    exact = exactly(*(head(module, x) for x in given[:3]), seen, scale, head(module, g))
    for side in (module.kernel, module.reference):

        def run(*x, side=side):
            out, pull = jax.vjp(lambda *y: side(*y, *x[3:]), *x[:3])
            return out, *pull(g)

        errors = [off(head(module, x), e) for x, e in zip(jax.jit(run)(*given), exact, strict=True)]
        assert max(errors) < OFF[dtype], (side, errors)


@pytest.mark.turn  # 4 s
def test_pages_are_what_the_indices_say():
    q, k, v, lengths, where = paged.inputs(0, "bfloat16")[""]
    found = [np.asarray(jax.jit(f)(q, k, v, lengths, where)) for f in (paged.kernel, paged.reference)]
    for b, n in enumerate(lengths):
        for h in range(8):
            keys, values = (np.concatenate([np.asarray(x)[h // 4, page] for page in where[b]])[:n] for x in (k, v))
            exact = exactly(np.asarray(q)[b, h][None], keys, values, True, 1.0)[0]
            assert max(off(x[b, h], exact) for x in found) < OFF["bfloat16"]


@pytest.mark.turn  # 4 s
def test_the_formula_gives_0_where_no_key_is_seen_and_keeps_an_unseen_nan_in():
    q = k = jnp.ones((3, 2))
    v = jnp.asarray([[1.0, 2.0], [np.nan, 4.0], [5.0, 6.0]])
    seen = np.asarray([[True, False, True], [False] * 3, [False, False, True]])
    out, pull = jax.vjp(lambda *x: float32_attention(*x, seen), q, k.at[1].set(np.nan), v)
    np.testing.assert_allclose(out, [[3, 4], [0, 0], [5, 6]])
    assert all(np.isfinite(x).all() for x in pull(jnp.ones_like(out)))
    assert np.isnan(float32_attention(q, k, v, np.ones((3, 3), bool))[:, 0]).all()


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("module", [flash, splash, paged], ids=lambda m: m.__name__.rpartition(".")[2])
def test_every_tpu_kernel_compiles_for_a_tpu(module, dtype, target):
    size = {flash: (1, 2, 512, 128), splash: (2, 512, 128), paged: (2, 16, 2, 128)}[module]
    given = module.inputs(0, dtype, size)[""]
    kernel = {flash: flash.flash_attention, splash: splash.splash_attention, paged: paged.paged_attention}[module]

    def both(*x):
        return kernel(*x), jax.vjp(lambda *y: kernel(*y, *x[3:]), *x[:3])[1](x[0])

    made = compile_for(parse_target(target), kernel if module is paged else both, given)
    assert made.text.count('custom_call_target="tpu_custom_call"') == (1 if module is paged else 4)


def test_a_check_is_a_file():
    files = Path(kernels.__path__[0]).glob("*.py")
    defining = {f.stem for f in files if "def kernel(" in f.read_text() or "\nkernel = " in f.read_text()}
    found = {s.name.rpartition(".")[2]: s for s in shipped_checks()}
    assert set(found) == defining >= {"flash", "splash", "paged", "sdpa", "tokamax", "grpo"}
    assert found["flash"].here == "interpret mode"
    assert found["sdpa"].here == "compiled for CPU"
    assert found["paged"].gradients == ()
    assert all(s.formats == ("float32", "bfloat16") for s in found.values())


def test_the_list_is_a_table_or_a_line_of_json_each():
    from precaudit.cli import cli

    text = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["gradcheck", "--list"], standalone_mode=False).output
    lines = CliRunner().invoke(cli, ["gradcheck", "--list", "--json"], standalone_mode=False).output.splitlines()
    held = [json.loads(line) for line in lines]
    assert {"precaudit.checks.kernels.flash", "precaudit.checks.kernels.tokamax"} <= {x["name"] for x in held}
    assert all(x["name"] in text and x["about"] in text for x in held)


def test_a_kernel_that_does_not_run_here_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="does not run here: Tokamax needs Python"):
        import_kernel("precaudit.checks.kernels.tokamax", None, None, None)
    told = next(s for s in shipped_checks() if s.name.endswith("tokamax"))
    assert not told.runs
    assert told.here.startswith("no: Tokamax needs")


def narrow_inside(x_ref, o_ref):
    held = x_ref[...].astype(jnp.bfloat16)
    o_ref[...] = held.astype(jnp.float32) * 3.0


def blocks(body, x):
    run = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32), interpret=True)
    return run(x)


@jax.custom_vjp
def kernel(x):
    return blocks(narrow_inside, x)


kernel.defvjp(lambda x: (kernel(x), None), lambda _, g: (3.0 * g,))
X = np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8)


def test_a_rounding_inside_a_kernel_is_named_by_its_line_and_proved_by_leaving_it_out():
    found = gradcheck(kernel, lambda x: x * 3.0, (X,), hostile=False)
    assert found.exit_code == 1
    assert "rounding explains it" in found.conclusions[0]
    assert "(narrow_inside): bfloat16[8,8] for convert_element_type in narrow_inside (100 %)" in found.conclusions[0]


def test_a_rounding_inside_does_not_excuse_another_formula():
    def wrong(x):
        return kernel(x) * 1.01

    found = gradcheck(wrong, lambda x: x * 3.0, (X,), hostile=False, argnums=())
    assert "in float32 it does not pass either: the formula differs" in found.conclusions[0]


def test_outputs_alone_are_judged_where_no_gradient_is_asked_for():
    def forward(x):
        return blocks(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 3.0), x)

    found = gradcheck(forward, lambda x: x * 3.0, (X,), hostile=False, argnums=())
    assert found.exit_code == 0
    assert {f.array for f in found.found} == {"out"}
    assert any(note.startswith("Pallas kernels run in interpret mode here") for note in found.notes)
    assert "outputs alone: no gradient was asked for" in found.notes


def test_the_command_judges_outputs_alone_and_says_so(tmp_path):
    from precaudit.cli import cli

    file = tmp_path / "thrice.py"
    file.write_text(
        "import numpy as np\n\n\ndef kernel(x):\n    return x * 3.0\n\n\nreference = kernel\n\n\n"
        "def inputs(seed):\n    return (np.ones(3, np.float32),)\n"
    )
    asked = ["gradcheck", str(file), "--argnums", "none", "--plain", "--seeds", "1"]
    found = CliRunner().invoke(cli, asked, standalone_mode=False)
    assert found.return_value == 0
    assert "note: outputs alone: no gradient was asked for" in found.output
    assert "dx" not in found.output
    with pytest.raises(UserError, match="--list"):
        CliRunner().invoke(cli, ["gradcheck"], standalone_mode=False, catch_exceptions=False)


@pytest.mark.slow  # 11 s
def test_float32_pages_are_read_as_bfloat16():
    found = gradcheck(
        paged.kernel, paged.reference, lambda seed: paged.inputs(seed), argnums=(), hostile=False, seeds=1
    )
    assert found.exit_code == 1
    assert "_maybe_dequantize" in found.conclusions[0]
    assert "rounding explains it" in found.conclusions[0]
    bad = {f.case for f in found.found if f.verdict.status != "pass"}
    assert any(NO_KEY in case for case in bad)


@pytest.mark.slow  # 40 s
def test_what_flash_attention_rounds_inside_is_named_pass_by_pass():
    def given(seed):
        return flash.inputs(seed, "bfloat16")[""]

    found = gradcheck(flash.kernel, flash.reference, given, argnums=flash.ARGNUMS, hostile=False, seeds=1)
    told = {text.split()[1]: text for text in found.conclusions}
    assert "in _flash_attention_kernel (100 %)" in told["out"]
    assert "in _flash_attention_dkv_kernel (100 %)" in told["dv"]
    assert all("rounding explains it" in told[x] for x in ("out", "dv"))
    assert all("the rest stands outside" in told[x] for x in ("dq", "dk"))

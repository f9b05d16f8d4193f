"""A program beside tensors that another framework wrote: each found by values, and where the program leaves them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import precaudit
from precaudit import Program
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.recording.programs.own import prefill_call
from precaudit.recording.tracing.subject import load
from precaudit.schema.records.base import value
from tests.helpers.fixture_runs import FAMILIES_ONCE
from tests.helpers.paths import FIXTURES

TOKENS, WIDTH, HEADS = 6, 16, 4
DRAW = np.random.default_rng(0)
WEIGHTS = {n: DRAW.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5 for n in ("q", "k", "v", "o")}
GIVEN = DRAW.standard_normal((TOKENS, WIDTH)).astype(np.float32)


def attention(params, x, scale=2.0):
    """In JAX, heads before rows."""
    q, k, v = (jnp.moveaxis((x @ params[n]).reshape(TOKENS, HEADS, -1), 1, 0) for n in "qkv")
    scores = jnp.einsum("hqc,hkc->hqk", q, k) / scale
    seen = np.tri(TOKENS, dtype=bool)
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    mixed = jnp.einsum("hqk,hkc->qhc", probs, v)
    return x + mixed.reshape(TOKENS, -1) @ params["o"]


def theirs(dtype):
    """The same by NumPy in FP64, rows before heads, rounded to a format."""
    params, x = ({n: w.astype(np.float32).astype(np.float64) for n, w in WEIGHTS.items()}, GIVEN.astype(np.float64))
    q, k, v = ((x @ params[n]).reshape(TOKENS, HEADS, -1) for n in "qkv")
    scores = np.einsum("qhc,khc->qhk", q, k)
    masked = np.where(np.tri(TOKENS, dtype=bool)[:, None], scores, -np.inf)
    probs = np.exp((masked - masked.max(-1, keepdims=True)) / 2)
    probs /= probs.sum(-1, keepdims=True)
    mixed = np.einsum("qhk,khc->qhc", probs, v).reshape(TOKENS, -1)
    every = {"attn.q": q.reshape(TOKENS, -1), "attn.k": k, "attn.scores": masked, "attn.mix": mixed}
    every |= {"attn.weights": probs, "out": x + mixed @ params["o"]}
    return {n: a.astype(dtype) for n, a in every.items()} | {"ids": np.arange(TOKENS)}


def program(**how):
    params = {n: jnp.asarray(w, jnp.float32) for n, w in WEIGHTS.items()}
    return Program(lambda p, x: attention(p, x, **how), params, {"a": (jnp.asarray(GIVEN),)}, outputs="y")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_every_tensor_of_another_framework_is_found_in_any_layout(tmp_path, dtype):
    np.savez(tmp_path / "theirs.npz", **theirs(dtype))
    found = precaudit.same(program(), tmp_path / "theirs.npz")
    (case,) = found.cases
    assert (found.exit_code, case.answer) == (0, "same")
    by_name = {t.tensor: t for t in case.tensors}
    assert set(by_name) == {"attn.q", "attn.k", "attn.scores", "attn.mix", "attn.weights", "out"}  # no integers
    assert all(t.equal for t in case.tensors)
    assert by_name["attn.weights"].value.startswith("probs")
    assert "test_dumped_values.py:" in by_name["attn.scores"].source


def test_a_formula_that_is_another_parts_at_the_first_value_that_no_tensor_is(tmp_path):
    np.savez(tmp_path / "theirs.npz", **theirs(np.float64))
    found = precaudit.same(program(scale=4.0), tmp_path / "theirs.npz")
    (case,) = found.cases
    assert (found.exit_code, case.answer) == (1, "other")
    assert {t.tensor for t in case.tensors if t.equal} == {"attn.q", "attn.k", "attn.scores"}
    (parting,) = case.partings
    assert (parting.point, parting.made_of) == ("probs", ("scores",))
    assert "test_dumped_values.py:" in parting.source


def test_what_the_program_does_not_show_is_said_where_its_output_is_theirs(tmp_path):
    held = theirs(np.float64)
    np.savez(tmp_path / "theirs.npz", **held, another=DRAW.standard_normal((TOKENS, WIDTH)))
    (case,) = precaudit.same(program(), tmp_path / "theirs.npz").cases
    assert case.answer == "same"
    assert "the other 1 are values that it does not show" in case.says


def test_a_dump_of_other_weights_or_of_nothing_is_not_known(tmp_path):
    np.savez(tmp_path / "other.npz", q=DRAW.standard_normal((TOKENS, WIDTH)))
    np.savez(tmp_path / "ids.npz", ids=np.arange(4))
    one = program()
    assert precaudit.same(one, tmp_path / "other.npz").exit_code == 3
    assert "no array of floats" in precaudit.same(one, tmp_path / "ids.npz").cases[0].says
    with pytest.raises(UserError, match="no such file or folder"):
        precaudit.same(one, tmp_path / "gone.npz")
    with pytest.raises(UserError, match="no case of the program is named 'b'"):
        precaudit.same(one, tmp_path / "other.npz", cases=["b"])


def test_what_is_no_number_is_no_value(tmp_path):
    """NaN masks nothing: all of a tensor, or one in a hundred, beside others that are found."""
    held = theirs(np.float64)
    np.savez(tmp_path / "nan.npz", all=np.full((TOKENS, WIDTH), np.nan))
    assert precaudit.same(program(), tmp_path / "nan.npz").exit_code == 3
    holed = held["attn.mix"].copy()
    holed[0, 0] = np.nan
    np.savez(
        tmp_path / "holed.npz", **{**held, "attn.mix": holed, "out": np.where(held["out"] > 0, np.nan, held["out"])}
    )
    (case,) = precaudit.same(program(), tmp_path / "holed.npz").cases
    assert (case.answer, [t.tensor for t in case.tensors if not t.finite]) == ("other", ["attn.mix", "out"])
    assert not any(t.equal for t in case.tensors if not t.finite)


def test_without_the_output_and_of_few_numbers_nothing_is_decided(tmp_path):
    held = theirs(np.float64)
    np.savez(tmp_path / "part.npz", q=held["attn.q"])
    (case,) = precaudit.same(program(), tmp_path / "part.npz").cases
    assert (case.answer, case.tensors[0].equal) == ("unknown", True)
    assert "its output is none of the 1 tensors" in case.says
    np.savez(tmp_path / "few.npz", a=held["out"][0, :2])
    assert "fewer than 8 numbers" in precaudit.same(program(), tmp_path / "few.npz").cases[0].says


def test_the_answer_says_what_the_format_of_a_dump_cannot_tell(tmp_path):
    for dtype, told in ((np.float16, " to float16's precision, 0.05"), (np.float64, "")):
        np.savez(tmp_path / "theirs.npz", **theirs(dtype))
        assert precaudit.same(program(), tmp_path / "theirs.npz").cases[0].says.startswith(f"are one formula{told}: ")


def test_calls_of_a_decode_are_the_rows_of_a_tensor(tmp_path):
    w = jnp.asarray(DRAW.standard_normal((4, 4)), jnp.float32)
    one = Program(
        lambda p, x: jnp.tanh(x @ p), w, {"a": (jnp.ones((1, 4)),)}, steps=3, advance=lambda _, y: (y,), outputs="y"
    )
    rows, x = [], np.ones(4)
    for _ in range(4):
        x = np.tanh(x @ np.asarray(w, np.float64))
        rows.append(x)
    np.savez(tmp_path / "rows.npz", states=np.stack(rows))
    (case,) = precaudit.same(replace(one), tmp_path / "rows.npz").cases
    assert (case.answer, case.tensors[0].equal) == ("same", True)


def originals(folder, family):
    """Write transformers' own hidden states and logits, by torch in float64; return the tokens they are of."""
    expected = load_file(FIXTURES / "expected" / f"{family}.safetensors")
    states = {f"model.layers.{i}.in": x for i, x in enumerate(expected["hidden"])}
    np.savez(folder / "torch.npz", **states, logits=expected["logits"])
    return expected["tokens"]


def beside_original(folder, family):
    tokens = originals(folder, family)
    port = prefill_call(load(str(FIXTURES / family), "bf16", device="cpu"), {"a": tokens})
    return precaudit.same(port, folder / "torch.npz")


ROUNDED = {"gemma2-caps", "gemma3-gqa"}  # √width is multiplied by in bfloat16
PORTS = [f for f in FAMILIES_ONCE if f not in ROUNDED]


@pytest.mark.turn  # 9 s
@pytest.mark.parametrize("family", [PORTS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in PORTS[1:])])
def test_the_decoder_is_transformers_own_modules_without_a_map(tmp_path, family):
    """Of every family: hidden states of all layers and logits, in FP64 but for tables in float32."""
    found = beside_original(tmp_path, family)
    (case,) = found.cases
    assert found.exit_code == 0
    assert all(t.equal and value(t.off) < 1e-7 for t in case.tensors)
    assert {t.value for t in case.tensors} >= {"resid_in of layer 0", "logits"}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(ROUNDED))
def test_a_port_that_rounds_gemmas_factor_is_another_formula_from_the_embedding_on(tmp_path, family):
    found = beside_original(tmp_path, family)
    (case,) = found.cases
    config = json.loads((FIXTURES / family / "config.json").read_text())
    exact = config["hidden_size"] ** 0.5
    rounded = float(np.asarray(exact, ml_dtypes.bfloat16))
    first = next(t for t in case.tensors if t.tensor == "model.layers.0.in")
    assert (found.exit_code, case.partings[0].point) == (1, "resid_in")
    assert value(first.off) == pytest.approx(abs(rounded / exact - 1), rel=1e-3)


def test_the_command_prints_what_every_tensor_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(
        "import jax.numpy as jnp\nfrom precaudit import Program\n"
        "program = Program(lambda w, x: jnp.exp(x @ w), jnp.eye(4), {'a': (jnp.ones((2, 4)),)}, outputs='y')\n"
    )
    np.savez("theirs.npz", y=np.full((2, 4), np.e))
    assert command(["same", "ours.py:program", "theirs.npz"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("✓ program and theirs.npz are one formula: each of 1 tensors is a value of the program")
    assert "theirs" in out

"""A dump of another framework beside FP64 of its weights: correct ones pass, faults are found where they are.

The other framework is a Llama in NumPy (tests/helpers/other_decoder.py), and transformers' own modules in torch.
"""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import precaudit
from precaudit import import_dump, open_run
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.recording.dumps.formats import narrowest_formats, policy_of_formats
from precaudit.recording.dumps.runs import open_imported
from precaudit.recording.runs.kinds import tag_of
from precaudit.schema.coverage import decode_steps_of
from precaudit.schema.places import Place
from precaudit.schema.policies import load_policy
from tests.helpers.fixture_runs import FAMILIES_ONCE
from tests.helpers.other_decoder import MAP, MODEL, fixture_tokens, run_decoder, write_dump
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few

BFLOAT16 = ml_dtypes.bfloat16
TOKENS = fixture_tokens()
CASES = {"a": TOKENS, "b": TOKENS[:40]}
FEW = """
tokens = "{case}/ids"
[points]
resid_out = "{case}/{call}/{i}/output"
logits = "{case}/{call}/lm_head"
"""


def imported(folder, cases=CASES, names=MAP, **how):
    path = write_dump(folder / "dump", cases, names=names, **how)
    return import_dump(folder / "dump", folder / "theirs", path).folder


def compared(folder, *more, model=MODEL):
    return command(["compare", str(folder), "--model", str(model), *more])


def first(folder):
    """The first verdict that inherits nothing."""
    return next(v for v in gate(folder).verdicts if v.status == "fail")


def test_the_other_decoder_is_transformers_own():
    expected = load_file(FIXTURES / "expected" / "llama-gqa.safetensors")["logits"]
    assert np.abs(run_decoder(TOKENS)["lm_head"] - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("how", "policy"),
    [({}, "fp32"), ({"dtype": BFLOAT16}, "bf16"), ({"dtype": BFLOAT16, "wide": True}, "bf16")],
    ids=["float32", "bfloat16", "bfloat16 in float32"],
)
def test_a_correct_dump_passes_and_every_tensor_is_judged(tmp_path, how, policy):
    folder = imported(tmp_path, **how)
    found = precaudit.compare(folder, model=str(MODEL))
    places = {Place.of(t) for t in open_imported(folder).record.tensors}
    assert {Place.of(e) for e in found.errors if e.kind == "forward"} == places
    assert {Place.of(e) for e in found.errors if e.kind == "local"} == {p for p in places if p.point != "resid_in"}
    assert all(e.numberless is None for e in found.errors)
    judged = gate(folder)
    assert (judged.exit_code, set(judged.counts)) == (0, {"pass"})
    assert open_run(folder).record.policy["name"] == policy
    assert any(n.startswith(f"policy {policy}, as the formats") for n in found.notes)


FAULTS = {
    "RoPE base": ({"base": 1e4}, "q", "RoPE base is 10000"),
    "epsilon": ({"eps": 1e-3}, "attn_norm", "epsilon is 0.001"),
}


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_its_operation(tmp_path, capsys, fault, dtype):
    how, point, _ = FAULTS[fault]
    folder = imported(tmp_path, dtype=dtype, **how)
    assert compared(folder) == 0
    assert capsys.readouterr().out.startswith(f"✗ {point} of layer 0, prefill")
    assert command(["gate", str(folder)]) == 1
    assert (first(folder).layer, first(folder).point, first(folder).kind) == (0, point, "local")


@pytest.mark.parametrize("fault", FAULTS)
def test_diagnose_names_the_fault(tmp_path, capsys, fault):
    how, _, words = FAULTS[fault]
    folder = imported(tmp_path, {"a": TOKENS}, **how)
    compared(folder)
    capsys.readouterr()
    assert command(["diagnose", str(folder)]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.turn  # 13 s
@pytest.mark.parametrize("dtype", few([np.float32, BFLOAT16], BFLOAT16))  # 8 s
@pytest.mark.parametrize("names", [MAP, FEW], ids=["all points", "the residual stream"])
def test_weights_with_one_percent_of_noise_never_pass(tmp_path, dtype, names):
    draw = np.random.default_rng(5)
    cases = {f"c{i}": draw.integers(0, 96, 48) for i in range(8)}
    for noise, code in ((0.0, 0), (0.01, 1)):
        folder = imported(tmp_path / str(code), cases, names, dtype=dtype, noise=noise)
        precaudit.compare(folder, model=str(MODEL), accum=())
        assert gate(folder).exit_code == code


def test_what_is_made_of_nothing_in_the_dump_is_judged_by_forward_errors_and_named(tmp_path):
    found = precaudit.compare(imported(tmp_path, names=FEW), model=str(MODEL))
    assert {e.kind for e in found.errors} == {"forward"}
    assert any(n.startswith("no local error in prefill of resid_out, logits") for n in found.notes)
    assert gate(found.folder).exit_code == 0


FAMILIES = ["llama-gqa", "gemma2-caps", *(f for f in FAMILIES_ONCE if f not in ("llama-gqa", "gemma2-caps"))]


@pytest.mark.parametrize("family", [*FAMILIES[:2], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[2:])])
def test_the_tensors_of_transformers_pass_in_every_family(tmp_path, family):
    """Its hidden states and logits by torch in float64, as float32.

    Gemma's factor is exact there, and said so; it and the embedding rows are rounded to float32 once, together, so that
    the stream that enters layer 0 is not bit for bit that of a program in float32.
    """
    expected = load_file(FIXTURES / "expected" / f"{family}.safetensors")
    (tmp_path / "dump").mkdir()
    gemma = family.startswith("gemma")
    held = {f"hidden/{i}": x for i, x in enumerate(expected["hidden"][:-1]) if i or not gemma} | {
        "logits": expected["logits"]
    }
    np.savez(tmp_path / "dump" / "a.npz", **{n: x.astype(np.float32) for n, x in held.items()}, ids=expected["tokens"])
    (tmp_path / "names.toml").write_text(
        'tokens = "{case}/ids"\n[points]\nresid_in = "{case}/hidden/{i}"\nlogits = "{case}/logits"\n'
    )
    (tmp_path / "exact.toml").write_text(
        "".join(f'{k} = "float32"\n' for k in ("activations", "residual", "scores", "probs", "attn_out", "mlp"))
        + 'kv_cache = "float32"\nembed_factor = "exact"\n'
    )
    folder = import_dump(tmp_path / "dump", tmp_path / "theirs", tmp_path / "names.toml").folder
    compared(folder, "--policy", str(tmp_path / "exact.toml"), model=FIXTURES / family)
    assert gate(folder).exit_code == 0
    if gemma:
        compared(folder, model=FIXTURES / family)
        assert (gate(folder).exit_code, first(folder).point) == (1, "resid_in")


@pytest.mark.turn  # 4 s
def test_decode_is_judged_after_the_prompt(tmp_path):
    """Keys that decode read are the rows that earlier calls wrote."""
    folder = imported(tmp_path, steps=3)
    found = precaudit.compare(folder, model=str(MODEL))
    run = open_run(folder)
    assert len(run.prompts["a"].tokens) == len(TOKENS) - 3
    assert list(decode_steps_of(run.record.requested)) == [1, 2, 3]
    local = {(e.phase, e.step) for e in found.errors if (e.kind, e.point) == ("local", "attn_out")}
    assert local == {("prefill", 0), ("decode", 1), ("decode", 2), ("decode", 3)}
    assert gate(folder).exit_code == 0


@pytest.mark.turn  # 4 s
def test_a_fault_in_decode_alone_is_found_there(tmp_path):
    def change(name, x):
        return x * np.float32(1.01) if name == "2/1/query" else x

    folder = imported(tmp_path, steps=3, change=change)
    compared(folder)
    bad = first(folder)
    assert (bad.phase, bad.layer, bad.point) == ("decode", 1, "q")


def test_steps_that_were_not_dumped_are_not_judged(tmp_path):
    """Nor is attention, whose keys are not all there; the others are, at the positions that the step has."""
    folder = imported(tmp_path, {"a": TOKENS}, steps=3, change=lambda name, x: None if name.startswith("2/") else x)
    found = precaudit.compare(folder, model=str(MODEL))
    local = {(e.point, e.step) for e in found.errors if (e.kind, e.phase) == ("local", "decode")}
    assert {step for point, step in local if point == "q"} == {1, 3}
    assert "attn_out" not in {point for point, _ in local}
    assert any(n.startswith("no local error in decode of attn_out") for n in found.notes)
    assert gate(folder).exit_code == 0


def test_what_one_layer_lacks_is_missing(tmp_path):
    folder = imported(tmp_path, {"a": TOKENS}, change=lambda name, x: None if name == "0/1/query" else x)
    compared(folder)
    judged = gate(folder)
    assert judged.exit_code == 3
    assert ("missing", 1, "q") in {(v.status, v.layer, v.point) for v in judged.verdicts}


def test_a_case_without_tokens_is_missing_and_a_dump_without_any_is_refused(tmp_path, capsys):
    folder = imported(tmp_path)
    manifest = folder / "run.json"
    held = json.loads(manifest.read_text())
    del held["tokens"]["b"]
    manifest.write_text(json.dumps(held))
    assert compared(folder) == 0
    assert "not judged: b (the dump does not say which tokens it was fed" in capsys.readouterr().out
    judged = gate(folder)
    assert (judged.exit_code, judged.verdicts[0].prompt, judged.verdicts[0].status) == (3, "b", "missing")
    manifest.write_text(json.dumps(held | {"tokens": {}}))
    assert compared(folder) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "tokens = NAME" in told[0]


def test_a_dump_of_other_sizes_is_refused_in_a_line(tmp_path, capsys):
    folder = imported(tmp_path)
    assert compared(folder, model=FIXTURES / "llama-mqa") == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "it is of another model, or its axes are in another order" in told
    assert tag_of(folder) == "dump"
    assert compared(folder, "--policy", "bf17") == 2
    assert "unknown policy 'bf17'" in capsys.readouterr().err
    assert command(["compare", str(folder), "--policy", "bf16"]) == 2
    assert "together with --model" in capsys.readouterr().err


def test_numbers_of_no_policy_ask_for_one(tmp_path, capsys):
    for dtype, words in ((np.float64, "float64 numbers"), (np.float16, "numbers are float16")):

        def change(name, x, dtype=dtype):
            return x if name == "ids" else (x.astype(np.float64) * (1 + 2.0**-40)).astype(dtype)

        folder = imported(tmp_path / np.dtype(dtype).name, {"a": TOKENS}, change=change)
        assert compared(folder) == 2
        told = capsys.readouterr().err
        assert words in told
        assert "--policy NAME|FILE" in told


def test_the_policy_is_of_the_narrowest_formats_that_hold_the_numbers():
    one = np.asarray([1.0, 2.0**-3], np.float32)
    third = np.asarray([1 / 3], np.float32)
    formats = narrowest_formats([("q", one), ("mlp_out", one), ("scores", one), ("scores", third)])
    assert formats == {"activations": "bfloat16", "scores": "float32"}
    policy = policy_of_formats(formats)
    assert (policy.activations, policy.scores) == ("bfloat16", "float32")
    assert policy_of_formats({"activations": "bfloat16"}) == load_policy("bf16")
    assert policy_of_formats({"residual": "float32", "probs": "bfloat16"}).probs == "bfloat16"


def test_a_policy_that_its_formats_are_not_is_a_failure(tmp_path):
    folder = imported(tmp_path, {"a": TOKENS})
    compared(folder, "--policy", "bf16")
    assert "format float32, the policy says bfloat16" in {v.text for v in gate(folder).verdicts}


def test_products_in_tf32_are_said_by_a_policy(tmp_path):
    """Operands rounded to 11 bits, ties away from zero, as cvt.rna.tf32 does: beyond float32, and within TF32."""
    weights = load_file(MODEL / "model.safetensors")

    def change(name, x):
        _, layer, point = name.split("/") if name.count("/") == 2 else ("", "", "")
        if point != "self_attn":
            return x if point == "mix" or name == "ids" else None
        w = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].astype(np.float32)
        rows = run_decoder(TOKENS)[f"{layer}/mix"].transpose(1, 0, 2).reshape(len(x), -1)
        mantissa, exponent = np.frexp(rows)
        cut = np.copysign(np.floor(np.abs(mantissa) * 2**11 + 0.5), mantissa)
        return np.ldexp(cut / 2**11, exponent).astype(np.float32) @ w.T

    names = "\n".join(x for x in MAP.splitlines() if x.startswith(("tokens", "[points]", "attn_out", "attn_proj")))
    folder = imported(tmp_path, {"a": TOKENS}, names, change=change)
    compared(folder)
    assert (gate(folder).exit_code, first(folder).point) == (1, "attn_proj")
    fp32 = "".join(f'{k} = "float32"\n' for k in ("activations", "residual", "scores", "probs", "attn_out", "mlp"))
    (tmp_path / "tf32.toml").write_text(fp32 + 'kv_cache = "float32"\nmatmul = "TF32_TF32_F32"\n')
    compared(folder, "--policy", str(tmp_path / "tf32.toml"))
    assert gate(folder).exit_code == 0


@pytest.mark.turn  # 7 s
def test_two_runs_are_judged_once_both_are_compared_with_fp64(tmp_path, capsys):
    ours, theirs, noisy = (
        imported(tmp_path / name, dtype=BFLOAT16, noise=noise)
        for name, noise in (("ours", 0.0), ("theirs", 0.0), ("noisy", 0.01))
    )
    other = imported(tmp_path / "float32")
    between = ["compare", str(theirs), str(other)]
    assert command(between) == 0
    told = capsys.readouterr().out
    assert told.startswith("? ")
    assert f"precaudit compare {theirs} --model PATH" in told
    for folder in (ours, theirs, noisy, other):
        compared(folder)
    capsys.readouterr()
    command(between)
    assert capsys.readouterr().out.startswith("✓ ")
    command(["compare", str(noisy), str(other)])
    told = capsys.readouterr().out
    assert not told.startswith("✓")
    assert "FP64" in told


def test_a_judged_dump_is_reported_and_imported_again(tmp_path, capsys):
    folder = imported(tmp_path, {"a": TOKENS})
    compared(folder)
    assert command(["report", str(folder)]) == 0
    assert command(["compare", str(folder), "--points", "q", "--layers", "1"]) == 0
    assert "errors that were judged in what was selected" in capsys.readouterr().out
    assert "✓ rounding explains all" in (folder / "report.md").read_text()
    import_dump(tmp_path / "dump", folder, tmp_path / "dump.toml", force=True)
    with pytest.raises(UserError, match="compare it with FP64 of a model"):
        gate(folder)

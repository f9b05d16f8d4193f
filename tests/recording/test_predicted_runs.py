"""Runs predicted for a TPU: honest ones pass, faults do not, and every report says what they rest on."""

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from safetensors.numpy import load_file, save_file

import precaudit
from precaudit.cli import run as cli
from precaudit.errors import UserError
from precaudit.interpreters.tpu import target
from precaudit.interpreters.tpu.emulated import emulate_passes
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder.parts import Parts, attention_scores
from precaudit.models.numpy_decoder.honest import FLOAT32_PRODUCTS, ROUNDED_PRODUCTS, RowExecution, on_single_rows
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.recording.programs.loading import load_program as load_program
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.programs import open_program_run
from precaudit.recording.runs.reader import open_run
from precaudit.recording.tracing import predicting
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.comparison.programs import compare_program as compare_program
from precaudit.references.textbook.local import FUSED
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import load_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import LocalError
from precaudit.schema.selection import Selection
from tests.helpers.paths import EXAMPLES
from tests.helpers.runs import altered
from tests.helpers.selected import few
from tests.helpers.tpus import needs_libtpu

PROMPTS = [Prompt(id="a", prompt="def add(a, b):"), Prompt(id="b", prompt="import os\n\nclass Reader:\n    def ")]
STEPS = 3
TINY = Path(precaudit.__file__).parent / "bundled" / "tiny"


def recorded(folder, policy, device, parts=None, points="q,k,v,attn_out,logits"):
    subject = load("tiny", policy, device=device, parts=parts)
    run = trace(subject, folder / "run", PROMPTS, Selection.parse(points=points), TraceOptions(STEPS))
    return compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))


def error(found, kind="forward", point="logits"):
    """Pooled over all rows: one alone is uncertain by a factor of 2, by the order of sums."""
    sizes = [value(e.rel_l2) ** 2 for e in found.errors if (e.kind, e.point) == (kind, point)]
    return np.sqrt(np.mean(sizes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of tiny on this CPU and as predicted for a v5e, under three policies."""
    folder = tmp_path_factory.mktemp("predicted")
    return {
        (policy, device): recorded(folder / f"{policy}-{device[:3]}", policy, device)
        for policy in ("fp32", "fp32-highest", "bf16")
        for device in ("cpu", "tpu-predicted:v5e")
    }


@pytest.mark.turn  # 40 s
@needs_libtpu
@pytest.mark.parametrize("policy", ["fp32", "fp32-highest", "bf16"])
def test_an_honest_run_passes(runs, policy):
    judged = gate(runs[policy, "tpu-predicted:v5e"])
    assert judged.counts.keys() == {"pass"}, judged.verdicts[:3]
    kinds = [Counter(e.kind for e in runs[policy, device].errors) for device in ("tpu-predicted:v5e", "cpu")]
    assert kinds[0] - Counter(sums=kinds[0]["sums"]) == kinds[1] - Counter(sums=kinds[1]["sums"])
    assert min(k["sums"] for k in kinds) > 0  # of other points: a TPU fuses more, so that more is recorded whole


@needs_libtpu
@pytest.mark.parametrize("policy", few(["bf16", "bf16-fp32-scores"], "bf16"))  # 12 s
def test_every_point_of_an_honest_run_passes(tmp_path, policy):
    """A norm of decode takes its statistics from the sum before it is rounded, and its values after."""
    found = recorded(tmp_path, policy, "tpu-predicted:v5e", points="all")
    assert gate(found).counts.keys() == {"pass"}
    ways = {str(way) for e in of_kinds(found.errors, LocalError) for way in (e.elided or {}).values()}
    assert any("in its statistics" in way for way in ways)


@needs_libtpu
@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("kernel", ["sdpa", "flash"])
def test_an_attention_kernel_passes(tmp_path, kernel, policy):
    """Over two blocks of keys; fp32's products are one bfloat16 pass there, of P before it is divided too."""
    subject = load("tiny", policy, {"attention": kernel}, "tpu-predicted:v5e")
    given = [Prompt(id="c", tokens=tuple(int(t) for t in np.random.default_rng(6).integers(1, 250, 200)))]
    select = Selection.parse(points="all", phases="prefill,decode", layers="0,4")
    run = trace(subject, tmp_path / "run", given, select, TraceOptions(1))
    found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert gate(found).counts.keys() == {"pass"}
    assert [e for e in found.errors if e.kind == "local" and e.point == "attn_out"]


@pytest.mark.turn  # 66 s
@needs_libtpu
def test_float32_at_default_precision_errs_a_thousand_times_more(runs):
    cpu, tpu = (error(runs["fp32", device]) for device in ("cpu", "tpu-predicted:v5e"))
    assert tpu > 1000 * cpu


@pytest.mark.turn  # 71 s
@needs_libtpu
def test_float32_at_highest_precision_errs_as_on_a_cpu(runs):
    """The check that the compiled text is followed rightly."""
    cpu, tpu = (error(runs["fp32-highest", device]) for device in ("cpu", "tpu-predicted:v5e"))
    assert cpu / 2 < tpu < 2 * cpu


@pytest.mark.turn
@needs_libtpu
def test_six_passes_are_held_to_the_noise_of_float32(runs):
    """Emulated in parts, whose products are exact in float32, honest noise would be half of what a program makes."""
    cpu, tpu = (
        [(e.phase, e.layer, e.point, e.noise) for e in runs["fp32-highest", device].errors if e.kind == "forward"]
        for device in ("cpu", "tpu-predicted:v5e")
    )
    assert cpu == tpu
    assert sum(noise is not None for *_, noise in cpu) > 20


@needs_libtpu
def test_bfloat16_errs_as_on_a_cpu(runs):
    cpu, tpu = (error(runs["bf16", device]) for device in ("cpu", "tpu-predicted:v5e"))
    assert cpu / 3 < tpu < 3 * cpu


@needs_libtpu
def test_a_prediction_says_what_it_rests_on(runs, capsys):
    found = runs["fp32", "tpu-predicted:v5e"]
    record = open_run(found.folder).record
    assert record.device == "TPU v5e:2x2 (predicted)"
    assert device_kind(record.device) == "tpu"
    for command in (["report"], ["report", "--markdown", "-"], ["gate"]):
        assert cli([command[0], str(found.folder), *command[1:]]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "predicted: what libtpu" in out
        assert "files from real TPUs it was compared with: 0" in out


@needs_libtpu
def test_products_are_counted_without_taps_and_with_them(runs):
    """Prefill of 64 tokens makes all products in one pass, a decode step of one row most on the vector unit."""
    highest = open_run(runs["fp32-highest", "tpu-predicted:v5e"].folder).record.neutrality
    for policy, inside in (("fp32", False), ("bf16", True)):
        found = open_run(runs[policy, "tpu-predicted:v5e"].folder).record.neutrality
        assert {n.phase for n in found} == {"prefill", "decode", "rescore"}
        assert all(n.predicted.bare == n.predicted.captured and n.predicted.moved == () for n in found)
        assert all((value(n.predicted.inside) > 1e-4) == inside for n in found)
        assert all(n.predicted.bare.passes1 and not n.predicted.bare.passes6 for n in found)
    assert all(n.predicted.bare.passes6 and not n.predicted.bare.passes1 for n in highest)
    assert open_run(runs["bf16", "cpu"].folder).record.neutrality[0].predicted is None


@needs_libtpu
def test_products_that_taps_move_to_another_precision_are_unknown(runs, tmp_path):
    """What is recorded is then of another program, whatever the logits say."""
    folder = tmp_path / "run"
    shutil.copytree(runs["fp32", "tpu-predicted:v5e"].folder, folder)
    raw = json.loads((folder / "run.json").read_text())
    where = "q: bfloat16 without taps, float32 with them"
    next(n for n in raw["neutrality"] if n["phase"] == "decode")["predicted"]["moved"] = [where]
    (folder / "run.json").write_text(json.dumps(raw))
    judged = gate(compare(folder, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    (verdict,) = [v for v in judged.verdicts if v.status != "pass"]
    assert (verdict.status, verdict.kind, verdict.phase) == ("unknown", "neutrality", "decode")
    assert where in verdict.text
    assert judged.exit_code == 3


def rewritten(folder, phase, point, change):
    """Replace a recorded point of a phase, at every step and prompt, by ``change`` of what was recorded before it."""
    path, tensors = folder / "points.jsonl", folder / "tensors"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    held = {file: load_file(file) for file in tensors.rglob("*.safetensors")}

    def of(row):
        return held[folder / row["file"]][row["key"]]

    def read(row, name):
        return next(
            of(r) for r in rows if r["point"] == name and all(r[k] == row[k] for k in ("prompt", "phase", "step"))
        )

    for row in rows:
        if (row["phase"], row["point"]) == (phase, point):
            new = change(read(row, "final_norm")).astype(np.float32)
            held[folder / row["file"]][row["key"]] = new
            row["hash"] = tensor_hash(new)
    for file, arrays in held.items():
        save_file(arrays, file)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = json.loads((folder / "run.json").read_text())
    raw["hashes"][path.name] = file_hash(path)
    (folder / "run.json").write_text(json.dumps(raw))


@needs_libtpu
@pytest.mark.parametrize(
    ("phase", "parts", "expected"),
    [("prefill", 1, "pass"), ("prefill", 2, "fail"), ("prefill", 0, "fail"), ("decode", 0, "pass"),
     ("decode", 1, "fail"), ("decode", 2, "fail")],
)  # fmt: skip
def test_a_product_made_by_other_passes_than_were_compiled_fails(runs, tmp_path, phase, parts, expected):
    """Logits of prefill are one bfloat16 pass and those of a decode step are made in float32 on the vector unit."""
    folder = Path(shutil.copytree(runs["fp32", "tpu-predicted:v5e"].folder, tmp_path / "run"))
    weights = {k: np.float64(x) for k, x in load_file(TINY / "model.safetensors").items()}
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T
    rewritten(folder, phase, "logits", lambda x: parted(x, np.float32(head), parts))
    judged = gate(compare(folder, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    found = {(v.phase, v.point, v.kind, v.status) for v in judged.verdicts if v.status != "pass"}
    assert found == (set() if expected == "pass" else {(phase, "logits", "local", "fail")})


@needs_libtpu
def test_compiled_programs_say_how_each_point_is_made(runs):
    """Eight of ten products of a decode step of one sequence are made on the vector unit, of prefill's none."""
    record = open_run(runs["fp32", "tpu-predicted:v5e"].folder).record
    made = {n.phase: n.made for n in record.neutrality}
    products = {p for p, x in POINTS.items() if x.sums and x.only != "sparse"}
    assert made["prefill"] == made["rescore"] == dict.fromkeys(products, ("1 pass",))
    attention = dict.fromkeys(("scores", "attn_out"), ("1 pass",))
    assert made["decode"] == dict.fromkeys(products, ("float32",)) | attention
    assert open_run(runs["fp32", "cpu"].folder).record.neutrality[0].made == {}


@pytest.mark.turn  # 2 s
@needs_libtpu
@pytest.mark.parametrize(
    ("phase", "point", "made", "expected"),
    [
        ("decode", "q", ["1 pass"], "fail"), ("prefill", "q", ["3 passes"], "fail"),
        ("prefill", "attn_out", ["float32"], "unknown"), ("decode", "q", ["1 pass", "float32"], "unknown"),
        ("decode", "q", ["float32, one operand bfloat16"], "unknown"),
        ("decode", "q", ["float32, both operands bfloat16"], "fail"), ("decode", "q", None, "unknown"),
        ("decode", "scores", None, "unknown"),
    ],
)  # fmt: skip
def test_the_emulation_is_the_compiled_program_s(runs, tmp_path, phase, point, made, expected):
    """A claim that is not what was compiled fails; a mixture, and what was not read, is unknown."""
    folder = Path(shutil.copytree(runs["fp32", "tpu-predicted:v5e"].folder, tmp_path / "run"))
    raw = json.loads((folder / "run.json").read_text())
    for n in raw["neutrality"]:
        if n["phase"] == phase:
            n["made"] = {k: x for k, x in n["made"].items() if k != point} | ({point: made} if made else {})
    (folder / "run.json").write_text(json.dumps(raw))
    judged = gate(compare(folder, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    found = {(v.phase, v.point, v.kind, v.status) for v in judged.verdicts if v.status != "pass"}
    told = {("attn_out", "local"), ("scores", "sums")} if point == "scores" else {(point, "local")}
    assert found == {(phase, where, kind, expected) for where, kind in told}


@pytest.mark.turn  # 4 s
@needs_libtpu
def test_a_run_that_does_not_hold_what_was_compiled_is_unknown_where_it_matters(runs, tmp_path):
    """As those recorded before: products are unknown, and of six passes, as good as float32, they are not."""
    for policy, expected in (("fp32", {"pass", "unknown"}), ("fp32-highest", {"pass"}), ("bf16", {"pass"})):
        folder = Path(shutil.copytree(runs[policy, "tpu-predicted:v5e"].folder, tmp_path / policy))
        raw = json.loads((folder / "run.json").read_text())
        for n in raw["neutrality"]:
            del n["made"]
        (folder / "run.json").write_text(json.dumps(raw))
        judged = gate(compare(folder, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
        assert set(judged.counts) == expected
        open_ = {v.point for v in judged.verdicts if v.status == "unknown"}
        summed = {"scores", "attn_proj", "mlp_out"}
        assert open_ == ({"q", "k", "v", "attn_out", "logits"} | summed if policy == "fp32" else set())


@needs_libtpu
@pytest.mark.slow  # 31 s
def test_a_batch_s_own_program_tells(tmp_path):
    """Of three prompts in batches of two, decode of the last is made on the vector unit, as one sequence alone is."""
    given = [*PROMPTS, Prompt(id="c", prompt="for i in range(3):")]
    subject = load("tiny", "fp32", device="tpu-predicted:v5e")
    select = Selection.parse(points="v,logits", phases="prefill,decode", layers="1")
    run = trace(subject, tmp_path / "run", given, select, TraceOptions(1, batch=2))
    made = {n.shape[0]: n.made["v"] for n in run.record.neutrality if n.phase == "decode"}
    assert made == {2: ("1 pass",), 1: ("float32",)}
    assert gate(compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))).counts.keys() == {"pass"}


@needs_libtpu
@pytest.mark.slow  # 10 s
def test_logits_whose_norm_may_be_fused_need_the_last_layer(tmp_path):
    """The chip's compiler hands the last norm's values on unrounded: what made them has to be there, or none tells."""
    subject, given = load("tiny", "bf16", device="tpu-predicted:v5e"), [Prompt(id="a", prompt="def f(x):")]
    for layers, counts in (("3", {"pass", "unknown"}), ("3,-1", {"pass"})):
        select = Selection.parse(points="q,logits", phases="prefill,decode", layers=layers)
        run = trace(subject, tmp_path / layers, given, select, TraceOptions(1))
        found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
        assert gate(found).counts.keys() == counts
        unknown = {(e.phase, e.point, e.unknown) for e in found.errors if e.unknown}
        assert unknown == ({("decode", "logits", FUSED)} if layers == "3" else set())


def doubled(q, k, scale, a):
    return attention_scores(q, k, scale * 1.05, a)


@pytest.mark.turn  # 21 s
@needs_libtpu
def test_a_fault_fails_where_it_is(tmp_path):
    found = recorded(tmp_path, "fp32", "tpu-predicted:v6e", replace(Parts(), scores=doubled), "scores,attn_out")
    judged = gate(found)
    assert judged.exit_code == 1
    failing = {v.point for v in judged.verdicts if v.status == "fail" and v.kind == "local"}
    assert failing == {"scores"}


@pytest.mark.turn  # 6 s
@needs_libtpu
def test_diagnose_says_what_it_needs(runs, capsys):
    assert cli(["diagnose", str(runs["fp32", "tpu-predicted:v5e"].folder)]) in (0, 3)
    assert "unknown: needs tpu" in capsys.readouterr().out


def test_without_libtpu_another_way_is_offered(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(predicting, "libtpu_version", lambda: None)
    assert cli(["trace", "tiny", "--device", "tpu-predicted:v5e", "-o", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'precaudit[tpu]'" in said
    assert "--device tpu-emulated:v5e emulates products from the jaxpr: coarser, it misses which unit" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.turn  # 7 s
def test_the_other_way_needs_no_libtpu(monkeypatch, tmp_path):
    """Products take the passes of their precision, and every report says that this is coarser."""
    for module in (predicting, target):
        monkeypatch.setattr(module, "libtpu_version", lambda: None)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    select = Selection.parse(points="q,logits", phases="prefill")
    found = {}
    for device in ("cpu", "tpu-emulated:v6e"):
        subject = load("tiny", "fp32", device=device)
        run = trace(subject, tmp_path / device[:3], PROMPTS[:1], select, TraceOptions())
        found[device] = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    coarse = found["tpu-emulated:v6e"]
    assert error(coarse) > 1000 * error(found["cpu"])
    assert gate(coarse).counts.keys() == {"pass"}
    record = open_run(coarse.folder).record
    assert record.device == "TPU v6e:2x2 (emulated from the jaxpr)"
    assert "coarser than a prediction" in record.warnings[-1]


@pytest.mark.parametrize("precision", [None, "high", "highest", lax.DotAlgorithmPreset.BF16_BF16_F32_X3])
def test_products_are_emulated_wherever_they_lie(precision):
    """In calls, scans, branches and under a derivative rule, against NumPy's FP64 on operands in parts."""

    @jax.custom_jvp
    def product(x, w):
        return jax.jit(lambda x, w: lax.dot(x, w, precision=precision))(x, w)

    product.defjvp(lambda given, tangents: (product(*given), tangents[0]))

    def call(x, ws, flag):
        def step(x, w):
            return lax.cond(flag, lambda: product(x, w), lambda: x), None

        return lax.scan(step, x, ws)[0]

    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((8, 64)).astype(np.float32), draw.standard_normal((2, 64, 64)).astype(np.float32) / 8
    parts = {None: 1, "highest": 0}.get(precision, 2)
    expected = np.float64(x)
    for each in w:
        expected = parted(expected, each, parts)
    made = np.asarray(jax.jit(emulate_passes(call))(x, w, np.bool_(True)))
    off = np.max(np.abs(made - expected)) / np.max(np.abs(expected))
    exact = np.max(np.abs(made - np.float64(x) @ np.float64(w[0]) @ np.float64(w[1]))) / np.max(np.abs(expected))
    assert off < 1e-6
    assert {1: exact > 1e-3, 2: 1e-6 < exact < 1e-4, 0: exact < 1e-6}[parts]


def parted(x, y, parts):
    """Return x @ y in FP64 of operands in one bfloat16 part, or of two without the product of the rests; 0: whole."""

    def rounded(v):
        return np.float64(v.astype(np.float32).astype(ml_dtypes.bfloat16))

    if parts == 0:
        return np.float64(np.float32(x)) @ np.float64(y)
    a, b = rounded(x), rounded(y)
    rest = rounded(np.float32(x) - a) @ b + a @ rounded(y - b) if parts == 2 else 0.0
    return np.float64(np.float32(a @ b + rest))


@needs_libtpu
@pytest.mark.parametrize(
    ("device", "words"),
    [("tpu-predicted:v5", "--device tpu-predicted:v5: unknown TPU.*v5e"), ("tpu-predict", "unknown device")],
)
def test_a_device_that_is_none_is_refused(device, words):
    with pytest.raises(UserError, match=words):
        load("tiny", "fp32", device=device)


@needs_libtpu
def test_a_policy_that_the_target_refuses_is_refused():
    with pytest.raises(UserError, match="does not compile for v5e"):
        load("tiny", load_policy("fp32"), {"matmul": "TF32_TF32_F32"}, device="tpu-predicted:v5e")


@pytest.mark.parametrize(
    ("device", "dtype", "decode", "ways"),
    [
        ("cpu", "bfloat16", True, set()), ("tpu", "float32", False, set()),
        ("tpu", "bfloat16", True, {ROUNDED_PRODUCTS}), ("tpu", "bfloat16", False, set()),
    ],
)  # fmt: skip
def test_what_a_vector_unit_may_do_is_of_a_tpu_alone(device, dtype, decode, ways):
    """Beside the declared passes; those of exact products need no float32 ones."""
    found = on_single_rows(FP64, POINTS["q"], dtype, "bfloat16", RowExecution(device, decode))
    assert {how for way in found for how in way} == ways
    passes = replace(FP64, dot=lambda a, b: a @ b)
    found = on_single_rows(passes, POINTS["q"], dtype, "bfloat16", RowExecution(device, decode))
    assert {how for way in found for how in way} == ways | ({FLOAT32_PRODUCTS} if device == "tpu" else set())


STEP = """
import jax.numpy as jnp
import numpy as np
from jax import lax
import precaudit

DRAW = np.random.default_rng(3)
PARAMS = {k: jnp.asarray(DRAW.standard_normal((64, 64)) / 8, jnp.bfloat16) for k in ("first", "second")}
PARAMS["head"] = jnp.asarray(DRAW.standard_normal((64, 50)) / 8, jnp.float32)

def call(params, x):
    wide = (x @ params["first"]).astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.mean(wide * wide) + 1e-5)).astype(x.dtype)
    return (normed @ params["second"]).astype(jnp.float32)[None] @ params["head"]

program = precaudit.Program(call=call, params=PARAMS, cases={
    name: (jnp.asarray(DRAW.standard_normal(64), jnp.bfloat16),) for name in "ab"})
"""


@pytest.mark.turn  # 3 s
@needs_libtpu
def test_a_program_is_predicted_and_judged_by_what_a_tpu_does_to_products(tmp_path, capsys, monkeypatch):
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    assert cli(["trace", "step.py:program", "--device", "tpu-predicted:v5e", "-o", "run"]) == 0
    assert cli(["compare", "run"]) == 0
    assert "predicted: what libtpu" in " ".join(capsys.readouterr().out.split())
    assert cli(["gate", "run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "has the same products without taps and with them" in told
    assert "TPU v5e:2x2 (predicted)" in (tmp_path / "run" / "run.json").read_text()
    monkeypatch.setattr("precaudit.references.traced.reference.units_of", lambda _: None)
    assert cli(["compare", "run"]) == 0
    assert cli(["gate", "run"]) == 1, "one pass is no honest rounding of a CPU's float32 product"


ROWS = """
import jax.numpy as jnp
import numpy as np
import precaudit

DRAW = np.random.default_rng(5)
PARAMS = [jnp.asarray(DRAW.standard_normal((64, 64)) / 8, jnp.float32) for _ in range(2)]

def call(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]

many, one = (precaudit.Program(call=call, params=PARAMS, cases={
    "a": (jnp.asarray(DRAW.standard_normal((rows, 64)), jnp.float32),)}) for rows in (64, 1))
"""


@pytest.mark.turn  # 5 s
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "compiled", "claims"),
    [
        ("many", "1 pass", {"1 pass": 0, "3 passes": 1, "float32": 1}), ("one", "float32", {"float32": 0, "1 pass": 1}),
    ],
)  # fmt: skip
def test_a_program_s_products_are_made_as_its_compiled_program_says(tmp_path, monkeypatch, name, compiled, claims):
    """What was compiled passes; another claim fails; a mixture, one rounded operand and no claim are unknown."""
    (tmp_path / "rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    assert cli(["trace", f"rows.py:{name}", "--device", "tpu-predicted:v5e", "-o", "run"]) == 0
    path = tmp_path / "run" / "run.json"
    raw = json.loads(path.read_text())
    assert raw["neutrality"][0]["made"] == {"product.0": [compiled], "product.1": [compiled]}
    open_ = [["1 pass", "float32"], ["float32, one operand bfloat16"], None]
    for made, code in [*(([way], code) for way, code in claims.items()), *((made, 3) for made in open_)]:
        raw["neutrality"][0]["made"] = {"product.0": [compiled]} | ({"product.1": made} if made else {})
        path.write_text(json.dumps(raw))
        assert cli(["compare", "run"]) == 0
        assert cli(["gate", "run"]) == code, made


def test_a_program_takes_no_other_device(capsys):
    assert cli(["trace", "step.py:program", "--device", "cpu"]) == 2
    assert "leave out --device" in capsys.readouterr().err


OWN = EXAMPLES / "own_decoder.py"
WRONG = {
    "act": lambda x: x * 1.01,
    "query": lambda x: x * 1.008,
    "normed": lambda x: x * (1 + 2.0**-8),
    "attended": lambda x: np.where(np.arange(x.shape[-1]) == 3, 1.05, 1.0) * x,
}


@pytest.mark.slow  # 40 s
@needs_libtpu
def test_a_program_in_bfloat16_passes_as_a_tpu_makes_it_and_faults_fail_at_their_segment(tmp_path):
    """What few read may stay unrounded there: that excuses no other factor, of a tensor or of a channel."""
    assert cli(["trace", f"{OWN}:program", "--device", "tpu-predicted:v5e", "-o", str(tmp_path / "run")]) == 0
    opened, program = open_program_run(tmp_path / "run"), load_program(f"{OWN}:program")
    compare_program(opened, program)
    assert gate(opened.folder).exit_code == 0
    for point, change in WRONG.items():
        bad = altered(opened, tmp_path / point, point, lambda x, f=change: f(x.astype(np.float32)).astype(x.dtype))
        compare_program(bad, program)
        found = gate(bad.folder)
        assert found.exit_code == 1
        assert point in {v.point for v in found.verdicts if v.status == "fail"}

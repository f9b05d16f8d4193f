"""Float32 products in bfloat16 passes, as a TPU makes them: emulated where the device is one.

No TPU is here: the passes are written out in the program, run on a CPU, and the run is then said to be a TPU's, whose
compiler has them made so.
"""

import json
import math
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit.judging.gate import gate
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import attend, attention_scores, project
from precaudit.models.numpy_decoder.passes import PAIRS, matmul_in_passes, to_tf32
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.graphs.decoder import POINTS as RULES
from precaudit.schema.policies import load_policy, on_device
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.selected import few

WAYS = {1: "1 pass", 3: "3 passes", 6: "6 passes"}
POINTS = "q,k,v,scores,attn_out,attn_proj,mlp_act,mlp_out"


def parts_of(x):
    found, rest = [], x
    for _ in range(3):
        found.append(lax.reduce_precision(rest, 8, 7))
        rest = rest - found[-1]
    return found


def in_tf32(x):
    """To 11 bits, ties away from zero."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(1 << 12)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


def multiplied(passes):
    """A decoder whose float32 products are so many passes over bfloat16 parts; none: over one TF32 part."""

    def in_parts(product, a, b):
        if not passes:
            return product(in_tf32(a), in_tf32(b))
        left, right = parts_of(a), parts_of(b)
        return sum(product(left[i], right[j]) for i, j in PAIRS[passes])

    return replace(
        Parts(),
        project=lambda x, w, _bias, a: in_parts(lambda y, z: project(y, z, None, a), x, w),
        scores=lambda q, k, scale, a: in_parts(lambda y, z: attention_scores(y, z, scale, a), q, k),
        attend=lambda p, v, a: in_parts(lambda y, z: attend(y, z, a), p, v),
    )


def judged(folder, passes, matmul, device="TPU v5 lite"):
    settings = {"matmul": matmul}
    subject = load("tiny", "fp32-highest", settings, "cpu", multiplied(passes))
    select = Selection.parse(layers="1", points=POINTS, phases="prefill,decode")
    text = Prompt(id="a", prompt="def read(path):\n    return open(path).read()")
    run = trace(subject, folder / "run", [text], select, TraceOptions(1, force=True))
    raw = json.loads((run.folder / "run.json").read_text())
    if passes and device.startswith("TPU"):
        for n in raw["neutrality"]:
            n["made"] = {p: [WAYS[passes]] for p, row in RULES.items() if row.sums}
    (run.folder / "run.json").write_text(json.dumps(raw | {"device": device}))
    return gate(compare(run.folder, options=CompareOptions(accum=(), cache=folder / "refs")))


@pytest.mark.turn  # 12 s
@pytest.mark.parametrize("case", few([(1, "default"), (3, "high"), (6, "highest")], (3, "high")), ids=str)  # 10 s each
def test_the_passes_of_a_tpu_are_emulated(tmp_path, case):
    passes, matmul = case
    found = judged(tmp_path, passes, matmul)
    local = [v for v in found.verdicts if v.kind == "local"]
    assert not local, [(v.point, v.metric, v.scope, v.value) for v in local]


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(
    "case", few([(1, "high"), (1, "highest"), (3, "highest")], (3, "highest")), ids=str
)  # 8 s each
def test_fewer_passes_than_were_asked_for_fail(tmp_path, case):
    passes, matmul = case
    failed = {v.point for v in judged(tmp_path, passes, matmul).verdicts if v.kind == "local" and v.status == "fail"}
    assert {"q", "v", "attn_proj", "mlp_out"} <= failed


@pytest.mark.slow  # 25 s
def test_tf32_is_a_gpus_default(tmp_path):
    """Products of TF32 operands pass there, also where the device made float32 of some; those of bfloat16 do not."""
    for passes, honest in ((0, True), (6, True), (1, False)):
        verdicts = judged(tmp_path, passes, "default", "NVIDIA H100 80GB HBM3").verdicts
        failed = {v.point for v in verdicts if v.kind == "local"}
        told = [(v.point, v.metric, v.value, v.limit) for v in verdicts if v.kind == "local"]
        assert not failed if honest else {"q", "v", "attn_proj", "mlp_out"} <= failed, (passes, told)


@pytest.mark.turn  # 12 s
def test_one_pass_on_a_cpu_fails(tmp_path):
    """A CPU takes the setting and multiplies in float32: bfloat16 operands are no honest default there."""
    failed = {v.point for v in judged(tmp_path, 1, "default", "cpu").verdicts if v.status == "fail"}
    assert {"q", "v", "attn_proj", "mlp_out"} <= failed


def test_errors_of_passes_are_those_of_the_parts_left_out():
    """Of operands of 24 bits, 1, 3 and 6 passes leave terms of 2⁻⁸, 2⁻¹⁶ and 2⁻²⁴ of the largest."""
    draw = np.random.default_rng(3)
    a, b = (draw.normal(size=shape).astype(np.float32).astype(np.float64) for shape in ((8, 64), (64, 8)))
    exact = a @ b
    bound = np.abs(a) @ np.abs(b)
    for passes, bits in ((1, 7), (3, 14), (6, 21)):
        worst = np.max(np.abs(matmul_in_passes(passes, np.matmul, a, b) - exact) / bound)
        assert 2.0 ** -(bits + 8) < worst < 2.0**-bits, passes  # of 64 terms, errors average out
    narrow = a.astype(jnp.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(matmul_in_passes(1, np.matmul, narrow, narrow.T), narrow @ narrow.T)


def test_a_setting_is_what_the_device_makes_of_it():
    made = {
        (device, matmul): on_device(replace(load_policy("fp32"), matmul=matmul), device).matmul
        for device in ("cpu", "gpu", "tpu")
        for matmul in ("default", "high", "highest", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6")
    }
    assert {made["cpu", m] for m in ("default", "high", "BF16_BF16_F32_X3")} == {"highest"}
    assert [made["tpu", m] for m in ("default", "high", "highest")] == [
        "BF16_BF16_F32", "BF16_BF16_F32_X3", "highest",
    ]  # fmt: skip
    assert made["tpu", "BF16_BF16_F32_X6"] == "highest"  # as good as float32, which the vector unit multiplies in
    assert [made["gpu", m] for m in ("default", "high", "BF16_BF16_F32_X3")] == [
        "TF32_TF32_F32", "TF32_TF32_F32", "BF16_BF16_F32_X3",
    ]  # fmt: skip


def test_tf32_rounds_to_the_nearest_of_eleven_bits_ties_away():
    """Held against exact fractions; what is not finite stays."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=2000).astype(np.float32) * np.float32(2.0) ** draw.integers(-60, 60, 2000).astype(np.float32)
    halves = np.float32([1 + 2.0**-11, -1 - 2.0**-11, 1 + 3 * 2.0**-11, 3.0, 0.0, 2.0**-140])
    for value, found in zip([*x, *halves], to_tf32(np.concatenate([x, halves])), strict=True):
        grid = Fraction(2) ** (max(math.frexp(float(value))[1], -125) - 11)
        steps = abs(Fraction(float(value))) / grid
        whole = math.floor(steps + Fraction(1, 2)) * grid
        assert Fraction(float(found)) == (whole if value > 0 else -whole)
    np.testing.assert_array_equal(to_tf32(np.float32([np.inf, -np.inf, np.nan])), [np.inf, -np.inf, np.nan])

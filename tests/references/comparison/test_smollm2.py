"""The real model: one element by mpmath, what explains its error, and float32 against FP64."""

import numpy as np
import pytest
from mpmath import mp, mpf

from precaudit.numbers.arrays import widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.attribution import attribute
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.reports.summary import accumulation_sentence
from precaudit.schema.prompts import shipped_prompts
from precaudit.schema.selection import Selection
from tests.helpers.selected import KEEPS_FEWER

LAYER = 15


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    prompts = [p for p in shipped_prompts() if p.id == "l1_source"]
    select = Selection.parse(layers=str(LAYER), points="q,k,v,attn_out", phases="prefill")
    trace(load("smollm2", device="cpu"), folder / "run", prompts, select, TraceOptions())
    return compare(folder / "run", options=CompareOptions(cache=folder / "refs"))


def test_the_long_prompt_is_long(audited):
    assert len(audited.run.prompts["l1_source"].tokens) >= 512


def test_one_element_of_attn_out_by_mpmath(audited):
    recorded = Recorded.of(audited.run)
    q, k, v, out = (widen(recorded.tensor("l1_source", "prefill", 0, LAYER, p)) for p in ("q", "k", "v", "attn_out"))
    t, h, d = 300, 4, 17
    g = h // (q.shape[1] // k.shape[1])
    mp.dps = 40
    scores = [
        sum(mpf(a) * mpf(b) for a, b in zip(q[t, h], k[s, g], strict=True)) / mp.sqrt(q.shape[2]) for s in range(t + 1)
    ]
    weights = [mp.exp(s - max(scores)) for s in scores]
    exact = sum(w * mpf(v[s, g, d]) for s, w in enumerate(weights)) / sum(weights)
    from precaudit.models.numpy_decoder.model import attention
    from precaudit.models.numpy_decoder.operators import AttentionRule
    from precaudit.models.numpy_decoder.rounding import FP64

    ours = attention(q, k, v, np.arange(len(q)), AttentionRule(q.shape[2] ** -0.5), FP64)
    assert abs(ours[t, h, d] - float(exact)) <= 1e-14 * np.abs(ours[t, h]).max()
    error = abs(out[t, h, d] - float(exact))
    row = next(e for e in audited.errors if e.kind == "local" and e.point == "attn_out")
    assert 0 < error <= row.max_diff


def test_rounding_is_named_and_fp16_accumulation_is_not(audited):
    """docs/numerics.md: the size of fp16 accumulation's error matches, and it explains none of it."""
    row = next(e for e in audited.errors if e.kind == "local" and e.point == "attn_out")
    alone = next(
        e for e in audited.errors if e.kind == "accum" and e.candidate == "accum:float16" and e.point == "attn_out"
    )
    assert 0.7 < alone.rel_l2 / row.rel_l2 < 1.5
    assert row.explained["accum:float16"] < 0
    assert row.explained["policy:bf16"] > 0.999
    if KEEPS_FEWER:
        assert "probs" in row.elided["policy:bf16"]
    assert attribute(row).name == "policy:bf16"
    assert "Accumulation does not explain" in accumulation_sentence(audited.errors)


@pytest.mark.slow  # 11 s
def test_float32_is_within_5e5_of_fp64(tmp_path):
    prompts = [p for p in shipped_prompts() if p.id == "s1_fact"]
    select = Selection.parse(points="all", layers="0,10,29")
    trace(
        load("smollm2", "fp32-highest", device="cpu"), tmp_path / "run", prompts, select, TraceOptions(decode_steps=2)
    )
    found = compare(tmp_path / "run", options=CompareOptions(cache=tmp_path / "refs", accum=()))
    for e in found.errors:
        if e.kind in ("forward", "local"):
            assert e.unknown is None or e.point == "final_norm", e  # its input, layer 29's resid_out, is there
            assert e.rel_l2 is None or e.rel_l2 <= 5e-5, e
    assert all(p.match and p.f64_match for p in found.prefill_decode)
    assert {e.point for e in found.errors if e.kind == "weights"} >= {"model.embed_tokens.weight"}

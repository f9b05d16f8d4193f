"""Filters: what they name and what they refuse."""

import pytest

from precaudit.errors import UserError
from precaudit.recording.tracing.session import run_batches
from precaudit.schema.coverage import expected_tensors
from precaudit.schema.graphs.decoder import support
from precaudit.schema.lengths import bucket
from precaudit.schema.policies import Policy, apply_settings, load_policy, parse_settings, shipped_policies
from precaudit.schema.records.runs import PromptRecord, Requested
from precaudit.schema.selection import Selection, parse_layers, parse_points, parse_positions


@pytest.mark.parametrize(
    ("text", "n", "want"),
    [
        ("0", 3, (0,)),
        ("-1", 3, (2,)),
        ("0,15:18,-1", 30, (0, 15, 16, 17, 29)),
        ("::2", 5, (0, 2, 4)),
        (None, 2, (0, 1)),
    ],
)
def test_layers(text, n, want):
    assert parse_layers(text, n) == want


@pytest.mark.parametrize("text", ["99", "-31", "a", "", "1:1", "::0", "1:2:3:4"])
def test_layers_refused(text):
    with pytest.raises(UserError):
        parse_layers(text, 30)


def test_layers_of_a_program_that_has_none_are_refused_with_what_to_give():
    with pytest.raises(UserError, match=r"^--layers 0: the program scans over none, .* choose by --points$"):
        parse_layers("0", 0)


def test_positions():
    assert parse_positions("last:2,::64", 130) == (0, 64, 128, 129)
    assert parse_positions("500", 10) == ()
    with pytest.raises(UserError, match="last:16"):
        parse_positions("last:x", 10)


def test_points_and_support():
    assert parse_points("logits:all,q") == (("q", "logits"), True)
    assert support(("attn_out",), ("prefill",)) == ("q", "k", "v")
    assert support(("attn_out",), ("decode",)) == ("q", "k", "v", "k_cache", "v_cache")
    assert support(("logits",), ("prefill",)) == ("final_norm",)
    assert support(("q", "logits"), ("prefill",), fused=True) == ("resid_in", "attn_norm", "final_norm")
    assert support(("mlp_out",), ("prefill",), fused=True) == ("mlp_norm", "mlp_act")
    with pytest.raises(UserError, match="attn_out"):
        parse_points("attn_ot")


def requested(**changes):
    base = {
        "prompts": ("p",), "layers": (0, 1), "points": ("attn_out", "logits"),
        "support": Selection(points=("attn_out", "logits")).support, "phases": ("prefill", "decode", "rescore"),
        "positions": None, "every_logit": False, "decode_steps": 2, "batch": 1, "pad": "right", "tokens_from": None,
    }  # fmt: skip
    return Requested(**(base | changes))


def test_entries_follow_the_phases():
    by = {e.key: e for e in expected_tensors(requested(), 5)}
    assert by["prefill", 0, 0, "attn_out"].positions == (0, 1, 2, 3, 4)
    assert by["decode", 0, 1, "attn_out"].positions == (4,)
    assert by["decode", 2, 1, "attn_out"].positions == (6,)
    assert by["rescore", 0, 1, "attn_out"].positions == (4, 5, 6)
    assert by["rescore", 0, 1, "k"].positions == tuple(range(7))
    assert by["decode", 0, 1, "k_cache"].keys == 5
    assert by["decode", 2, 1, "k_cache"].keys == 7
    assert ("decode", 1, 1, "k_cache") not in by
    assert by["prefill", 0, None, "final_norm"].positions == by["prefill", 0, None, "logits"].positions == (4,)
    assert by["prefill", 0, 0, "q"].support


def test_decode_alone_keeps_the_rows_its_cache_is_checked_against():
    found = [e for e in expected_tensors(requested(phases=("decode",)), 5) if e.phase == "prefill"]
    assert {e.point for e in found} == {"k", "v"}
    assert all(e.support for e in found)


def test_buckets_grow_and_hold():
    sizes = [bucket(n) for n in range(1, 5000)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(size <= max(64, 4 * n) for n, size in enumerate(sizes, 1))
    assert bucket(512) == 512


@pytest.mark.parametrize(
    ("lengths", "parameters", "want"),
    [
        ((10, 200, 20), 10**6, [256, 256, 256]),  # 2 · 192 tokens more, three times, of 2 Mflop: 2.3 Gflop
        ((10, 20), 10**6, [64, 64]),  # nothing to share
        ((10, 1000, 20), 10**6, [64, 1024, 64]),  # no program that is near
        ((10, 200, 20), 10**9, [64, 256, 64]),  # 2.3 Tflop: compiling costs less
        ((*[10] * 300, 200), 10**6, [64] * 300 + [256]),
    ],
)
def test_short_prompts_share_a_longer_ones_programs_where_padding_costs_little(lengths, parameters, want):
    groups = [[PromptRecord(id=f"p{i}", text="", tokens=(0,) * n)] for i, n in enumerate(lengths)]
    found = run_batches(groups, requested(), parameters)
    assert [b.length for b in found] == want
    assert [b.prompts[0].id for b in found] == [f"p{i}" for i in range(len(lengths))]


def test_shipped_policies_and_settings():
    integers = {"int8-weights", "int8-groups", "int4-groups", "kv-int8", "w8a8"}
    assert set(shipped_policies()) == {
        "bf16", "bf16-fp32-scores", "fp32-cast-decode", "fp32", "fp32-highest", "kv-fp8", "unrolled", "fused",
        "window-32", *integers,
    }  # fmt: skip
    assert load_policy("bf16") == Policy()
    changed = apply_settings(load_policy("bf16"), parse_settings(("scores=f32",)))
    assert (changed.scores, changed.name) == ("float32", "bf16+scores=float32")
    assert load_policy("fp32-highest").matmul == "highest"


def test_a_policy_file_of_the_user(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('scores = "float16"\n')
    assert (load_policy(str(path)).scores, load_policy(str(path)).name) == ("float16", "mine")
    path.write_text('scorse = "float16"\n')
    with pytest.raises(UserError, match="scores"):
        load_policy(str(path))

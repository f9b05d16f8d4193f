"""FP64 exponentials, the logistic function and RoPE, against mpmath, the textbook in NumPy and complex numbers."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest

from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.numpy_decoder import model
from precaudit.models.numpy_decoder._exponential_kernel import fill_exponentials as rows
from precaudit.models.numpy_decoder.model import AttentionRows, Model, attend_variants
from precaudit.models.numpy_decoder.operations import operations
from precaudit.models.numpy_decoder.operators import (
    AttentionRule,
    activate,
    exponentials,
    gated_product,
    hide,
    rope,
    silu,
    softmax,
)
from precaudit.models.numpy_decoder.rounding import FP64, Blocks, Rounding
from precaudit.numbers.arrays import rounder
from precaudit.schema.graphs.decoder import POINTS, inputs_of, parts_of, present, row_shapes
from tests.helpers.paths import FIXTURES

FAMILIES = [
    "llama-bias", "gemma2-gqa", "qwen3-bias", "qwen3-moe-gqa", "phi3-partial", "granite-bias", "olmo2-mqa-bias",
]  # fmt: skip


def exp(x):
    """Return exp(x) of the kernel, for x ≤ 0: rows of [0, x], whose maximum is 0."""
    s = np.stack([np.zeros_like(x), x], axis=1)
    rows(s[None], 1.0, np.zeros(len(x), int), np.full(len(x), 2), np.empty((1, len(x))))
    return s[:, 1]


def test_exponentials_are_within_an_ulp():
    draw = np.random.default_rng(0)
    edges = [0.0, -0.0, -1e-300, -math.log(2) / 2, -708.39, -708.4, -740.0, -745.13]
    x = np.concatenate([edges, -draw.exponential(3.0, 2000), -draw.uniform(0, 745, 2000)])
    with mpmath.workdps(40):
        for at, found in zip(x, exp(x), strict=True):
            expected = mpmath.exp(mpmath.mpf(float(at)))
            assert abs(mpmath.mpf(float(found)) - expected) <= 1.0 * math.ulp(float(expected)), at


def test_what_leaves_the_range_is_zero_and_what_is_not_a_number_stays_none():
    assert exp(np.asarray([-746.0, -1e300, -np.inf])).tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(exp(np.asarray([np.nan]))).all()


@pytest.mark.parametrize(
    ("shape", "window"),
    [((30, 45), None), ((30, 45), 1), ((3, 16, 45), 7), ((30, 45), 40), ((3, 16, 45), None), ((5, 3), None)],
)
def test_rows_see_the_keys_up_to_their_own(shape, window):
    """Against a mask and NumPy's own exponentials; the last shape's rows stand after more keys than there are."""
    draw = np.random.default_rng(1)
    s, positions = draw.standard_normal(shape) * 20, np.arange(shape[-2]) + 15
    hidden = hide(s.copy(), positions, window)
    e = np.exp(hidden - hidden.max(axis=-1, keepdims=True))
    found, total = exponentials(s.copy(), positions, window, FP64)
    np.testing.assert_allclose(found, e, rtol=4e-16, atol=0)
    np.testing.assert_allclose(total[..., 0], e.sum(-1), rtol=1e-15, atol=0)
    assert (found == 0).sum() == (e == 0).sum()


def test_a_row_with_what_is_not_finite_is_not_finite():
    s = np.zeros((4, 6))
    s[0, 1], s[1, 2], s[2] = np.nan, np.inf, -np.inf
    found = softmax(s, np.full(4, 5), None, FP64)
    assert np.isnan(found[:3]).any(axis=1).all()
    np.testing.assert_allclose(found[3], 1 / 6, rtol=1e-15)
    assert np.isnan(softmax(np.zeros((1, 3)), np.asarray([-1]), None, FP64)).all()  # sees no key


def test_rope_is_a_product_of_complex_numbers():
    """(a + bi) · factor · exp(i · position · frequency), the dimensions beyond those that turn as they were."""
    draw = np.random.default_rng(4)
    x, positions, each = draw.standard_normal((5, 2, 10)), np.asarray([0, 3, 7, 100, 4000]), 30.0 ** -np.arange(4)
    found = rope(x, positions, (each, 1.25), FP64)
    pairs = x[..., :4] + 1j * x[..., 4:8]
    turned = pairs * 1.25 * np.exp(1j * positions[:, None] * each)[:, None]
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag, x[..., 8:]], -1), rtol=0, atol=1e-12)
    assert rope(x, positions, (each, 1.25), FP64, out=x) is x
    assert x.tolist() == found.tolist()


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dot", [np.matmul, lambda a, b: np.einsum("tk,ks->ts", a, b)])
def test_attention_of_heads_together_is_each_heads(monkeypatch, heads, window, dot):
    """Against sums over all keys; heads of a group share keys, and are one job where there are jobs enough."""
    draw, (rows, groups, size) = np.random.default_rng(5), (70, 2, 8)
    q, k, v = draw.standard_normal((rows, heads * groups, size)), *draw.standard_normal((2, rows, groups, size))
    positions = np.arange(rows)
    far = positions[:, None] - positions
    seen = (far >= 0) & (far < (rows if window is None else window))
    scores = np.einsum("thk,shk->hts", q, np.repeat(k, heads, axis=1)) * 0.3
    e = np.where(seen, np.exp(scores), 0.0)
    expected = np.einsum("hts,shk->thk", e / e.sum(axis=2, keepdims=True), np.repeat(v, heads, axis=1))
    found = []
    monkeypatch.setattr(model, "BLOCK", 16)
    for few, jobs in ((0, 0), (0, 10**6), (10**9, 0)):  # a job a group, a head, and a block of rows
        monkeypatch.setattr(model, "INLINE", few)
        monkeypatch.setattr(model, "JOBS", jobs)
        rule = AttentionRule(0.3, window=window)
        found += attend_variants(
            AttentionRows(q, k, v, positions), rule, [Rounding(dot=dot), Rounding(dot=dot, attn_out=np.negative)]
        )
        found += attend_variants(AttentionRows(q, k, v, positions), rule, [Rounding(dot=dot)])
    for y, sign in zip(found, 3 * [1.0, -1.0, 1.0], strict=True):
        np.testing.assert_allclose(y, sign * expected, rtol=0, atol=1e-14)


def twice(x):
    return 2.0 * x


@pytest.mark.parametrize(
    ("rule", "rounding", "factor"),
    [
        (AttentionRule(0.3), Rounding(), 1.0),
        (AttentionRule(0.3), Rounding(score_dot=twice), 2.0),
        (AttentionRule(0.3), Rounding(scores=twice), 2.0),
        (AttentionRule(0.3), Rounding(shifted=twice), 2.0),
        (AttentionRule(0.3), Rounding(exponential=twice), 1.0),  # of a sum's terms all
        (AttentionRule(0.3), Rounding(blocks=Blocks(8)), 1.0),
        (AttentionRule(-500.0), Rounding(), 1.0),  # the largest score is of the smallest product
        (AttentionRule(0.3, cap=0.5), Rounding(), 1.0),
    ],
)
def test_what_is_done_to_scores_is_done_once(rule, rounding, factor):
    """Of one rounding alone, whose scores may be scaled where their exponentials are made."""
    draw, (rows_, size) = np.random.default_rng(7), (20, 8)
    q, k, v = draw.standard_normal((3, rows_, 2, size))
    scores = np.einsum("thk,shk->hts", q, k) * rule.scale * factor
    scores = scores if rule.cap is None else rule.cap * np.tanh(scores / rule.cap)
    hide(scores, np.arange(rows_), None)
    e = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = np.einsum("hts,shk->thk", e / e.sum(axis=2, keepdims=True), v)
    (found,) = attend_variants(AttentionRows(q, k, v, np.arange(rows_)), rule, [rounding])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_operation_makes_in_given_memory_what_it_makes_in_its_own(name):
    """Of every operation with all inputs known; what is rounded afterwards may lie elsewhere."""
    checkpoint = open_checkpoint(str(FIXTURES / name))
    read, draw, config = checkpoint.tensors.read_tensor, np.random.default_rng(6), checkpoint.config
    shapes, rows, tried = row_shapes(config), np.arange(9), set()
    narrow = rounder("bfloat16")
    places = {"linear": narrow, "norm_inner": narrow, "gate": narrow, "up": narrow, "residual": narrow}
    for rounding in (FP64, Rounding(**places), Rounding(norm=narrow, silu=narrow, mlp_act=narrow, rope_table=narrow)):
        here = Model(config, read).context(0, rows, rounding)
        for point, operation in operations(config).items():
            names = inputs_of(point, config.sparse)
            if POINTS[point].per_layer and point in present(config.sparse):
                inputs = [draw.standard_normal((len(rows), *shapes[n])) for n in names]
                parts = {n: draw.standard_normal((len(rows), *shapes[n])) for n in parts_of(point) if n in shapes}
                for made in ({}, parts):
                    expected = operation(here, *map(np.copy, inputs), **made)
                    out = np.full((len(rows), *shapes[point]), np.nan)
                    assert operation(replace(here, out=out), *inputs, **made).tolist() == expected.tolist(), point
                tried.add(point)
    assert {"attn_norm", "q", "k", "v", "attn_proj", "resid_mid", "mlp_norm", "mlp_out", "resid_out"} <= tried


def test_silu_is_the_textbooks():
    x = np.concatenate([np.linspace(-800, 800, 3001), np.random.default_rng(2).standard_normal(2000) * 5])
    with mpmath.workdps(40):
        expected = np.asarray([float(mpmath.mpf(float(v)) / (1 + mpmath.exp(-mpmath.mpf(float(v))))) for v in x])
    np.testing.assert_allclose(silu(x), expected, rtol=6e-16, atol=4e-306)  # where exp(−x) overflows it is 0
    assert silu(np.asarray([[np.inf, -0.0]])).tolist() == [[np.inf, -0.0]]
    assert np.isnan(silu(np.asarray([np.nan]))).all()
    strided = np.random.default_rng(3).standard_normal((6, 8))
    assert silu(strided.T).tolist() == silu(strided).T.tolist()


def test_a_gate_and_what_it_gates_are_rounded_before_they_are_used():
    narrow, (gate, up) = rounder("bfloat16"), np.random.default_rng(7).standard_normal((2, 5, 6))
    r = Rounding(gate=narrow, up=narrow)
    assert activate(gate, "silu", r).tolist() == silu(narrow(gate)).tolist()
    assert gated_product(gate, up, "silu", r).tolist() == (silu(narrow(gate)) * narrow(up)).tolist()
    checkpoint = open_checkpoint(str(FIXTURES / "llama-bias"))
    here = Model(checkpoint.config, checkpoint.tensors.read_tensor).context(0, np.arange(3), r)
    x = np.random.default_rng(8).standard_normal((3, checkpoint.config.width))
    plain = operations(checkpoint.config)
    act = plain["gate_out"](here, x)
    assert plain["mlp_act"](here, x, act).tolist() == plain["mlp_act"](here, x).tolist()

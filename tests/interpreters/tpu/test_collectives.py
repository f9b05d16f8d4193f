"""Programs of four chips, compiled for them and run on one CPU: every collective against what it means."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from precaudit.interpreters.tpu.target import mesh, parse_target
from precaudit.recording.tracing.predicting import ChipLayout, PredictedProgram
from tests.helpers.tpus import needs_libtpu

pytestmark = needs_libtpu
TARGET, AXES = parse_target("v5e:2x2"), {"data": 2, "model": 2}
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)


def on_chips(call, *given, specs, out=None):
    """Return what a function of arrays gives on 2 × 2 chips."""
    layout = ChipLayout(AXES, lambda *_: specs, out)
    return np.asarray(PredictedProgram(TARGET, call, cut=layout)(*map(jnp.asarray, given)))


def mapped(body, spec, out):
    """Return a function whose body each chip runs on its part."""
    return jax.shard_map(body, mesh=mesh(TARGET, AXES), in_specs=spec, out_specs=out, check_vma=False)


ROWS = P(("data", "model"))
FOUR = X.reshape(4, 2, 16)  # what each chip has
PAIRS = FOUR.reshape(2, 2, 2, 16)
CASES = {
    "sum over all": (partial(lax.psum, axis_name=("data", "model")), P(), FOUR.sum(0)),
    "sum over one axis": (partial(lax.psum, axis_name="model"), P("data"), PAIRS.sum(1).reshape(4, 16)),
    "sum over the other": (partial(lax.psum, axis_name="data"), P("model"), PAIRS.sum(0).reshape(4, 16)),
    "largest": (partial(lax.pmax, axis_name=("data", "model")), P(), FOUR.max(0)),
    "all of one axis": (
        partial(lax.all_gather, axis_name="model", axis=1, tiled=True), P("data"),
        PAIRS.transpose(0, 2, 1, 3).reshape(4, 32),
    ),
    "a sum cut": (
        partial(lax.psum_scatter, axis_name="model", scatter_dimension=1, tiled=True), P("data", "model"),
        PAIRS.sum(1).reshape(4, 16),
    ),
    "handed on": (
        partial(lax.ppermute, axis_name="model", perm=[(0, 1), (1, 0)]), ROWS, PAIRS[:, ::-1].reshape(8, 16),
    ),
    "handed to one": (
        partial(lax.ppermute, axis_name="model", perm=[(0, 1)]), ROWS,
        np.stack([np.zeros_like(PAIRS[:, 0]), PAIRS[:, 0]], 1).reshape(8, 16),
    ),
    "exchanged": (
        partial(lax.all_to_all, axis_name="model", split_axis=1, concat_axis=0, tiled=True), ROWS,
        PAIRS.reshape(2, 2, 2, 2, 8).transpose(0, 3, 1, 2, 4).reshape(16, 8),
    ),
    "which chip": (
        lambda x: 0 * x + lax.axis_index(("data", "model")).astype(x.dtype), ROWS,
        np.repeat(np.arange(4), 2)[:, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_chips_exchange_is_what_it_means(name):
    body, out, expected = CASES[name]
    found = on_chips(mapped(body, ROWS, out), X, specs=(ROWS,))
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-6, atol=1e-6)


def test_parts_of_a_bfloat16_product_are_rounded_and_so_is_each_sum():
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((32, 64), (64, 48)))
    cut = (P(None, ("data", "model")), P(("data", "model"), None))
    found = on_chips(jnp.dot, x, w, specs=cut, out=P()).astype(np.float64)
    left, right = (np.asarray(a, np.float64) for a in (x, w))
    parts = [np.asarray(left[:, i : i + 16] @ right[i : i + 16], jnp.bfloat16) for i in range(0, 64, 16)]
    total = parts[0]
    for part in parts[1:]:
        total = (total.astype(np.float32) + part.astype(np.float32)).astype(jnp.bfloat16)
    assert np.mean(found == total.astype(np.float64)) > 0.99  # a float32 sum may cross a tie
    once = np.asarray(left @ right, jnp.bfloat16).astype(np.float64)
    off = [np.linalg.norm(y - left @ right) for y in (found, once)]
    assert 1.5 < off[0] / off[1] < 4


@pytest.mark.parametrize("shape", [(8, 16), (20, 24), (4, 3, 8)])
def test_sums_of_float16_go_two_in_a_word(shape):
    """What chips sum they hold in words of 32 bits: every element is its own sum, each of them rounded."""
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float16)
    body = mapped(partial(lax.psum, axis_name=("data", "model")), ROWS, P())
    found = on_chips(body, x, specs=(ROWS,))
    parts = x.reshape(4, shape[0] // 4, *shape[1:])
    total = parts[0]
    for part in parts[1:]:
        total = (total.astype(np.float32) + part.astype(np.float32)).astype(np.float16)
    assert found.dtype == np.float16
    assert np.array_equal(found, total)


@pytest.mark.turn  # 3 s
def test_arguments_and_results_are_cut_and_joined_as_they_lie():
    for spec in (P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model"))):
        for out in (P(), P("model"), P("data", "model")):
            assert np.array_equal(on_chips(lambda x: x + 1, X, specs=(spec,), out=out), X + 1)

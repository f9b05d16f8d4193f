"""No verdict depends on the order in which an array's axes lie."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.judging.rules import judge
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.closing import SINGLE
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.judged import PlaceRows, closes, local_numbers
from precaudit.schema.limits import default_limits
from precaudit.schema.metrics.axes import clusters, largest_along, line_axes, plane_axes, worst_line, worst_slices
from precaudit.schema.metrics.residue import Noise
from precaudit.schema.records.errors import LocalError
from tests.helpers.permuted_axes import SUITE, permuted
from tests.helpers.selected import few

DRAW = np.random.default_rng(5)


def verdicts(folder, program):
    """Return how many records of each place of a program have which status.

    Names without their numbers: these depend on what made a value, which may be a transposition.
    """
    with jax.numpy_dtype_promotion("standard"):
        found = compare_program(trace_program(program, folder), program)
    names = [re.split("[#~]", e.point)[0] for e in found]
    return Counter(
        (e.kind, e.step, e.layer, name, judge(e, default_limits()).status) for e, name in zip(found, names, strict=True)
    )


@pytest.mark.turn  # 12 s
@pytest.mark.parametrize("name", few(SUITE, "grouped queries", "trained-bf16", "batched-f32", "flushed.py:p5"))
def test_a_program_with_its_axes_permuted_has_the_same_verdicts(name, tmp_path):
    program = SUITE[name]()
    first, other = verdicts(tmp_path / "first", program), verdicts(tmp_path / "other", permuted(program))
    assert {status for *_, status in first} == {"pass"}
    assert other == first


def drawn(shape, seed):
    """An FP64 result, how it rounds to bfloat16, draws of that, and one with a line of three tokens that is off."""
    random = np.random.default_rng(seed)
    exact = random.standard_normal(shape)

    def round_to(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float64)

    made = round_to(exact)
    draws = [exact * (1 + 2.0**-9 * random.uniform(-1, 1, shape)) for _ in range(3)]
    off = made.copy()
    off[2, 1] *= 1 + 2.0**-6
    return exact, made, draws, off


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_numbers_of_slices_are_those_of_any_order_of_axes(order):
    exact, made, draws, off = drawn((4, 3, 12, 20), 1)

    def judged(candidate, order):
        def lie(x):
            return np.ascontiguousarray(x.transpose(order))

        shape = lie(exact).shape

        def rows(x):
            return lie(x).reshape(-1, shape[-1])

        stored = rows(candidate).astype(jnp.bfloat16.dtype)
        found = local_numbers(stored, PlaceRows(rows(exact), {(): rows(made)}, [*map(rows, draws)]), shape)
        return LocalError(
            prompt="a", phase="call", step=0, layer=None, point="x", candidate="r", reference="fp64",
            **found,
        )  # fmt: skip

    for candidate, passes in ((made, True), (off, False)):
        first, other = judged(candidate, (0, 1, 2, 3)), judged(candidate, order)
        assert closes(first) == closes(other) == passes
        for scope in ("token", "channel"):
            assert other.scopes[scope]["excess"][0] == pytest.approx(first.scopes[scope]["excess"][0], rel=1e-9)
            assert other.slices[scope] == first.slices[scope]
        for name in ("gain", "mean"):
            ours, theirs = (getattr(e.unexplained, name) for e in (first, other))
            assert (ours.value, ours.noise) == pytest.approx((theirs.value, theirs.noise), rel=1e-9)


def test_which_slices_there_are():
    assert (line_axes((300, 2, 16)), plane_axes((300, 2, 16))) == ([0, 2], [0, 1, 2])
    assert line_axes((2, 3, 3)) == [1, 2]  # of short axes alone the longest
    assert (line_axes(()), plane_axes((4,))) == ([], [])


def test_the_worst_line_and_plane_are_where_something_is_left():
    left = np.zeros((10, 9, 3))
    left[4, 5, 1] = 1.0
    left[:, 7, 2] = 0.4
    found = worst_slices(left, None, np.ones(left.shape), Noise.least(90, 2.0**-8))
    u = 2.0**-8 / 3**0.5
    assert found["token"].excess == pytest.approx(0.4 / u)  # a line of ten
    assert (found["token"].row % 9, found["token"].last) == (7, 2)
    assert found["token"].slices == 10 * 3 + 9 * 3
    plane = (0.4**2 * 10 / 30) ** 0.5  # across the second axis
    assert found["channel"].excess == pytest.approx(plane / u)
    assert found["channel"].slices == 10 + 9 + 3


def test_the_farthest_line_of_a_forward_error():
    top, energy = np.zeros((3, 9, 10)), np.ones((3, 9, 10))
    top[1, :, 4] = 9.0
    found = worst_line(top, energy)
    assert (found.excess, found.row, found.last, found.slices) == (3.0, 9, 4, 3 * 10 + 3 * 9)
    assert worst_line(np.full(9, 4.0), np.ones(9)) == (2.0, 0, 0, 1)
    assert worst_line(np.array(4.0), np.array(1.0)) == (2.0, 0, 0, 1)


def test_lines_are_the_clusters_of_sums():
    d, r = DRAW.standard_normal((2, 9, 8))
    ((by_column, plain),) = clusters(d, r)  # those of rows are pooled with the noise
    np.testing.assert_allclose(by_column, (d * r).sum(0))
    np.testing.assert_allclose(plain, d.sum(0))
    by_column, by_row = (gains for gains, _ in clusters(d[..., None], r[..., None]))
    np.testing.assert_allclose(by_row, (d * r).sum(1))
    size = largest_along(r)
    np.testing.assert_allclose(size, np.maximum(*np.broadcast_arrays(
        np.sqrt((r**2).mean(0, keepdims=True)), np.sqrt((r**2).mean(1, keepdims=True)))))  # fmt: skip


def test_a_product_that_cancels_may_be_off_by_its_terms():
    """Two terms of 1e4 that cancel to 1: float32 sums leave units of the terms, not of the result."""
    exact = np.ones((8, 8))
    emulated, terms = exact.copy(), np.full((8, 8), 2e4)
    stored = (exact + 1.5 * SINGLE * 2e4 * DRAW.choice([-1, 1], (8, 8))).astype(np.float32)
    every = [exact + SINGLE * DRAW.uniform(-1, 1, (8, 8)) for _ in range(3)]

    def passes(**more):
        found = local_numbers(stored, PlaceRows(exact, {(): emulated}, every, **more))
        return closes(LocalError(
            prompt="a", phase="call", step=0, layer=None, point="x", candidate="r", reference="fp64",
            **found,
        ))  # fmt: skip

    assert not passes()
    assert not passes(terms=np.full((8, 8), 2.0))
    assert passes(terms=10 * terms)

"""Distances in roundings, against formats' own definitions."""

import ml_dtypes
import numpy as np
import pytest

from precaudit.checks.gradients.measure import measure_distance

FORMATS = (ml_dtypes.bfloat16, np.float16, np.float32)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e3])
def test_one_rounding_is_at_most_one_and_a_second_step_is_more(kind: type, scale: float) -> None:
    exact = np.random.default_rng(0).normal(size=(40, 50)) * scale
    once = exact.astype(kind)
    assert 0.9 < measure_distance(once, exact).componentwise <= 1
    off = once.copy()
    off[3, 7] = np.nextafter(off[3, 7], np.asarray(np.inf, kind))
    off[3, 7] = np.nextafter(off[3, 7], np.asarray(np.inf, kind))
    far = measure_distance(off, exact)
    assert far.componentwise > 2
    assert far.worst == (3, 7)
    assert far.same_places


@pytest.mark.parametrize("kind", FORMATS)
def test_an_error_of_the_norm_is_told_in_roundings_of_all_elements(kind: type) -> None:
    exact = np.random.default_rng(0).normal(size=(40, 50))
    once = exact.astype(kind)
    assert measure_distance(once, exact).roundings == pytest.approx(1)
    u = float(ml_dtypes.finfo(kind).eps) / 2  # errors of a rounding are uniform: u ‖x‖ · 0.41 for normal x
    assert 0.35 * u < measure_distance(once, exact).once < 0.5 * u
    assert measure_distance(np.zeros(3, kind), np.zeros(3)).roundings == 0


def test_nan_and_infinities_are_held_to_their_places() -> None:
    exact = np.array([1.0, np.nan, np.inf, -np.inf])
    assert measure_distance(exact.astype(np.float32), exact).same_places
    for wrong in ([np.nan, np.nan, np.inf, -np.inf], [1, 0, np.inf, -np.inf], [1, np.nan, -np.inf, -np.inf]):
        assert not measure_distance(np.array(wrong, np.float32), exact).same_places


def test_errors_at_zero_and_other_shapes() -> None:
    assert measure_distance(np.zeros(3, np.float32), np.zeros(3)).componentwise == 0
    lost = measure_distance(np.float32([0, 1e-3]), np.zeros(2))
    assert lost.componentwise > 1e30
    assert lost.normwise == np.inf
    assert lost.worst == (1,)
    with pytest.raises(ValueError, match="shape"):
        measure_distance(np.zeros(3, np.float32), np.zeros(2))

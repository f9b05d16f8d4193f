"""Numbers under the least noise, made in one pass, are those of the yardstick of a noise of nothing drawn."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.models.numpy_decoder.ensemble import RECIPROCAL
from precaudit.numbers.formats import FORMATS
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import EQUATIONS
from precaudit.references.closing import SINGLE, TIES, Yardstick
from precaudit.references.traced import judged, remade, undrawn
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from precaudit.schema.metrics.residue import Noise, finite
from precaudit.schema.metrics.sizes import canonical, explained_share, half_ulp, norm
from precaudit.schema.records.base import json_number

DRAW = np.random.default_rng(11)
TYPES = ["bfloat16", "float16", "float8_e4m3fn", "float32"]  # that of 8 bits has no infinities


def upper(x):
    """The upper half of FP64 words, to nearest."""
    return ((x.view(np.uint64) + (1 << 31)) >> np.uint64(32)).astype(np.uint32)


def arrays(dtype, special):
    """A reference, emulations that round it to a format, and a candidate some of whose elements fell the other way."""
    exact = DRAW.standard_normal((40, 30))
    exact[5] *= 1e-3
    stored = exact.astype(FORMATS[dtype].dtype)
    first, second = (stored.astype(np.float64) for _ in range(2))
    flat = stored.reshape(-1)
    for i in DRAW.integers(0, flat.size, 25):
        flat[i] = flat[i].astype(np.float64) * 1.05
    second[3] += np.abs(second[3]) * 0.03
    middle = (stored[7, 2].astype(np.float64) + first[7, 2] * 1.03) / 2  # at a tie, but for float32
    exact[7, 2] = middle * (1 + 1e-9)
    if special:
        exact[0, :3], stored[0, :3] = -np.inf, -np.inf
        first[0, :3] = second[0, :3] = -np.inf
        stored[1, 1], exact[2, 2] = np.nan, np.nan
    return stored, exact, first, second


@pytest.mark.parametrize("block", [1 << 21, 64])
@pytest.mark.parametrize(
    ("dtype", "special"),
    [*((dtype, False) for dtype in TYPES), *((dtype, True) for dtype in TYPES if "8" not in dtype)],
)
def test_one_pass_gives_the_yardsticks_numbers(monkeypatch, dtype, special, block):
    monkeypatch.setattr(undrawn, "BLOCK", block)
    stored, exact, *made = arrays(dtype, special)
    narrow = dtype != "float32"
    honest = {("second",): made[1], (): made[0], ("again",): made[0].copy()}
    given = {name: upper(x) if narrow else x for name, x in honest.items()}
    found = undrawn.undrawn_numbers(stored, exact, given)
    u = FORMATS[dtype].unit_roundoff
    candidate, reference, emulated = (canonical(x, "TD") for x in (stored, exact, made[0]))
    shown, zeros = finite(reference), np.zeros(reference.shape)
    noise = Noise(zeros, *np.zeros((2, 0, *zeros.shape[:2])), u / 3**0.5, 0.0 if narrow else RECIPROCAL)
    allowed = half_ulp(reference, dtype) + noise.relative * np.sqrt(np.mean(shown**2, axis=2, keepdims=True))
    ties = TIES * SINGLE * np.abs(reference) if narrow else None
    yard = Yardstick("TD", dtype, np.arange(40), candidate, reference, noise, allowed, sums=ties, shape=(40, 30))
    with np.errstate(invalid="ignore"):  # infinities of masks
        residue, error = yard.residue(emulated), norm(finite(candidate - reference))

    def same(a, b):
        assert a == pytest.approx(b, rel=1e-9)

    mine, other = found["unexplained"], residue.unexplained
    for name in ("rel_l2", "u", "excess"):
        same(getattr(mine, name), getattr(other, name))
    for name in ("gain", "mean"):
        same(getattr(mine, name).value, getattr(other, name).value)
        same(getattr(mine, name).noise, getattr(other, name).noise)
    same(mine.componentwise[0], other.componentwise[0])
    assert mine.componentwise[1] == other.componentwise[1]
    assert found["slices"] == residue.slices
    for scope, numbers in residue.scopes.items():
        for name, (value, index) in numbers.items():
            same(found["scopes"][scope][name][0], value)
            assert found["scopes"][scope][name][1] == index
    clean = finite(candidate)
    same(found["explained"][EQUATIONS], json_number(explained_share(clean, norm(clean - shown), finite(emulated))))
    same(found["ratio"], error / norm(finite(emulated) - shown))
    assert "elided" not in found  # of equal ways the first, of all the nearest


def test_where_nothing_is_left_every_number_is_nought():
    exact = DRAW.standard_normal((9, 5))
    stored = exact.astype(ml_dtypes.bfloat16)
    found = undrawn.undrawn_numbers(stored, exact, {(): upper(stored.astype(np.float64))})
    u = found["unexplained"]
    assert (u.excess, u.rel_l2, u.componentwise) == (0.0, 0.0, (0.0, (0, 0)))
    assert found["explained"] == {EQUATIONS: 1.0}


@pytest.mark.parametrize("small", [True, False])
def test_taps_without_floats_are_no_points(tmp_path, monkeypatch, small):
    """An order and a mask: they ended compare."""
    w, x = DRAW.standard_normal((8, 8)).astype(np.float32), DRAW.standard_normal((6, 8)).astype(np.float32)

    def call(w, x):
        order, mask = tap(jnp.argsort(x, -1), "order"), tap(x > 0, "mask")
        y = tap(jnp.where(mask, x @ w, -jnp.inf), "scores")
        return tap(jnp.take_along_axis(y, order, -1).astype(jnp.bfloat16), "sorted")

    monkeypatch.setattr(remade, "small", lambda _: small)
    program = Program(call, w, {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    assert [p.name for p in opened.record.points] == ["scores", "sorted"]
    assert opened.record.warnings == ("taps without floats are no points: order, mask",)
    taps = opened.tensors("a", 0, "taps")
    assert set(taps) == {"scores", "sorted"}
    found = Emulations(prepare_program(program)).records(opened, "a", 0, taps, (w, x))
    assert [e.point for e in found] == ["scores", "sorted"]
    assert all(e.unexplained is not None and closes(e) for e in found)
    scores = next(e for e in found if e.point == "scores")
    assert isinstance(scores.explained[EQUATIONS], float)  # of what is finite; masked scores are no error


@pytest.mark.turn  # 3 s
@pytest.mark.parametrize("small", [True, False])
def test_what_is_finite_where_its_emulation_overflows_is_held_to_fp64(tmp_path, monkeypatch, small):
    """A product of 96,000 is infinite in float16; 5 was recorded instead, which no number of what is finite showed."""
    w, x = DRAW.standard_normal((16, 16)).astype(np.float16), DRAW.standard_normal((8, 16)).astype(np.float16)
    x[3], w[:, 5] = 200, 30
    monkeypatch.setattr(remade, "small", lambda _: small)
    program = Program(lambda w, x: tap(x @ w, "product"), w, {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    honest = opened.tensors("a", 0, "taps")["product"]
    assert np.isinf(honest[3, 5])
    off = np.array(honest)
    off[3, 5] = 5
    for product in (honest, off):
        (e,) = Emulations(prepare_program(program)).records(opened, "a", 0, {"product": product}, (w, x))
        assert closes(e) == (product is honest)
        assert e.nonfinite == (product is honest)  # which the gate judges by itself


@pytest.mark.parametrize("sums", [None, 1e-6])
def test_what_an_emulation_that_is_not_finite_leaves_is_the_error(sums):
    exact = DRAW.standard_normal((4, 1, 6))
    emulated, candidate = exact.copy(), exact + 0.25
    emulated[0, 0, :2] = np.inf, np.nan
    noise = Noise(np.ones(exact.shape), *np.zeros((2, 0, 4, 1)), 0.0)
    given = None if sums is None else np.full(exact.shape, sums)
    yard = Yardstick("TD", "bfloat16", np.arange(4), candidate, exact, noise, np.ones(exact.shape), sums=given)
    assert yard._remainder(emulated) == pytest.approx(candidate - exact)


def test_masked_scores_are_explained_by_what_is_finite_in_drawn_noise_too():
    stored, exact, made, _ = arrays("bfloat16", special=True)
    drawn = [np.where(np.isfinite(made), made + DRAW.standard_normal(made.shape) * 1e-3, made) for _ in range(3)]
    with np.errstate(invalid="ignore"):
        found = judged.local_numbers(stored, judged.PlaceRows(exact, {(): made}, drawn))
    clean, shown = finite(canonical(stored, "TD")), finite(canonical(exact, "TD"))
    share = 1 - (norm(clean - finite(canonical(made, "TD"))) / norm(clean - shown)) ** 2
    assert found["explained"] == {EQUATIONS: pytest.approx(share)}
    assert np.isfinite(found["ratio"])

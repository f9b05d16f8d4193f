"""How far values are from FP64 is told with the verdict, and a stated limit fails what rounding explains."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from precaudit import Program, gate
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.judging.farthest import Sizes, ways_made
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.reports.headline import headline, how_far
from precaudit.schema.digits import percent
from precaudit.schema.places import Place
from precaudit.schema.records.errors import KINDS, ForwardError

AT = Place("a", "call", 0, 3, "scores")


def turning(params, x):
    """Return sines of angles 2²² times as large as what a product leaves in float32."""
    return jnp.sin(jnp.float32(2.0**22) * (x @ params))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.standard_normal((16, 16)) / 2, jnp.float32) for _ in range(2))
    program = Program(turning, w, {"a": (x,)}, outputs="y")
    opened = trace_program(program, tmp_path_factory.mktemp("sizes") / "run")
    compare_program(opened, program)
    wanted = np.sin(2.0**22 * (np.asarray(x, np.float64) @ np.asarray(w, np.float64)))
    found = np.asarray(jax.jit(turning)(w, x), np.float64)
    return opened.folder, float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_the_first_sentence_says_how_far_what_rounding_explains_is_from_fp64(folder):
    run, size = folder
    judged = gate(run)
    assert judged.exit_code == 0
    assert judged.farthest.whole == pytest.approx(size, rel=1e-3)
    assert 0.1 < size < 1
    sentence = headline(judged, str(run)).text
    assert sentence.startswith("✓ rounding explains all")
    assert f"{100 * size:.2g} % away from FP64" in sentence


def test_a_stated_limit_fails_it_and_one_that_it_keeps_does_not(folder, capsys):
    run, size = folder
    for limit, code in ((size * 0.9, 1), (size * 1.1, 0)):
        assert gate(run, at_most={"forward": limit}).exit_code == code
        assert command(["gate", str(run), "--limit", f"forward={limit}"]) == code
    out = capsys.readouterr().out
    assert "over its stated limit" in out
    assert "size: " in out
    for kind, limit in (("state", 1.0), ("forward", -1.0), ("forward", float("nan")), ("forward", "0.1")):
        with pytest.raises(UserError, match=f"limit {kind}="):
            gate(run, at_most={kind: limit})
    with pytest.raises(UserError, match="'froward' is no kind of relative error; did you mean 'forward'"):
        gate(run, at_most={"froward": 1.0})
    for text in ("forward", "forward=much", "=1"):
        assert command(["gate", str(run), "--limit", text]) == 2


def test_the_largest_of_each_kind_counts_and_what_is_not_finite_does_not():
    sizes = Sizes()
    for kind, size in (("forward", 0.2), ("forward", 0.73), ("forward", "nan"), ("local", 0.4), ("accum", 9.0)):
        sizes.add(AT.record(KINDS[kind], "run", "fp64", rel_l2=size))
    found = sizes.farthest({"scores": ("1 pass",)})
    assert (found.whole, found.own, found.ways) == (0.73, 0.4, ("1 pass",))
    assert how_far(found, {"scores": "models/rope.py:9"}) == (
        "scores of layer 3 is 73 % away from FP64; the largest error of one operation by itself is 40 %: scores of "
        "layer 3 (rope.py:9), products in 1 pass"
    )
    assert Sizes().farthest({}) is None
    sizes = Sizes()
    sizes.add(AT.record(KINDS["forward"], "run", "fp64", rel_l2=0.0, nonfinite=8))  # of what is finite: nothing
    assert sizes.farthest({}) is None


def test_what_cancels_is_named_and_its_relative_error_is_not_told():
    """The gradient of a key's bias is 0: rounding is as large as it is, or 1e13 times."""
    sizes = Sizes()
    for point, size, noise in (("q", 3e13, 2e13), ("k", 1.5, 1.0), ("scores", 0.2, 0.99), ("v", 0.1, None)):
        sizes.add(
            msgspec.structs.replace(AT.record(ForwardError, "run", "fp64", rel_l2=size, noise=noise), point=point)
        )
    found = sizes.farthest({})
    assert (found.whole, found.cancelled) == (0.2, ("q", "k"))
    assert how_far(found, {}) == "scores of layer 3 is 20 % away from FP64, without q and 1 more, whose terms cancel"


def test_products_that_are_told_by_number_tell_a_way_where_they_have_one():
    one = ways_made([{"product.0": ("1 pass",), "product.1": ("1 pass",)}])
    two = ways_made([{"product.0": ("1 pass",)}, {"product.0": ("float32",)}])
    assert (one[""], two[""]) == (("1 pass",), ())


def test_percentages_have_two_digits():
    assert [percent(x) for x in (0.734, 0.0041, 1.5e-7, 2.5)] == ["73 %", "0.41 %", "1.5e-5 %", "250 %"]

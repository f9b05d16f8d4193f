"""points.jsonl of a program's run: a line for each tensor that was recorded, as a run of a model has it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import precaudit
from precaudit import Entry, Program
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.recording.runs.hashes import tensor_hash
from precaudit.recording.runs.programs import open_program_run
from precaudit.reports.points import recorded_entries
from tests.helpers.paths import EXAMPLES

DRAW = np.random.default_rng(4)
W = jnp.asarray(DRAW.standard_normal((3, 4, 4)), jnp.bfloat16)


def stack(w, x):
    def layer(x, w):
        return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "up")), None

    return jax.lax.scan(layer, x, w)[0]


def program(**changes):
    cases = {n: (jnp.full((2, 4), i + 1, jnp.bfloat16),) for i, n in enumerate("ab")}
    then = {"decode": Entry(stack, lambda _inputs, out: (out,), 1, lambda _inputs, out: (out,), "y")}
    return replace(Program(stack, W, cases, outputs="y", entry="prefill", then=then), **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return precaudit.trace(program(), tmp_path_factory.mktemp("runs") / "run")


def test_each_tensor_has_a_line_with_its_hash_and_statistics(run):
    lines = {(p.prompt, p.phase, p.step, p.layer, p.point): p for p in run.points}
    calls = [("prefill call", 0), ("decode call", 0), ("decode call", 1)]
    layers = {p.name: range(3) if p.stacked else [None] for p in (*run.record.points, *run.record.outputs)}
    assert layers["up"] == range(3)
    each = {(case, *call, layer, p) for case in "ab" for call in calls for p, its in layers.items() for layer in its}
    assert lines.keys() == each
    assert [{p.phase for p in one.points} for one in run.entries] == [{"prefill call"}, {"decode call"}]
    for p in lines.values():
        one = run.entries[p.phase == "decode call"]
        kind = "outputs" if p.file.endswith("outputs.safetensors") else "taps"
        held = one.tensors(p.prompt, p.step, kind)[p.key]
        x = held if p.layer is None else held[p.layer]
        assert (p.shape, p.dtype, p.hash) == (x.shape, "bfloat16", tensor_hash(x))
        np.testing.assert_array_equal(run.tensor(p), x)
        exact = x.astype(np.float64)
        assert [p.stats.min, p.stats.max] == [exact.min(), exact.max()]
        np.testing.assert_allclose([p.stats.mean, p.stats.rms], [exact.mean(), np.sqrt((exact**2).mean())], rtol=1e-6)


def test_layers_keep_their_numbers(tmp_path):
    some = precaudit.trace(program(then={}), tmp_path / "run", layers="2", points="up")
    assert {p.layer for p in some.points} == {2}
    (held,) = some.tensors("a", 0, "taps")["up"]
    (line,) = [p for p in some.points if (p.prompt, p.point) == ("a", "up")]
    assert line.hash == tensor_hash(held) == tensor_hash(some.tensor(line))


def test_what_was_not_run_has_no_line(tmp_path):
    def either(w, x, yes):
        return jax.lax.cond(yes, lambda x: x @ w[0], lambda x: x, x)

    cases = {"yes": (jnp.ones((2, 4), jnp.bfloat16), True), "no": (jnp.ones((2, 4), jnp.bfloat16), False)}
    opened = precaudit.trace(program(call=either, cases=cases, then={}), tmp_path / "run")
    product = next(p.name for p in opened.record.points if p.primitive == "dot_general")
    assert [p.prompt for p in opened.points if p.point == product] == ["yes"]


def test_what_is_not_finite_is_counted(tmp_path, capsys):
    cases = {"a": (jnp.asarray([[1, np.inf, 0, 1], [np.nan, 1, 1, 1]], jnp.bfloat16),)}
    opened = precaudit.trace(program(cases=cases, then={}), tmp_path / "run")
    first = next(p for p in opened.points if (p.point, p.layer) == ("up", 0))
    x = np.asarray(cases["a"][0] @ W[0]).astype(np.float64)
    assert (first.stats.nan, first.stats.inf) == (np.isnan(x).sum(), np.isinf(x).sum())
    (points,) = recorded_entries(tmp_path / "run").values()
    shown = next(p for p in points if p.name == "up")
    assert shown.nonfinite == sum(p.stats.nan + p.stats.inf for p in opened.points if p.point == "up")
    assert command(["points", str(tmp_path / "run"), "--points", "up"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    assert "NaN or inf" in head
    assert f" {shown.nonfinite} " in row


def test_a_point_is_shown_with_the_range_of_all_its_values(run):
    (prefill, _) = recorded_entries(run.folder).values()
    every = np.concatenate([run.entries[0].tensors(case, 0, "taps")["up"].astype(np.float64).ravel() for case in "ab"])
    up = next(p for p in prefill if p.name == "up")
    assert (up.largest, up.nonfinite) == (np.abs(every).max(), 0)
    assert up.rms == pytest.approx(np.sqrt((every**2).mean()), rel=1e-6)


def test_lines_that_were_altered_are_refused(tmp_path):
    opened = precaudit.trace(program(then={}), tmp_path / "run")
    path = tmp_path / "run" / "points.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"layer":1', b'"layer":2', 1))
    for read in (opened.verify, lambda: opened.points):
        with pytest.raises(UserError, match=r"points\.jsonl was altered since it was recorded"):
            read()
    path.unlink()
    with pytest.raises(UserError, match=r"points\.jsonl is missing"):
        assert opened.points


def test_sketches_have_no_lines_and_a_run_of_before_none(tmp_path):
    assert command(["trace", f"{EXAMPLES / 'own_decoder.py'}:program", "--stats-only", "-o", str(tmp_path / "s")]) == 0
    assert not (tmp_path / "s" / "points.jsonl").exists()
    old = precaudit.trace(program(then={}), tmp_path / "old")
    hashes = {name: x for name, x in old.record.hashes.items() if name != "points.jsonl"}
    (tmp_path / "old" / "points.jsonl").unlink()
    (tmp_path / "old" / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(old.record, hashes=hashes)))
    again = open_program_run(tmp_path / "old")
    assert again.points == []
    again.verify()
    assert {p.name for p in recorded_entries(tmp_path / "old")["prefill"]} >= {"up"}

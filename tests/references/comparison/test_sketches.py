"""Runs of which sketches are kept: estimates against the truth, and what is told exactly."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.sketches import check_projections, grid_of, sketch_value, sketching
from precaudit.numbers.row_hashes import row_hashes
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.resuming import whole_cases
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.folders import prepare_folder
from precaudit.recording.runs.programs import ProgramRun, open_program_run
from precaudit.references.comparison.sketches import _wrong, compare_sketches
from precaudit.schema.records.lines import read_record
from precaudit.schema.records.manifests import MANIFEST

N = 128


def of_kind(rng, kind, shape):
    if kind == "dense":
        return rng.standard_normal(shape)
    if kind == "product":
        return np.multiply.outer(rng.standard_normal(shape[:-1]), rng.standard_normal(shape[-1:]))
    found = np.zeros(shape)
    if kind == "channel":
        found[..., rng.integers(shape[-1])] = rng.standard_normal(shape[:-1])
    else:
        found[rng.integers(shape[0])] = rng.standard_normal(shape[1:])
    return found


@pytest.mark.parametrize("shape", [(64, 64), (37, 4, 32), (64, 512)])
def test_projections_tell_the_size_of_a_difference(shape):
    """Within 15 % at 95 %, whatever its kind."""
    projected = jax.jit(lambda x: sketch_value(x, N)["projections"])
    rng = np.random.default_rng(0)
    for kind in ("dense", "product", "channel", "row"):
        ratios = []
        for _ in range(100):
            y = rng.standard_normal(shape).astype(np.float32)
            x = (y + 1e-3 * of_kind(rng, kind, shape)).astype(np.float32)
            apart = np.asarray(projected(x), np.float64) - np.asarray(projected(y), np.float64)
            ratios.append(np.linalg.norm(apart) / np.linalg.norm(x.astype(np.float64) - y))
        assert np.mean(np.abs(np.array(ratios) - 1) <= 0.15) >= 0.95, kind


def test_what_is_exact_of_a_sketch():
    x = np.random.default_rng(0).standard_normal((5, 3, 8)).astype(np.float32)
    x[2, 1, 4], x[3, 0, 0], x[3, 0, 1:3] = -9, np.nan, np.inf
    held = np.where(np.isfinite(x), x, 0)
    made = {name: np.asarray(part) for name, part in sketch_value(jnp.asarray(x), 0).items()}
    assert (made["hashes"] == row_hashes(x)).all()
    assert made["size"][1] == 9
    assert made["counts"].tolist() == [1, 2]
    assert made["rows"][:, 1].tolist() == np.abs(held).max((1, 2)).tolist()
    assert made["rows"][:, 2].tolist() == [0, 0, 0, 3, 0]
    assert made["heads"][:, 1].tolist() == np.abs(held).max((0, 2)).tolist()
    assert np.allclose(made["heads"][:, 0], held.sum((0, 2)), atol=1e-5)


def test_hashes_are_of_the_values_that_a_run_records(tmp_path):
    """As they are stored, whatever a compiler would hand on unrounded: in scans, branches, shards and gradients."""

    def norm(x):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    def layer(x, w):
        x = x + jax.nn.silu(norm(x) @ w) * x
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.tanh(x @ w) * 2, x), None

    def loss(w, x):
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).mean()

    def over_shards(w, x):
        mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        cut, whole = jax.sharding.PartitionSpec("model", None), jax.sharding.PartitionSpec()
        stack = jax.shard_map(
            lambda w, x: jax.lax.scan(layer, x, w)[0], mesh=mesh, in_specs=(whole, cut), out_specs=cut
        )
        return stack(w, x)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(s) / 8, jnp.bfloat16) for s in ((3, 32, 32), (12, 32)))
    for i, call in enumerate((lambda w, x: jax.lax.scan(layer, x, w)[0], jax.grad(loss), over_shards)):
        program = precaudit.Program(call, w, {"a": (x,)}, outputs="y")
        whole = trace_program(program, tmp_path / f"{i}-whole")
        sketched = trace_program(program, tmp_path / str(i), options=ProgramTraceOptions(sketch=0))
        held, made = (run.tensors("a", 0, "taps") for run in (whole, sketched))
        assert any(p.stacked for p in whole.record.points)
        for p in whole.record.points:
            rows = grid_of(p.shape)[0]
            for step, hashes in zip(held[p.name].reshape(-1, *p.shape), made[f"{p.name}/hashes"], strict=True):
                assert (row_hashes(step.reshape(rows, -1)) == hashes).all(), p.name


def test_no_tensor_is_kept_until_the_program_ends():
    """What sketches take does not grow with the layers by more than they are."""

    def call(w, x, layers):
        def layer(h, _):
            return h + jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, None, length=layers)[0]

    w, x = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16)
    took = []
    for layers in (4, 32):
        program = precaudit.Program(partial(call, layers=layers), w, {"a": (x,)}, outputs="h")
        compiled = jax.jit(sketching(prepare_program(program), lambda _out: {}, N)).lower(w, x).compile()
        kept = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(compiled.out_info[1]))
        took.append(compiled.memory_analysis().temp_size_in_bytes + kept)
    assert took[1] - took[0] < 2 * kept


def test_rows_and_heads_of_a_value():
    """A batch of one is no axis; where it is more, its rows follow one another."""
    shapes = [(1, 5, 3, 8), (2, 5, 3, 8), (1, 5, 8), (5, 8), (1, 8), (8,), ()]
    assert [grid_of(s) for s in shapes] == [
        (5, 3, 8), (10, 3, 8), (5, 1, 8), (5, 1, 8), (1, 1, 8), (1, 1, 8), (1, 1, 1)
    ]  # fmt: skip


def test_a_cache_is_held_to_what_was_written():
    rows = np.arange(8, dtype=np.uint32).reshape(4, 2)
    written, before = rows[2:3], np.where(np.arange(4)[:, None] < 2, rows, 0).astype(np.uint32)
    now = before.copy()
    now[2] = rows[2]
    assert _wrong(now, written, before) == ""
    assert _wrong(before, written, before) == "1 of 1 rows that were written are not in it"
    now[0] = 77
    assert _wrong(now, written, before) == "2 of its rows changed, and 1 were written"


def program_of(weights):
    def call(w, x):
        def layer(h, _):
            return h + jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, None, length=2)[0]

    x = jnp.asarray(np.random.default_rng(1).standard_normal((24, 64)), jnp.bfloat16)
    return precaudit.Program(call, jnp.asarray(weights, jnp.bfloat16), {"a": (x,)}, outputs="h")


def test_two_runs_of_sketches_say_what_their_tensors_would(tmp_path, capsys):
    """Of each value the size of the difference within 15 %, which rows have other bits, and the largest sizes."""
    w = np.random.default_rng(0).standard_normal((64, 64)) / 8
    programs = {"a": program_of(w), "b": program_of(w * (1 + 2.0**-7))}
    for name, program in programs.items():
        trace_program(program, tmp_path / name, options=ProgramTraceOptions(sketch=N))
        trace_program(program, tmp_path / f"{name}-whole")
    whole = [open_program_run(tmp_path / f"{name}-whole").tensors("a", 0, "taps") for name in programs]
    found = compare_sketches(tmp_path / "a", tmp_path / "b")
    assert len([r for r in found.records if r.point != "outputs.h"]) == 5  # of two layers, and of the whole
    assert len([r for r in found.records if r.point == "outputs.h"]) == 1
    for r in found.records:
        if r.point == "outputs.h":
            continue
        x, y = (held[r.point] if r.layer is None else held[r.point][r.layer] for held in whole)
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert r.equal == (x == y).all()
        if r.equal:
            continue
        true = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert abs(r.rel_l2 / true - 1) < 0.15
        assert r.largest == (np.abs(x).max(), np.abs(y).max())
        assert (r.rows, r.differing) == (24, int((x != y).any(axis=1).sum()))
    size = [(tmp_path / name / "tensors").stat().st_size for name in ("a", "a-whole")]
    assert size[0] <= size[1]
    again = compare_sketches(tmp_path / "a", tmp_path / "a")
    assert all(r.equal for r in again.records)
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(found.records)
    [folder] = found.folders
    assert len((folder / "sketches.jsonl").read_text().splitlines()) == len(found.records)
    record = read_record(tmp_path / "a" / MANIFEST, ProgramRun, "a program's run")
    assert whole_cases(tmp_path / "a", record) == ("a",)
    with pytest.raises(UserError, match="differs in --sketch"):
        trace_program(programs["a"], tmp_path / "a", options=ProgramTraceOptions(sketch=64, resume=True))
    for command in ("compare", "gate", "diagnose"):
        assert run([command, str(tmp_path / "a")]) == 2
        assert "keeps no tensors" in capsys.readouterr().err
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b-whole")]) == 2
    assert "no sketches" in capsys.readouterr().err


def test_wrong_numbers_of_projections_are_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="power of two"):
        check_projections(100)
    assert run(["trace", "tiny", "--sketch", "128", "--stats-only", "-o", str(tmp_path / "r")]) == 2
    assert "not both" in capsys.readouterr().err
    assert run(["trace", "tiny", "--sketch", "128", "--batch", "2", "-o", str(tmp_path / "r")]) == 2
    assert "leave out --batch" in capsys.readouterr().err


@pytest.mark.slow  # 60 s: a model's three programs, twice
def test_a_model_keeps_sketches_as_a_program_does(tmp_path):
    for name, more in (("a", []), ("b", ["--set", "scores=float32"])):
        given = ["--prompt", "s1_fact", "--decode-steps", "2", "--points", "q,k,attn_out,logits"]
        assert run(["trace", "tiny", "--sketch", "128", "-o", str(tmp_path / name), *given, *more]) == 0
    found = compare_sketches(tmp_path / "a", tmp_path / "b")
    assert found.caches == 2 * 3 * 5  # keys and values, decode steps, layers
    assert (found.faults, found.lacking) == ((), ())
    assert {r.phase for r in found.records} == {"prefill call", "decode call", "rescore call"}
    off = [r.rel_l2 for r in found.records if r.rel_l2]
    assert 1e-4 < max(off) < 0.05


def test_a_folder_of_a_models_sketches_is_a_run_without_tensors(tmp_path, capsys):
    """Of every command; and --force replaces it, but nothing beside it."""
    folder = tmp_path / "m"
    (folder / "tokens-4").mkdir(parents=True)
    (folder / "tokens-4" / MANIFEST).write_text('{"kind": "program"}')
    output = str(tmp_path / "o")
    for command in (
        ["gate"],
        ["diagnose"],
        ["report"],
        ["open"],
        ["export", "--csv", output],
        ["baseline", "-o", output],
    ):
        assert run([command[0], str(folder), *command[1:]]) == 2
        assert "keeps no tensors" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds a sketched run already"):
        prepare_folder(folder, force=False)
    (folder / "tokens-5").mkdir()
    with pytest.raises(UserError, match="holds 'tokens-5', which is not part of a run"):
        prepare_folder(folder, force=True)
    (folder / "tokens-5").rmdir()
    prepare_folder(folder, force=True)
    assert not list(folder.iterdir())


@pytest.mark.slow  # 20 s: a model's three programs
def test_a_model_without_further_steps_keeps_sketches(tmp_path):
    given = ["--stats-only", "--prompt", "s1_fact", "--points", "k", "--decode-steps"]
    assert run(["trace", "tiny", *given, "0", "-o", str(tmp_path / "a")]) == 0
    found = compare_sketches(tmp_path / "a", tmp_path / "a")
    assert (found.caches, found.faults) == (2 * 5, ())
    assert run(["trace", "tiny", *given, "-1", "-o", str(tmp_path / "b")]) == 2

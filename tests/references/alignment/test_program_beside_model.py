"""The shipped example beside the checkpoint that it writes: the map, the command, and the textbook without a map."""

import json
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import precaudit
from precaudit.cli import run
from precaudit.errors import CannotJudge, UserError
from precaudit.models.checkpoints.names import parse_map
from precaudit.references.mapped_tensors import mapped_tensors, parameter_leaves
from precaudit.references.names_map import ProgramNames
from tests.helpers.paths import ROOT
from tests.references.alignment.layouts import stacked, tensors

PROGRAM = "own_decoder.py:program"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the example, its checkpoint, and one that scales scores otherwise."""
    folder = tmp_path_factory.mktemp("align")
    for name in ("own_decoder.py", "own_decoder.json"):
        (folder / name).write_text((ROOT / "examples" / name).read_text())
    source = (folder / "own_decoder.py").read_text().replace("steps=7", "steps=1")
    (folder / "honest.py").write_text(source)
    (folder / "twice.py").write_text(source.replace("HEAD**-0.5", "HEAD**-1.0"))
    subprocess.run([sys.executable, folder / "own_decoder.py"], check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_the_command_finds_every_parameter_and_writes_the_map(folder, capsys):
    assert run(["align", PROGRAM, "own_decoder", "-o", "found.toml"]) == 0
    assert capsys.readouterr().out.startswith("✓ every parameter")
    layout = parse_map(folder / "found.toml", (folder / "found.toml").read_bytes(), ProgramNames)
    checkpoint = precaudit.load("own_decoder").checkpoint.tensors
    leaves = parameter_leaves(precaudit.recording.programs.loading.load_program(PROGRAM).params)
    read = mapped_tensors(leaves, layout, checkpoint.shapes(), "found.toml")
    assert all(np.array_equal(read(n), checkpoint.read_tensor(n)) for n in checkpoint.shapes())


def test_the_map_has_the_tensors_of_the_one_that_was_written_by_hand(folder):
    assert run(["align", PROGRAM, "own_decoder", "-o", "found.toml"]) == 0
    found, known = (
        tomllib.loads(p.read_text())["tensors"] for p in (folder / "found.toml", ROOT / "examples/own_decoder.toml")
    )
    assert {n: e["path"] for n, e in found.items()} == {n: e["path"] for n, e in known.items()}


def test_records_are_printed_a_line_each(capsys):
    assert run(["align", PROGRAM, "own_decoder", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 11
    assert {line["found"] for line in lines} == {1.0}


@pytest.mark.turn  # 20 s
def test_a_wrong_formula_is_found_by_the_model_alone(capsys):
    for name, mark in (("honest", "✓"), ("twice", "✗")):
        assert run(["trace", f"{name}.py:program", "-o", f"runs/{name}"]) == 0
        capsys.readouterr()
        assert run(["compare", f"runs/{name}", "--model", "own_decoder", "--accum", "none"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(mark), said[:300]
        assert (name == "twice") == ("the formula is not the reference's" in said)
    found = precaudit.diagnose("runs/twice", model="own_decoder").findings
    assert {(f.kind, f.layer) for f in found} == {("semantics", 0)}
    assert {f.point for f in found} <= {"scores", "probs"}


SHARDS = """
half = HIDDEN // 2
up = params["layers"].pop("up")
params["layers"] |= {"up_a": up[..., :half], "up_b": up[..., half:]}
params["low"], params["high"] = params["embed"][:100], params.pop("embed")[100:]
program ="""


@pytest.mark.slow
def test_rows_in_several_parameters_are_held_against_the_textbook(folder, capsys):
    """The vocabulary in two shards and up in two halves; these exchanged by hand in the map fail."""
    source = (folder / "honest.py").read_text()
    source = source.replace('weights["up"]', 'jnp.concatenate([weights["up_a"], weights["up_b"]], axis=-1)')
    source = source.replace('params["embed"]', 'jnp.concatenate([params["low"], params["high"]])')
    head, tail = source.split("\nprogram =")
    (folder / "shards.py").write_text(head + SHARDS + tail)
    assert run(["trace", "shards.py:program", "-o", "runs/shards"]) == 0
    assert run(["compare", "runs/shards", "--model", "own_decoder", "--accum", "none"]) == 0
    assert run(["gate", "runs/shards"]) == 0
    written = (folder / "runs/shards/aligned.toml").read_text()
    assert 'path = ["low", "high"]' in written
    halves, exchanged = (f'["layers/up_{a}", "layers/up_{b}"]' for a, b in ("ab", "ba"))
    assert halves in written
    (folder / "own.toml").write_text(written.replace(halves, exchanged))
    assert run(["compare", "runs/shards", "--map", "own.toml", "--config", "own_decoder/config.json"]) == 0
    capsys.readouterr()
    assert run(["gate", "runs/shards"]) == 1
    assert "act" in capsys.readouterr().out


@pytest.mark.slow  # 10 s
def test_points_of_a_map_without_tensors_are_taken(folder, capsys):
    points = (ROOT / "examples/own_decoder.toml").read_text()
    (folder / "points.toml").write_text("tokens = 0\n" + points[points.index("[points]") :])
    assert run(["trace", "twice.py:program", "-o", "runs/mapped"]) == 0
    capsys.readouterr()
    assert run(["compare", "runs/mapped", "--model", "own_decoder", "--map", "points.toml", "--accum", "none"]) == 0
    assert re.match(r"✗ (attended|probs) of layer 0", capsys.readouterr().out)
    assert (
        run(["compare", "runs/mapped", "--model", "own_decoder", "--map", str(ROOT / "examples/own_decoder.toml")]) == 2
    )
    assert "it has tensors of its own" in capsys.readouterr().err


def test_another_model_has_nothing_in_common(capsys):
    assert run(["align", PROGRAM, "tiny"]) == 3
    assert "no vector of values in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "error", "says"),
    [
        ({}, UserError, "closes over is a constant"),
        ({"w": np.ones((4, 8), np.int8)}, UserError, "integers of quantised weights"),
        ({"w": np.full((4, 8), np.nan, np.float32)}, CannotJudge, "NaN"),
        ({"w": np.ones((4, 9), np.float32)}, CannotJudge, "no vector of values in common"),
    ],
)
def test_what_cannot_be_aligned_is_said(own, error, says):
    with pytest.raises(error, match=says):
        precaudit.align(own, {"t": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)})


def test_quantised_weights_are_not_said_to_be_missing():
    t = tensors()
    own = stacked(t)
    scale = np.abs(own["layers"]["up"]).max(axis=1, keepdims=True) / 127
    own["layers"]["up"] = {"int8": np.round(own["layers"]["up"] / scale).astype(np.int8), "scale": scale}
    with pytest.raises(CannotJudge, match=r"no floats, the first 'layers/up/int8', and 4 tensors are nowhere else"):
        precaudit.align(own, t)

"""A program's run once more: the same tensors, bit for bit, or which of them differ."""

from dataclasses import replace

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import precaudit
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.recording.programs.loading import load_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import file_name, open_program_run
from tests.helpers.paths import EXAMPLES
from tests.helpers.tpus import needs_libtpu

OWN = f"{EXAMPLES / 'own_decoder.py'}:program"


@pytest.fixture
def run(tmp_path):
    return precaudit.trace(
        load_program(OWN), tmp_path / "run", points="query", layers="1", prompt="b", positions="last:2", reference=OWN
    )


def test_what_was_recorded_is_recorded_again(run, tmp_path):
    again = precaudit.repeat(run, tmp_path / "again", load_program(OWN))
    assert (again.first, again.differing) == (None, 0)
    assert again.tensors > 2
    ours, theirs = again.run.record, run.record
    assert (ours.asked, ours.layers, ours.cases, ours.began) == (theirs.asked, theirs.layers, theirs.cases, 6)


def test_a_tensor_with_other_bits_is_named(run, tmp_path):
    name = file_name(run.record, "b", 1, "taps")
    tensors = load_file(run.folder / name)
    tensors["query"] = (tensors["query"].astype(np.float32) * 2).astype(tensors["query"].dtype)
    save_file(tensors, run.folder / name)
    hashes = {**run.record.hashes, name: file_hash(run.folder / name)}
    write_manifest(run.folder, msgspec.structs.replace(run.record, hashes=hashes))
    again = precaudit.repeat(open_program_run(run.folder), tmp_path / "again", load_program(OWN))
    assert (again.first, again.differing) == (("b", "call", 1, None, "query"), 1)


def test_another_program_is_refused_before_it_runs(run, tmp_path):
    other = replace(load_program(OWN), call=lambda params, *inputs: load_program(OWN).call(params, *inputs)[0] * 2)
    with pytest.raises(UserError, match="the program is not the one that was traced"):
        precaudit.repeat(run, tmp_path / "again", replace(other, outputs="logits", steps=0, advance=None))
    assert not (tmp_path / "again").exists()


def test_the_command_says_that_nothing_differs(tmp_path, capsys):
    assert command(["trace", OWN, "-o", str(tmp_path / "run"), "--points", "query", "--positions", "0"]) == 0
    assert command(["trace", "--repeat", str(tmp_path / "run"), "-o", str(tmp_path / "again")]) == 0
    assert "tensors are bit-identical with" in capsys.readouterr().out


@needs_libtpu
@pytest.mark.slow
def test_a_predicted_run_is_predicted_again(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
    program = precaudit.Program(lambda w, x: x @ w, x.T, {"a": (x,)}, outputs="out")
    before = precaudit.trace(program, tmp_path / "run", device="tpu-predicted:v5e")
    again = precaudit.repeat(before, tmp_path / "again", program)
    assert again.run.record.device == before.record.device == "TPU v5e:2x2 (predicted)"
    assert again.differing == 0

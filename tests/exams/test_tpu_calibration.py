"""The calibration kit: one file of what a device computes, held against what is predicted. Tried on a CPU's file."""

import sys

import numpy as np
import pytest

from exams.tpu_calibration import compare, record
from exams.tpu_calibration.programs import PROGRAMS
from tests.helpers.tpus import needs_libtpu


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """What this CPU makes of the programs."""
    path = tmp_path_factory.mktemp("calibration") / "cpu.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["record", str(path), "--device", "cpu"])
        record.main()
    return path


def test_inputs_are_the_same_everywhere():
    x, y = PROGRAMS["bf16"].inputs()
    assert (x.shape, str(x.dtype), y.shape) == ((64, 256), "bfloat16", (256, 128))
    assert float(PROGRAMS["f32 default"].inputs()[0][0, 0]) == float(
        np.float32(np.random.default_rng(20260101).normal())
    )


def test_a_file_holds_every_program_and_no_code(file):
    with np.load(file, allow_pickle=False) as held:
        assert set(held.files) == {"about", *PROGRAMS}
        assert all(np.isfinite(held[name]).all() for name in PROGRAMS)


@pytest.mark.turn  # 4 s
@needs_libtpu
def test_a_file_is_held_against_the_prediction(file, monkeypatch, capsys):
    """A CPU is told from a TPU by float32 at the default precision, and agrees at highest."""
    monkeypatch.setattr(sys, "argv", ["compare", str(file)])
    compare.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = {name: line for name in PROGRAMS for line in lines if line.startswith(f"{name:18}")}
    assert rows.keys() == PROGRAMS.keys()

    def distance(name):
        return float(rows[name][18:].split("%,")[1].split()[0])

    assert distance("f32 default") > 1e-3
    assert distance("f32 highest") < 1e-6
    assert distance("f32 row") < 1e-6


def test_other_shapes_are_said():
    assert compare.beside(np.zeros((2, 3)), np.zeros((3, 2))) == "shape (2, 3), not (3, 2)"
    assert compare.beside(np.ones(4), np.asarray([1.0, 1, 1, 2])).startswith("75 %, ")

"""A checkpoint with one weight that is NaN or infinite: never a pass, and the weight is named, not an operation."""

from pathlib import Path

import ml_dtypes  # noqa: F401  (names bfloat16 for safetensors)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exams.mistakes import altered
from precaudit.cli import run
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import ERROR_KINDS
from precaudit.schema.records.lines import read_lines
from precaudit.schema.selection import Selection

DOWN, QUERY, EMBEDDING = (
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.embed_tokens.weight",
)


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Let tables have all their columns, whatever the terminal is."""
    monkeypatch.setenv("COLUMNS", "160")


def record(folder: Path, name: str | None, value: float = 0.0, row: int = 3) -> Path:
    """Trace tiny with one value of a tensor replaced, with the default points."""
    checkpoint = altered()
    tensors = load_file(checkpoint / "model.safetensors")
    if name is not None:
        tensors[name][row, 5] = value
        save_file(tensors, checkpoint / "model.safetensors")
    options, select = TraceOptions(decode_steps=2, force=True), Selection.parse(phases="prefill,decode")
    trace(load(str(checkpoint), device="cpu"), folder, [Prompt(id="a", tokens=(1, 2, 3, 4))], select, options)
    return folder


def printed(capsys, *words):
    capsys.readouterr()
    code = run(list(map(str, words)))
    return code, capsys.readouterr().out


@pytest.mark.turn  # 4 s
def test_a_weight_between_recorded_points_is_named(tmp_path, capsys):
    folder = record(tmp_path / "run", DOWN, np.nan)
    _, said = printed(capsys, "compare", folder)
    assert said.startswith("✗ q of layer 3, prefill: 512 elements are NaN or infinite.")
    assert [line.split() for line in said.splitlines() if line.startswith(("q ", "logits "))] == [
        ["q", "NaN", "L3", "NaN", "L4", "✗", "none", "NaN", "L3", "NaN", "L4", "1.1"],
        ["logits", "NaN", "✗", "none", "NaN"],
    ]
    assert ["a", "prefill", "3", *["NaN"] * 6, "NO", "NaN", "NaN"] in [line.split() for line in said.splitlines()]
    code, said = printed(capsys, "gate", folder)
    assert code == 1
    assert f"note: weights: tensor '{DOWN}': 1 value is NaN or infinite" in said
    code, said = printed(capsys, "diagnose", folder)
    assert code == 1
    assert (
        "1. semantics: weights not finite — q of layer 3, prefill and decode\n"
        f"   weights: tensor '{DOWN}': 1 value is NaN or infinite; "
        "FP64 of the model is NaN from resid_out of layer 2 on\n"
        "   fails: 512 elements NaN or infinite\n"
        "   4 records, 1 prompt\n"
        "   worst element [0, 0, 0]: NaN, FP64 NaN\n"
    ) in said
    assert "nan" not in said


@pytest.mark.turn  # 9 s
def test_an_infinite_weight_makes_no_number_nan_but_its_own(tmp_path, capsys):
    """Equal infinities agree: what is finite beside them is explained, and no gain fails."""
    folder = record(tmp_path / "run", QUERY, np.inf)
    printed(capsys, "compare", folder)
    errors = [e for e in read_lines(folder / "errors.jsonl", ERROR_KINDS) if (e.kind, e.point) == ("local", "q")]
    step = next(e for e in errors if (e.phase, e.step, e.layer) == ("decode", 0, 2))
    assert step.nonfinite == 0
    assert step.explained["policy:bf16"] > 0.99
    assert np.isfinite(step.unexplained.gain.noise)
    code, said = printed(capsys, "gate", folder)
    assert code == 1
    assert "gain" not in said
    code, said = printed(capsys, "diagnose", folder)
    assert code == 1
    assert f"weights not finite — attn_out of layer 2, decode\n   weights: tensor '{QUERY}': 1 value" in said
    assert "exchanged" not in said


@pytest.mark.turn  # 11 s
def test_an_embedding_row_that_is_nan_blames_no_operation(tmp_path, capsys):
    """Its logit is NaN, so that it is the token sampled: what reads it is no exchange of q_proj and k_proj."""
    folder = record(tmp_path / "run", EMBEDDING, np.nan, row=10)
    printed(capsys, "compare", folder)
    code, said = printed(capsys, "diagnose", folder)
    assert code == 1
    assert "unknown: came in not finite — q of layer 0, decode" in said
    assert f"record more with --points all; weights: tensor '{EMBEDDING}': 1 value is NaN or infinite" in said
    assert f"semantics: weights not finite — logits, prefill\n   weights: tensor '{EMBEDDING}': 1 value" in said
    assert "exchanged" not in said


@pytest.fixture
def pair(tmp_path):
    return record(tmp_path / "broken", QUERY, np.nan), record(tmp_path / "right", None)


def test_values_that_are_nan_in_one_run_are_not_bit_equal(pair, capsys):
    _, said = printed(capsys, "compare", *pair)
    assert said.startswith("✗ q of layer 2, prefill of a: 8 elements NaN or infinite in one of the runs.")
    rows = [line.split() for line in said.splitlines() if line.startswith(("q ", "logits "))]
    assert [row[:7] for row in rows] == [
        ["q", "NaN", "L2", "NaN", "L3", "NaN", "L4"],
        ["logits", "NaN", "NaN", "NaN", "0", "of", "2"],
    ]

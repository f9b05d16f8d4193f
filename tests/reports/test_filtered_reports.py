"""Filters of a compared run: what gate, report, export and points show and count of it."""

import csv
import json
import shutil
from dataclasses import asdict

import pytest

from precaudit.cli import run
from precaudit.judging.gate import Criteria, gate, gate_selected
from precaudit.judging.looks import look_by
from precaudit.judging.recalled import recall_any
from precaudit.recording.opening import open_any
from precaudit.recording.runs.hashes import file_hash
from precaudit.reports.points import RecordedPoint, entries_report, recorded_entries
from precaudit.schema.selection import Filters


@pytest.mark.parametrize(
    "filters",
    [
        Filters(layers="4"),
        Filters(points="q,attn_out"),
        Filters(phases="decode", layers="3"),
        Filters(prompt="a"),
        Filters(positions="last:1"),
    ],
)
def test_the_gate_counts_what_filters_hold_and_no_more(honest, filters):
    whole, part = gate(honest), gate_selected(honest, Criteria(filters=filters))
    by_keyword = gate(honest, **{name: x for name, x in asdict(filters).items() if x is not None})
    assert by_keyword.counts == part.counts
    look = look_by(open_any(honest), filters)
    counted = look.of(e for e in recall_any(honest).errors if e.kind in ("local", "forward", "state"))
    pairs = [p for p in recall_any(honest).prefill_decode if look.holds_pair(p.prompt, p.step)]
    assert part.counts["pass"] == len(counted) + len(pairs) < whole.counts["pass"]
    assert set(part.counts) == {"pass"}


def test_positions_of_decode_are_those_of_its_steps(honest):
    opened = open_any(honest)
    n = len(opened.prompts["a"].tokens)
    look = look_by(opened, Filters(positions=str(n), prompt="a"))
    assert look.calls >= {("a", "decode", 1)}
    assert ("a", "decode", 0) not in look.calls
    assert ("a", "prefill", 0) not in look.calls


def test_filters_that_name_what_is_not_there(honest, capsys):
    for words, told in (
        (["--points", "q_proj"], "the run holds no point 'q_proj'; here it is 'q'"),
        (["--prompt", "what is this"], "a text of your own goes to trace --text"),
        (["--positions", "900"], "--positions 900 name none of what the run holds"),
        (["--phases", "prefil"], "did you mean 'prefill'"),
    ):
        for name in ("gate", "report", "export"):
            more = ["--csv", "never.csv"] if name == "export" else []
            assert run([name, str(honest), *words, *more]) == 2
            assert told in capsys.readouterr().err


def test_report_and_export_are_of_what_was_selected(honest, tmp_path, capsys):
    words = [str(honest), "--layers", "4", "--points", "q", "--phases", "decode"]
    assert run(["report", *words, "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert {(e["layer"], e["point"], e["phase"]) for e in shown} == {(4, "q", "decode")}
    assert run(["export", *words, "--csv", str(tmp_path / "a.csv")]) == 0
    with (tmp_path / "a.csv").open(newline="") as f:
        assert len(list(csv.reader(f))) == len(shown) + 1
    assert run(["report", *words, "--markdown", str(tmp_path / "a.md")]) == 0
    tables = [line for line in (tmp_path / "a.md").read_text().split("\n") if line.startswith("|")]
    assert any("q" in line for line in tables)
    assert not any("attn_out" in line for line in tables)
    capsys.readouterr()
    assert run(["report", *words, "--markdown", "-"]) == 0
    assert capsys.readouterr().out.startswith("# precaudit")


def test_points_lists_a_model_s_run_too(honest, program_run, capsys):
    for table in (t for s in entries_report(recorded_entries(honest)).sections for t in s.tables):
        assert all(any(column) for column in zip(*table.rows, strict=True))
    every = [p for its in recorded_entries(honest).values() for p in its]
    assert {isinstance(p, RecordedPoint) for p in every} == {True}
    assert run(["points", str(honest), "--phases", "decode", "--points", "q,k", "--json"]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["q", "k"]
    assert run(["points", str(program_run), "--points", "nothing"]) == 2
    assert "there is no point 'nothing'" in capsys.readouterr().err


def test_hashes_of_rows_have_no_range(honest, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(honest, copy)
    lines = (copy / "points.jsonl").read_text().replace('"dtype":"float32"', '"dtype":"uint32"')
    (copy / "points.jsonl").write_text(lines)
    manifest = json.loads((copy / "run.json").read_text())
    manifest["hashes"]["points.jsonl"] = file_hash(copy / "points.jsonl")
    (copy / "run.json").write_text(json.dumps(manifest))
    every = [p for its in recorded_entries(copy).values() for p in its]
    found = {(p.dtype, isinstance(p, RecordedPoint)) for p in every}
    assert found == {("bfloat16", True), ("uint32", False)}


def test_a_program_s_run_is_filtered_by_the_same_options(program_run, capsys):
    assert run(["gate", str(program_run), "--layers", "1", "--positions", "0"]) == 0
    part = capsys.readouterr().out
    assert run(["gate", str(program_run)]) == 0
    assert part != capsys.readouterr().out
    assert run(["report", str(program_run), "--positions", "5"]) == 2
    assert "--positions 5 name none" in capsys.readouterr().err


def test_a_file_of_records_is_judged_whole(honest, capsys):
    assert run(["gate", str(honest / "errors.jsonl"), "--layers", "4"]) == 2
    assert "is a file of records, judged whole; leave out --layers" in capsys.readouterr().err


def test_a_folder_of_runs_is_judged_run_by_run_or_listed(honest, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / "several" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "several" / name).symlink_to(honest)
    folder = tmp_path / "several"
    assert run(["gate", str(folder), "--layers", "4"]) == 0
    assert capsys.readouterr().out.count("verdicts: ") == 2
    assert run(["gate", str(folder), "--junit", "x.xml"]) == 2
    assert "each is judged by itself; leave out --junit" in capsys.readouterr().err
    for name in ("diagnose", "report", "open", "export", "points"):
        assert run([name, str(folder)]) == 2
        told = f"holds 2 runs, and {name} is for one: precaudit {name} {folder}/a; precaudit {name} {folder}/b"
        assert told in capsys.readouterr().err


def test_two_runs_are_compared_at_the_positions_that_are_asked_for(honest, tmp_path, capsys):
    shutil.copytree(honest, tmp_path / "copy")
    words = ["compare", str(tmp_path / "copy"), str(honest), "--positions", "last:1", "--prompt", "a", "--json"]
    assert run(words) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert {(e["prompt"], e["phase"], e["step"]) for e in shown} == {("a", "decode", 2)}

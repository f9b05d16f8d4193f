"""The exam of watched programs: every script has a row, a list and a command, and a row that ends otherwise is 1."""

import sys

import pytest

from exams import watch


def test_every_script_and_every_list_has_a_row():
    assert {p.stem for p in watch.WATCHED.glob("*.py")} == {row.script for row in watch.ROWS}
    assert {p.stem for p in watch.WATCHED.glob("*.txt")} == {row.environment for row in watch.ROWS}
    assert len({row.name for row in watch.ROWS}) == len(watch.ROWS)


def test_the_scripts_know_nothing_of_precaudit():
    for path in watch.WATCHED.glob("*.py"):
        assert "import precaudit" not in path.read_text()


def result(row, **more):
    return watch.Result(row.name, 3, 20, 40, {"pass": 38, "unknown": 2}, row.code, 12.3, 1.5, **more)


def test_the_page_says_of_a_row_what_was_seen_and_its_command():
    row = next(r for r in watch.ROWS if r.variables and r.calls)
    text = "\n".join(watch.page([result(row, unknown={"it was not taken": 2}, size="x is 1 % off FP64", versions="1")]))
    assert f"| {row.script} | `{row.function}` | 3 | 20 | 40 | 38 pass, 2 unknown | {row.code} | 12 | 1.5 |" in text
    assert (
        f"XLA_FLAGS=--xla_force_host_platform_device_count=8 precaudit watch --gate --function {row.function}" in text
    )
    assert f"- {row.script}, `{row.function}`: 2 unknown: it was not taken" in text


@pytest.mark.parametrize(("off", "code"), [(0, 0), (1, 1)])
def test_a_row_that_ends_otherwise_than_is_known_is_exit_code_1(off, code, tmp_path, monkeypatch, capsys):
    row = watch.ROWS[0]
    found = result(row)
    found.code += off
    monkeypatch.setattr(watch, "environment", lambda *_: tmp_path)
    monkeypatch.setattr(watch, "watched", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["watch", "--only", row.name, "--folder", str(tmp_path)])
    assert watch.main() == code
    assert row.name in capsys.readouterr().err


def test_no_row_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["watch", "--only", "nothing", "--folder", str(tmp_path)])
    assert watch.main() == 1


def test_verdicts_are_those_that_gate_said_last():
    lines = ["verdicts: 3 fail", "verdicts: 1 fail, 2 input suspect, 1,129 pass"]
    assert watch.said_verdicts(lines) == {"fail": 1, "input suspect": 2, "pass": 1129}
    assert watch.said_verdicts(["nothing"]) == {}

"""``make test-pythons``: what is said of a Python that is not there, of one that fails, and of one that passes."""

import subprocess

import pytest

from tools import pythons
from tools.pythons import Cell


@pytest.fixture
def said(monkeypatch):
    """Have every command answer what a test says, by a word that it holds; keep the commands."""
    ran, answers = [], {}

    def answer(words, *_):
        ran.append(" ".join(words))
        code, text = next((x for key, x in answers.items() if key in ran[-1]), (0, ""))
        return subprocess.CompletedProcess(words, code, text, "")

    monkeypatch.setattr(pythons, "run_words", answer)
    monkeypatch.setattr(pythons, "find_python", lambda python: None if python == "3.99" else f"python{python}")
    return ran, answers


def test_a_python_that_is_not_there_is_named(tmp_path, said):
    found = pythons.try_cell("3.99", "newest", tmp_path)
    assert (found.outcome, found.tests) == ("absent", "python3.99 is not on PATH, nor below pyenv's folder")
    assert not said[0]


def test_a_cell_passes_where_tests_and_commands_do(tmp_path, said):
    ran, answers = said
    answers |= {"-c import sys": (0, "3.13.0 0.12.0 2.5.5\n"), "pytest -p": (0, "...\n12 passed in 3.45s\n")}
    answers |= {"precaudit gate": (0, "✓ fine\nverdicts: 7 pass\n")}
    found = pythons.try_cell("3.13", "newest", tmp_path)
    assert (found.outcome, found.tests, found.gate) == ("passed", "12 passed", "verdicts: 7 pass")
    assert found.versions == "Python 3.13.0 · JAX 0.12.0 · NumPy 2.5.5"
    assert any(line.startswith("python3.13 -m venv --clear") for line in ran)
    assert "| 3.13 | newest | Python 3.13.0" in pythons.table([found])


@pytest.mark.parametrize(("word", "tests"), [("pip install", "no space"), ("pytest -p", "no space"), ("gate", "")])
def test_a_cell_fails_where_one_does(word, tests, tmp_path, said, capsys):
    said[1].update({word: (1, "no space\n"), "pytest": (0, "")})
    found = pythons.try_cell("3.13", "here", tmp_path)
    assert found.outcome == "failed"
    assert tests in found.tests
    assert "no space" in capsys.readouterr().err


@pytest.mark.parametrize(("outcomes", "code"), [(["passed"], 0), (["passed", "absent"], 3), (["absent", "failed"], 1)])
def test_exit_codes(outcomes, code, monkeypatch, capsys):
    monkeypatch.setattr(pythons, "CELLS", tuple((f"3.{i}", "newest") for i in range(len(outcomes))))
    monkeypatch.setattr(pythons, "try_cell", lambda p, j, _: Cell(p, j, outcome=outcomes[int(p[2:])]))
    monkeypatch.setattr("sys.argv", ["pythons"])
    assert pythons.main() == code
    assert capsys.readouterr().out.count("\n| 3.") == len(outcomes)

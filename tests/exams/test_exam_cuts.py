"""Cuts of the exams: N days make every cell, a wrong cell is exit code 1, and all scripts beside the package start."""

import argparse
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from exams import calibrate, exam, exam_cells, exam_diagnose, exam_written, mesh, programs, random_programs
from exams.cells import CELLS
from exams.cut import Cut, cut
from exams.injection import Cell
from exams.styles.__main__ import EVERY
from exams.traits import TRAITS
from precaudit.recording.tracing.subject import load
from precaudit.schema.selection import Selection
from tests import conftest
from tests.helpers.paths import ROOT

MONTH = 28  # days of the shortest
CUTS = dict(re.findall(r"exams\.(\w+) .*--part today/(\d+)", (ROOT / "Makefile").read_text()))
KINDS = {
    "absences": (exam.absences(), "exam"), "honest variants": (exam.variants(1), "exam"),
    "faults in files": (exam.in_files(), "exam"), "faults in programs": (exam.in_programs(), "exam"),
    "mistakes": (exam_diagnose.mistakes(), "exam_diagnose"), "pairs": (exam_diagnose.pairs(), "exam_diagnose"),
    "rewrites": (exam_diagnose.rewrites(), "exam_diagnose"), "written": (exam_written.rows(), "exam_written"),
    "twins": (exam_written.twins(), "exam_written"),
    "sharded programs": ([c for c in mesh.cells(every=True) if c.kind == "correct"], "mesh"),
    "mistakes of meshes": ([c for c in mesh.cells(every=True) if c.kind == "mistake"], "mesh"),
    "examples": (list(programs.programs("examples/")), "programs"), "styles": (list(EVERY), "styles"),
}  # fmt: skip


def test_ci_makes_a_cut_of_every_exam():
    assert set(CUTS) == {
        "exam",
        "exam_diagnose",
        "exam_cells",
        "exam_written",
        "mesh",
        "programs",
        "styles",
        "random_programs",
        "calibrate",
    }
    assert "make cuts\n" in (ROOT / ".ci" / "run").read_text()


def test_parts_of_the_tests_hold_each_function_whole_and_once():
    names = [f"tests/a.py::test_{f}[{case}]" for f in "abcde" for case in "xy"]
    found = []
    for number in (1, 2, 3):
        items = [SimpleNamespace(nodeid=name, path=Path("tests/a.py")) for name in names]
        config = mock.Mock()
        config.getoption.return_value = Cut(number, 3)
        conftest.pytest_collection_modifyitems(config, items)
        left_out = config.hook.pytest_deselected.call_args.kwargs["items"]
        assert {x.nodeid for x in (*items, *left_out)} == set(names)
        found.append({x.nodeid for x in items})
    assert sorted(map(len, found)) == [2, 4, 4]
    assert set.union(*found) == set(names)
    assert all({name[:-2] + "x]", name[:-2] + "y]"} <= part for part in found for name in part)


def test_ci_makes_a_cut_of_the_tests_that_run_in_turn():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^cuts: .*\n.* cut-turn ", makefile, re.MULTILINE)
    assert '-m "turn and not slow and not oracle" --part today/28' in makefile


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [739_948, 739_961])
def test_a_month_makes_every_cell_and_every_day_some_of_every_kind(kind, first):
    cells, name = KINDS[kind]
    days = [cut(f"today/{CUTS[name]}", first + day).of(range(len(cells))) for day in range(MONTH)]
    assert len(cells) > 5
    assert all(days)
    assert {i for day in days for i in day} == set(range(len(cells)))


@pytest.mark.parametrize("first", [739_948, 739_961])
def test_a_quarter_makes_every_cell_that_diagnosis_was_not_told_of_and_every_day_some(first):
    every = exam_cells.asked(CELLS, exam_cells.ONE)
    parts = int(CUTS["exam_cells"])
    days = [exam_cells.chosen(every, cut(f"today/{parts}", first + day)) for day in range(4 * MONTH)]
    assert all(0 < len(day) <= 3 for day in days)
    assert {c.name for day in days for c, _ in day} == {c.name for c, _ in every}


def test_a_tenth_of_calibrate_is_made_in_a_month(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "models", lambda folder: {t.name: folder for t in TRAITS})  # they are not opened
    runs = range(len(list(calibrate.honest(tmp_path))))
    parts = int(CUTS["calibrate"])
    days = [cut(f"today/{parts}", day).of(runs) for day in range(parts)]
    assert {i for day in days for i in day} == set(runs)
    assert min(sum(map(len, days[d : d + MONTH])) for d in range(parts - MONTH)) >= len(runs) // 10


def test_random_programs_are_the_same_ones_every_day():
    one, again = (random_programs.drawn(7) for _ in range(2))
    assert one.says == again.says
    assert all((x == again.program.params[name]).all() for name, x in one.program.params.items())
    days = [cut(f"today/{CUTS['random_programs']}", 739_948 + day).of(range(16)) for day in range(16)]
    assert sorted(i for day in days for i in day) == [*range(16)]


def test_parts_are_disjoint():
    made = [i for k in range(1, 8) for i in Cut(k, 7).of(range(30))]
    assert sorted(made) == list(range(30))
    assert Cut().of("abc") == ["a", "b", "c"]
    assert Cut(3, 4).of([]) == []


def test_the_part_of_today_is_written_so_that_it_can_be_made_again():
    today = cut("today/25", 739_948)
    assert cut(str(today)) == today
    assert cut("today/25", 739_949).number == today.number % 25 + 1


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "1/0", "x/4", "-1/4", "1/4/2", "today/"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="/"):
        cut(text)


WRONG = {
    "nothing": {},
    "an absence that passes": {"absent": lambda *_: [("bf16", "line twice", "pass", False)]},
    "an honest program that fails": {"passes": lambda *_: False},
    "a fault that passes": {"injected": lambda *_: [Cell("tiny", "bf16", "file", "scale 1.02", "q", 9.0, "pass", "")]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_cell_of_the_exam_is_exit_code_1(wrong, tmp_path, monkeypatch):
    right = {
        "absent": lambda *_: [("bf16", "line twice", "refused", True)],
        "passes": lambda *_: True,
        "injected": lambda *_: [Cell("tiny", "bf16", "file", "scale 1.02", "q", 9.0, "fail", "gain")],
        "random_tensors": list,
    }
    for name, answer in (right | WRONG[wrong]).items():
        monkeypatch.setattr(exam, name, answer)
    monkeypatch.setattr(exam, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["exam", "--part", "2/25"])
    assert exam.main() == (0 if wrong == "nothing" else 1)
    assert [p.name for p in tmp_path.iterdir()] == ["exam-part.jsonl"]  # that of the whole exam is left alone


@pytest.mark.parametrize(("right", "code"), [((True, True), 0), ((True, False), 1), ((), 1)])
def test_a_wrong_mistake_is_exit_code_1_and_so_is_none(right, code, tmp_path, monkeypatch):
    monkeypatch.setattr(exam_diagnose, "asked", lambda *_: [("pairs", r, None) for r in right])
    monkeypatch.setattr(exam_diagnose, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["exam_diagnose"])
    assert exam_diagnose.main() == code


@pytest.mark.parametrize(("alarms", "code"), [([], 0), (["fail q"], 1)])
def test_an_alarm_of_calibrate_is_exit_code_1_and_is_not_kept(alarms, code, tmp_path, monkeypatch):
    line = {"name": "tiny", "jax": "", "records": 1, "judged": 1, "seconds": 1.0, "checks": {}, "alarms": alarms}
    monkeypatch.setattr(calibrate, "honest", lambda *_: [calibrate.Honest("tiny", Selection.parse(), lambda *_: [])])
    monkeypatch.setattr(calibrate, "made", lambda *_: line)
    monkeypatch.setattr(calibrate, "RESULTS", tmp_path / "calibrate.jsonl")
    monkeypatch.setattr(sys, "argv", ["calibrate", "--anew", "--part", "7/250"])
    assert calibrate.main() == code
    assert not list(tmp_path.iterdir())


def test_the_exam_of_meshes_has_every_form_format_and_mistake_on_every_mesh():
    """Issue 47, M2: correct programs of three formats, and at least 12 mistakes on 3 meshes."""
    every = mesh.cells(every=True)
    correct = {(c.name, c.dtype, c.mesh) for c in every if c.kind == "correct"}
    assert correct == set(product(mesh.CORRECT, mesh.FORMATS, mesh.MESHES))
    assert len(mesh.CORRECT) == 12
    mistakes = {name: {c.mesh for c in every if c.kind == "mistake" and c.name == name} for name in mesh.MISTAKES}
    assert sum(meshes == {*mesh.MESHES} for meshes in mistakes.values()) >= 12
    assert {c.kind for c in every} == {*mesh.KINDS}
    fewer = {c.mesh for c in mesh.cells() if c.kind == "mistake"}
    assert len(fewer) == 3


@pytest.mark.parametrize(("right", "code"), [((True, True), 0), ((True, False), 1), ((), 1)])
def test_a_wrong_row_of_the_exam_of_meshes_is_exit_code_1_and_so_is_none(right, code, monkeypatch, capsys):
    told = [("a", x, "said") for x in right]
    monkeypatch.setattr(mesh, "answers", lambda asked, _: ((c, told[i : i + 1], 1.0) for i, c in enumerate(asked)))
    monkeypatch.setattr(mesh, "cells", lambda _every: [mesh.Cell("correct", str(x)) for x in right])
    monkeypatch.setattr(sys, "argv", ["mesh", "--kinds", "correct"])
    assert mesh.main() == code
    assert f"{len(right)} rows of correct, {right.count(False)} wrong" in capsys.readouterr().out


MISSING = {"guided": "atheris"}  # what a script needs that the tests do not install
STARTED = """
import contextlib, io, runpy, sys, traceback
for name in sys.argv[1:]:
    sys.argv[1:] = ["--help"]
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        print(name, "goes on after --help")
    except SystemExit as end:
        if end.code or "usage: " not in told.getvalue():
            print(name, end.code, told.getvalue())
    except BaseException:
        print(name, traceback.format_exc())
"""


def scripts():
    for path in sorted(p for folder in ("benchmarks", "exams", "tools") for p in (ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        user_code = "watched" in path.parts  # which takes no --help
        if not user_code and '__name__ == "__main__"' in path.read_text() and find_spec(MISSING.get(path.stem, "jax")):
            yield name


def test_every_script_starts():
    """A module that another lacks, or a name that is gone, is seen without a run."""
    names = list(scripts())
    assert len(names) > 20
    done = subprocess.run([sys.executable, "-c", STARTED, *names], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow  # half a minute
def test_the_bundled_model_can_be_trained_again(tmp_path):
    command = [sys.executable, "-m", "tools.train_tiny", "--steps", "2", "-o", str(tmp_path / "tiny")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert load(str(tmp_path / "tiny"), device="cpu").config == load("tiny", device="cpu").config

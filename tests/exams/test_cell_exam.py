"""The exam of cells: each is one fault of its own, is made where it says, and changes what the decoder computes."""

import re

import pytest

from exams import exam_cells
from exams.cells import CELLS, THEMES
from exams.cells.cell import Cell
from exams.exam_cells import Answer, asked, table
from exams.exam_diagnose import mistakes
from precaudit.diagnosis.evidence.records import Finding
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.selection import Selection

SAMPLE = ("wq transposed", "rope: positions halved", "scores: key heads exchanged")
MORE = (
    "norm: weight of the next layer", "mask: of row 0 for all rows", "rope: twice", "act: up plus 1",
    "cache: k of the layer before", "stream: halved", "logits: times 1.02", "integers: zero point 1",
    "numerics: v toward zero", "gemma2-caps: scores not capped",
)  # fmt: skip


def finding(kind, cause, says=""):
    return Finding(
        kind=kind, cause=cause, says=says, layer=2, point="q", layers=(2,), phases=("prefill",), prompts=("a",),
        records=1, rel_l2=None, explained=None, equal=None, second=None, worst=None,
    )  # fmt: skip


def test_there_are_enough_cells_and_none_twice():
    assert len(CELLS) >= 150
    assert len({c.name for c in CELLS}) == len(CELLS)
    assert sum("bf16" in c.policies for c in CELLS) >= 150
    assert all(len(cells) >= 10 for cells in THEMES.values())


def test_no_cell_is_called_as_a_mistake_of_the_other_exam():
    """They were written without a look at what diagnosis tries; what is alike in both is chance."""
    assert not {c.name for c in CELLS} & {m.name for m, _ in mistakes()}


@pytest.mark.parametrize("theme", THEMES)
def test_cells_are_whole(theme):
    for c in THEMES[theme]:
        assert c.origin, c.name
        assert set(c.points) <= POINTS.keys(), c.name
        assert all(POINTS[p].per_layer == (c.layer is not None) for p in c.points), c.name
        assert re.compile(c.names), c.name
        assert re.compile(c.equal), c.name
        assert c.policies, c.name


def tensors(folder, subject, cell):
    prompts = exam_cells._prompts(cell)
    select = Selection.parse(points="all", phases="prefill,decode")
    options = TraceOptions(force=True, decode_steps=cell.steps, batch=len(prompts), pad="left")
    run = trace(subject, folder, prompts, select, options)
    return {(p.prompt, p.phase, p.step, p.layer, p.point): run.tensor(p).tobytes() for p in run.points}


@pytest.mark.turn  # 9 s
@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_cell_changes_its_point_first(name, tmp_path):
    cell = next(c for c in CELLS if c.name == name)
    honest = tensors(tmp_path / "honest", load(cell.model, "bf16", dict(cell.settings), "cpu"), cell)
    broken = tensors(tmp_path / "broken", cell.subject("bf16"), cell)
    changed = {key[3:] for key in honest if honest[key] != broken[key]}
    assert {(cell.layer, p) for p in cell.points} & changed
    before = {p for layer, p in changed if layer is not None and cell.layer is not None and layer < cell.layer}
    assert not before


def test_names_are_told_apart():
    cell = Cell("a", "b", ("q",), "epsilon", lambda s: s, equal="factor")
    assert cell.named(finding("semantics", "epsilon 1e-6")) == "right"
    assert cell.named(finding("semantics", "scaled", "a factor of 1.02")) == "equal"
    assert cell.named(finding("format", "bfloat16")) == "wrong"
    assert cell.named(finding("semantics", "none reproduces it", "a factor")) == "not"
    assert cell.named(finding("unknown", "epsilon 1e-6")) == "not"
    assert Cell("a", "b", ("q",), "", lambda s: s).named(finding("semantics", "epsilon")) == "wrong"


def test_a_cell_is_asked_in_its_policies_alone():
    cells = [c for c in CELLS if c.policies == ("fp32-highest",)]
    assert cells
    assert not asked(cells, ("bf16",))
    assert len(asked(cells, ("bf16", "fp32-highest"))) == len(cells)


@pytest.mark.parametrize(("said", "code"), [(("right", "not"), 0), (("wrong", "right"), 1), ((), 1)])
def test_a_wrong_name_is_exit_code_1_and_so_is_no_cell(said, code, tmp_path, monkeypatch):
    rows = [Answer(str(i), "rope", "bf16", True, s, "", (), 1.0) for i, s in enumerate(said)]
    monkeypatch.setattr(exam_cells, "answers", lambda *_: iter(rows))
    monkeypatch.setattr(exam_cells, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["exam_cells", "--part", "1/2"])
    assert exam_cells.main() == code
    assert [p.name for p in tmp_path.iterdir()] == ["exam-cells-part.jsonl"]


def test_the_table_counts_by_theme():
    rows = [
        Answer("a", "rope", "bf16", True, "right", "", (), 1.0),
        Answer("b", "rope", "bf16", False, "not", "", (), 1.0),
    ]
    lines = {line.split()[0]: line.split()[1:] for line in table(rows).splitlines()}
    assert lines["rope"] == lines["all"] == ["2", "1", "1", "0", "1", "0"]
    assert lines["norms"] == ["0"] * 6


@pytest.mark.slow  # ten seconds: one whole cell
def test_a_cell_is_asked(tmp_path):
    cell = next(c for c in CELLS if c.name == "norm: epsilon 1e-2")
    a = exam_cells.ask(tmp_path, cell, "bf16")
    assert a.flagged
    assert a.said == "right"

"""The notebooks of the examples run, and what is stored in them is what they give."""

import re

import pytest

from tests.helpers.paths import ROOT

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")  # rounding differs between versions and processors


def outputs(notebook):
    """Return what every cell of code gives, numbers and warnings aside."""
    shown = [
        [_text(o) for o in c.outputs if o.get("name") != "stderr"] for c in notebook.cells if c.cell_type == "code"
    ]
    return [[re.sub(r"\s+", " ", NUMBER.sub("#", text)) for text in cell] for cell in shown]


def _text(output):
    return output.get("text") or output["data"]["text/plain"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_stored_is_small_and_of_nobody_s_machine(path):
    text = path.read_text()
    assert len(text) < 30_000
    assert not re.search(r"/(tmp|home|root|work|usr|var|Users)/", text)
    assert any(outputs(nbformat.read(path, 4)))


def test_there_are_notebooks():
    assert {p.stem for p in NOTEBOOKS} == {"audit", "program"}
    stored = " ".join(text for p in NOTEBOOKS for cell in outputs(nbformat.read(p, 4)) for text in cell)
    assert "the scale is applied twice" in stored
    assert "explained by: head" in stored


@pytest.mark.slow  # 25 s together
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_a_notebook_gives_what_is_stored(path, tmp_path):
    from nbclient import NotebookClient

    stored = nbformat.read(path, 4)
    again = nbformat.read(path, 4)
    NotebookClient(again, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert outputs(again) == outputs(stored)
    assert not list(tmp_path.iterdir())

"""Text of others is harmless wherever it is shown: terminal, workflow commands, XML, Markdown."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from junitparser import JUnitXml, TestCase, TestSuite

from precaudit.cli import run
from precaudit.judging.gate import gate
from precaudit.judging.verdicts import Verdict
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.reports import annotations, junit
from precaudit.reports.comparison import comparison_page
from precaudit.reports.escaping import code_span, terminal_line, workflow, xml
from precaudit.reports.escaping import escape_markdown as escaped
from precaudit.reports.gate import gate_report
from precaudit.reports.pages import as_markdown
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.hostile import HOSTILE, MARKDOWN, texts


@pytest.mark.turn  # 4 s
@given(texts)
def test_a_terminal_line_acts_on_nothing(text):
    line = terminal_line(text)
    assert line.isprintable()
    assert not re.search(r"::\w|##\[", line)


@given(texts)
def test_a_workflow_message_is_one_command(text):
    line = workflow(text)
    assert "\n" not in line
    assert "\r" not in line
    assert not re.search(r"%(?!25)", line)
    assert "::" not in line or not re.search(r"::\w", line)


@given(texts)
def test_xml_holds_any_text(text):
    suite = TestSuite(xml(f"a{text}"))
    suite.add_testcase(TestCase(xml(f"b{text}")))
    whole = JUnitXml()
    whole.add_testsuite(suite)
    root = ElementTree.fromstring(whole.tostring())
    assert root.find(".//testcase") is not None


@given(texts)
def test_markdown_shows_text_as_text(text):
    cell = escaped(f"x{text}")
    assert "\n" not in cell
    tokens = MARKDOWN.parse(f"| a | b |\n| -- | -- |\n| {cell} | c |\n")
    inline = [t for t in tokens if t.type == "inline"]
    assert len(inline) == 4  # two columns, two rows
    assert {child.type for t in inline for child in t.children} <= {"text", "text_special"}
    assert not re.search(r"@\w|https?://|www\.", cell)
    alone = MARKDOWN.parse(f"- {cell}\n")
    assert {child.type for t in alone if t.type == "inline" for child in t.children} <= {"text", "text_special"}


@given(texts)
def test_text_at_the_beginning_of_a_line_is_no_block_of_markdown(text):
    tokens = {t.type for t in MARKDOWN.parse(escaped(text))}
    assert tokens <= {"paragraph_open", "inline", "paragraph_close", "code_block"}  # indented text is shown as it is


@pytest.mark.parametrize("text", ["2.4e-1 L4", "-0.5", "99.9%", "worst element [2, 13, 12]: 35.8", "= 3", "#3 of 4"])
def test_numbers_and_indices_are_read_as_they_are_written(text):
    assert escaped(text).replace("&#35;", "#") == text


@pytest.mark.parametrize("text", ["[a](u)", "![a](u)", "[a][b]", "[a]: u", "[x] done", "1. a", "- a", "# a", "---"])
def test_what_would_act_is_escaped(text):
    assert "&#" in escaped(text)


@given(texts)
def test_a_code_span_is_one(text):
    tokens = MARKDOWN.parse(f"a {code_span(text)} b")
    children = [c.type for t in tokens if t.type == "inline" for c in t.children]
    assert children == ["text", "code_inline", "text"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    select = Selection.parse(layers="0", points="v", phases="prefill")
    made = trace(
        load("tiny", "bf16", None, "cpu"), folder / "run", [Prompt(id=HOSTILE, prompt="x = 1")], select, TraceOptions(0)
    )
    return compare(made, options=CompareOptions(accum=(), cache=folder / "refs"))


@pytest.mark.turn  # 21 s
def test_a_hostile_prompt_id_reaches_no_report(hostile, capfd):
    folder = str(hostile.run.folder)
    outs = []
    for command in ("compare", "report", "gate", "diagnose"):
        run([command, folder, *(["--github"] if command == "gate" else [])])
        captured = capfd.readouterr()
        outs += [captured.out, captured.err]
    for out in outs:
        for line in out.splitlines():
            assert not line.lstrip().startswith(("::add", "::stop")), line
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    shown = [
        t for t in MARKDOWN.parse(as_markdown(comparison_page(hostile), 1, None)) if t.type in ("inline", "html_block")
    ]
    assert not [t for t in shown if t.type == "html_block"]
    assert not {c.type for t in shown for c in t.children} & {"html_inline", "image", "link"}


def test_the_tables_of_a_report_are_tables_to_a_reader(hostile):
    text = as_markdown(comparison_page(hostile), 1, None)
    found = [t.type for t in MARKDOWN.parse(text)]
    assert found.count("table_open") == text.count("\n## ") > 1


def test_a_hostile_verdict_reaches_no_report(hostile):
    found = gate(hostile)
    v = Verdict.of(next(e for e in hostile.errors if e.kind == "local"), "unknown", text=HOSTILE)
    j = replace(found, verdicts=(v,))
    assert ElementTree.fromstring(junit.render_junit(j)).find(".//testcase") is not None
    assert all(
        re.fullmatch(r"::(error|warning) title=precaudit [a-z ]+::[^\n\r]*", a) for a in annotations.annotations(j)
    )
    shown = [t for t in MARKDOWN.parse(as_markdown(gate_report(j, "run"))) if t.type in ("inline", "html_block")]
    assert not {c.type for t in shown for c in t.children or ()} & {"html_inline", "image", "link"}


# Streams


def test_nobody_reads_on():
    done = subprocess.run(
        ["bash", "-c", f"({shlex.quote(sys.executable)} -m precaudit models; echo code $? >&2) | true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.strip() in ("code 141", "code 0")
    assert "Traceback" not in done.stderr


def test_an_ascii_terminal_gets_what_it_can_show(hostile):
    done = subprocess.run(
        [sys.executable, "-m", "precaudit", "report", str(hostile.run.folder)], capture_output=True, text=True,
        check=False, env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "nan" not in done.stdout


def test_an_import_that_ctrl_c_broke_into_is_an_interrupt(monkeypatch, capfd):
    def broken(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("numpy C-extensions failed") from error

    monkeypatch.setattr("precaudit.recording.opening.kind_of", broken)
    assert run(["compare", "somewhere"]) == 130
    assert capfd.readouterr().err == "precaudit: interrupted\n"

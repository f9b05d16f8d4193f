"""``precaudit lint``: what it says, its files, its exit codes. Its rules: tests/checks/lint/test_lint_rules.py."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.cells import cell_len

from precaudit.checks.lint.linting import Linted, LintedCalls, Lowering, lint_model, lint_program
from precaudit.checks.lint.recorded import Extent, Extents
from precaudit.checks.lint.rule import SEVERITIES, LintRecord
from precaudit.checks.lint.rules import every
from precaudit.cli import run as cli
from precaudit.interpreters.tpu import target
from precaudit.interpreters.tpu.target import parse_target
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.hashes import file_hash
from precaudit.reports import lint as report
from precaudit.schema.policies import load_policy
from tests.helpers.hostile import TAGS, Page, tables
from tests.helpers.tpus import needs_libtpu

OWN = "examples/own_decoder.py:program"


def record(**given):
    base = {"rule": "r", "severity": "error", "phase": "prefill", "point": "q", "source": "a.py:3", "count": 1}
    return LintRecord(**{**base, "says": "It is so.", "fix": "do", "rests": "on it", "target": "v5e:2x2", **given})


def of(*severities):
    return Linted(tuple(record(severity=s) for s in severities), ())


@pytest.mark.parametrize(
    ("found", "fail_on", "code"),
    [
        ((), "error", 0), (("error",), "error", 1), (("warning", "note"), "error", 0), (("warning",), "warning", 1),
        (("note",), "warning", 0), (("unknown",), "error", 3), (("unknown",), "unknown", 1),
        (("unknown", "error"), "error", 1), (("unknown", "warning"), "warning", 1), (("note", "unknown"), "note", 1),
    ],
)  # fmt: skip
def test_exit_codes(found, fail_on, code):
    assert of(*found).exit_code(fail_on) == code


@needs_libtpu
def test_float32_at_default_precision_is_named_by_point_with_the_fix(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(["lint", "tiny", "--tpu", "v5e:2x2", "--policy", "fp32"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "✗ A float32 product in one bfloat16 pass, 11 × on v5e:2x2: v, q, k, scores, attn_out, attn_proj and 3 more."
    )
    rows = [line.split() for line in out.splitlines() if "one-pass-product" in line.split()]
    assert {row[2] for row in rows} == {
        "q", "k", "v", "scores", "attn_out", "attn_proj", "gate_out", "mlp_act", "mlp_out",
    }  # fmt: skip
    assert {row[2] for row in rows if row[-1] == "decode"} == {"scores", "attn_out"}
    assert all(row[3] == "0:5" for row in rows), "one text of a scan is all five layers"
    assert "--set matmul=highest" in out
    assert "libtpu 0.0." in out


def test_findings_are_written_as_markdown_and_as_a_page(tmp_path):
    file, markdown, page = tmp_path / "p.py", tmp_path / "a" / "l.md", tmp_path / "l.html"
    file.write_text(
        "import jax.numpy as jnp\nfrom precaudit import Program\n"
        "def call(w, x): return jnp.exp(x.astype(jnp.float16)).sum()\n"
        "program = Program(call, 0.0, {'a': (jnp.ones(4, jnp.float32),)})\n"
    )
    call = ["lint", f"{file}:program", "--fail-on", "note", "--markdown", str(markdown), "--html", str(page)]
    assert cli(call) == 1
    (rows, *_) = tables(markdown.read_text())
    assert rows[0] == ["severity", "rule", "line", "phase"]  # it names no point, and no column is empty
    assert markdown.read_text().startswith(f"### precaudit lint: `{file}:program`\n\n✗ ")
    shown = Page(page.read_text())
    assert set(shown.tags) <= TAGS
    assert "script" not in shown.tags
    assert all(row[1] in shown.said["text"] for row in rows[1:])


def looped(steps, outside):
    def call(params, x):
        def layer(x, w):
            return jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32) @ w, None

        return layer(x, params[0])[0] if outside else jax.lax.scan(layer, x, params)[0]

    shape = (4, 4) if not outside else (1, 4, 4)
    return Program(call, jnp.ones((steps, *shape[-2:])), {"a": (jnp.ones((2, 4)),)})


@pytest.mark.parametrize(("outside", "layers"), [(False, 3), (True, None)])
def test_a_finding_says_how_many_layers_it_is_in(outside, layers):
    found = [f for f in lint_program(looped(3, outside)).findings if f.rule == "narrow-exp"]
    assert [f.layers for f in found] == [layers]
    assert report.places_table(found).rows[0][2] == ("0:3" if layers else "")
    (result,) = report.sarif(Linted(tuple(found), ()), every(), "0")["runs"][0]["results"]
    assert result["properties"]["layers"] == layers


@needs_libtpu
def test_float32_at_highest_precision_has_nothing_to_say(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(["lint", "tiny", "--tpu", "v5e:2x2", "--policy", "fp32-highest"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("✓ tiny: no rule fires on v5e:2x2.")
    made = {line.split()[0]: line.split()[-4:] for line in out.splitlines() if line.startswith(("prefill", "decode"))}
    assert made == {"prefill": ["0", "0", "9", "1"], "decode": ["0", "0", "2", "8"]}


@needs_libtpu
def test_two_sequences_leave_the_vector_unit():
    """With one sequence eight products of decode are float32 multiply-and-add; with two each takes one pass."""
    one, two = (
        lint_model("tiny", load_policy("fp32"), Lowering(parse_target("v5e")), LintedCalls(("decode",), batch=n))
        for n in (1, 2)
    )
    assert [report.count_by_unit(x.views[0])["vector"] for x in (one, two)] == [8, 0]
    assert sum(f.count for f in two.findings if f.rule == "one-pass-product") == 10


@needs_libtpu
@pytest.mark.parametrize("width", ["60", "80", "100"])
def test_no_number_is_cut_at_any_width(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    assert cli(["lint", "tiny", "--tpu", "v5e", "--policy", "fp32", "--phase", "decode"]) == 1
    tables = [x for x in capsys.readouterr().out.splitlines() if re.match(r"(error|warning|decode|phase)\b", x)]
    assert tables
    assert "…" not in "".join(tables)
    assert max(map(cell_len, tables)) <= int(width)


@needs_libtpu
def test_what_is_found_as_jsonl_and_as_sarif(tmp_path, capsys):
    file = tmp_path / "out" / "lint.sarif"
    assert cli(["lint", "tiny", "--tpu", "v5e", "--policy", "fp32", "--json", "--sarif", str(file)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["severity"] for line in lines] == sorted((x["severity"] for x in lines), key=SEVERITIES.index)
    log = json.loads(file.read_text())
    (ran,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert [r["id"] for r in ran["tool"]["driver"]["rules"]] == [r.id for r in every()]
    assert len(ran["results"]) == len(lines)
    for result, line in zip(ran["results"], lines, strict=True):
        assert ran["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == line["rule"]
        assert result["level"] in ("error", "warning", "note")
        (at,) = result["locations"]
        assert at["physicalLocation"]["artifactLocation"]["uri"].startswith("precaudit/models/jax_decoder/")
        assert at["physicalLocation"]["region"]["startLine"] > 0


def test_a_program_of_the_users_is_read_without_a_tpu(capsys):
    assert cli(["lint", OWN]) in (0, 1)
    assert "products" in capsys.readouterr().out


@pytest.mark.turn  # 4 s
def test_a_run_says_which_values_a_format_does_not_hold(tmp_path, capsys):
    """tiny's values fit float16; those of a run with one larger do not."""
    assert cli(["trace", "tiny", "--prompt", "s1_fact", "--phases", "prefill", "-o", str(tmp_path / "run")]) == 0
    half = ["--set", "activations=float16", "--set", "attn_out=float16"]
    assert cli(["lint", "tiny", "--with", str(tmp_path / "run"), *half]) == 0
    points = tmp_path / "run" / "points.jsonl"
    lines = [json.loads(line) for line in points.read_text().splitlines()]
    next(x for x in lines if x["point"] == "attn_out")["stats"]["max"] = 7e4
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["hashes"]["points.jsonl"] = file_hash(points)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert cli(["lint", "tiny", "--with", str(tmp_path / "run"), *half]) == 1
    assert "70,000 at attn_out: more than float16 holds" in capsys.readouterr().out
    assert cli(["lint", "tiny", "--with", str(tmp_path / "nowhere")]) == 2


TWO = """
import jax, jax.numpy as jnp
from precaudit import Program

def program(dtype):
    def call(params, x):
        def layer(x, w):
            raw = x.astype(dtype) @ w.astype(dtype)
            return (raw / 1000).astype(jnp.float32), None
        return jax.lax.scan(layer, x, params)[0]
    return Program(call, 300 * jnp.ones((2, 1, 1)), {"a": (300 * jnp.ones((1, 1)),)}, points=POINTS)

wide, half = program(jnp.float32), program(jnp.float16)
"""


@pytest.mark.parametrize(("points", "name"), [("None", "raw"), ("{'product': 'raw'}", "product")])
def test_a_run_of_a_program_says_which_values_another_format_does_not_hold(points, name, tmp_path, capsys):
    """300 · 300 is 90,000, of layer 0; what layer 1 makes of a thousandth of it fits."""
    file, run = tmp_path / "two.py", str(tmp_path / "run")
    file.write_text(TWO.replace("POINTS", points))
    assert cli(["trace", f"{file}:wide", "-o", run]) == 0
    assert cli(["lint", f"{file}:wide", "--with", run]) == 0
    capsys.readouterr()
    assert cli(["lint", f"{file}:half", "--with", run, "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (over,) = [f for f in found if f["rule"] == "overflow"]
    assert over["says"] == f"A run recorded 90,000 at {name}: more than float16 holds (65,504)."
    assert (
        over["source"] == f"{file}:{TWO.splitlines().index('            raw = x.astype(dtype) @ w.astype(dtype)') + 1}"
    )


def test_a_run_that_overflowed_names_where_it_did(tmp_path, capsys):
    """Raw scores of float16; what follows from them, and the mask, are no places of their own."""
    run = str(tmp_path / "run")
    assert cli(["trace", "tests/helpers/cases/overflow.py:buggy", "-o", run]) == 0
    capsys.readouterr()
    assert cli(["lint", "tests/helpers/cases/overflow.py:buggy", "--with", run, "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["point"], f["says"]) for f in found if f["rule"] == "overflow"] == [
        ("raw", "A run recorded infinity at raw: more than float16 holds (65,504).")
    ]
    assert cli(["lint", "tests/helpers/cases/overflow.py:fixed", "--with", run]) == 0
    assert cli(["lint", OWN, "--with", str(tmp_path)]) == 2
    assert cli(["lint", "examples/training_step.py:program", "--with", run]) == 2
    assert "give a run of these points" in capsys.readouterr().err


def test_a_program_that_cannot_be_traced_is_said_with_its_line(tmp_path, capsys):
    file = tmp_path / "wrong.py"
    lines = "import jax.numpy as jnp, precaudit", "def call(p, x):", "    return p @ x"
    file.write_text("\n".join([*lines, 'program = precaudit.Program(call, jnp.ones(3), {"a": (jnp.ones(4),)})']))
    assert cli(["lint", f"{file}:program"]) == 2
    said = capsys.readouterr().err
    assert "the program cannot be traced" in said
    assert f"{file}:3" in said


def test_large_values_of_points_that_are_not_here_are_told():
    run = Extents(Path("runs/x"), {"q": Extent(-1.0, 1.0), "gone": Extent(0.0, 1e5), "small": Extent(0.0, 1.0)}, {})
    linted = lint_model("tiny", load_policy("bf16"), run=run)
    assert linted.notes == ("points of the run that are not here had values above 65,504: gone",)


def test_every_rule_is_listed(capsys):
    assert cli(["lint", "--list"]) == 0
    out = capsys.readouterr().out
    assert len(every()) >= 6
    for rule in every():
        assert f"{rule.id} ({rule.severity}" in out
        assert rule.why in out
        assert rule.fix in out
        assert rule.needs != "jaxpr" or f"`{rule.id}`" in Path("docs/tpu.md").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "SUBJECT is missing"), (["tiny", "--tpu", "v5"], "did you mean"), (["nowhere/model"], "nowhere/model"),
        (["tiny", "--phase", "rescore"], "prefill, decode"), ([OWN, "--policy", "fp32"], "--policy"),
        (["tiny", "--tpu", "v5e", "--set", "matmul=BF16_BF16_F32_X9"], "does not compile for v5e"),
        (["tiny", "--set", "matmul=BF16_BF16_F32"], "not honoured on cpu"), (["tiny", "--policy", "fp23"], "fp32"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(words, told, capsys):
    assert cli(["lint", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert told in said[-1]
    assert "Traceback" not in "".join(said)


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(target, "libtpu_version", lambda: None)
    assert cli(["lint", "tiny", "--tpu", "v5e"]) == 2
    assert "pip install 'precaudit[tpu]'" in capsys.readouterr().err


def test_text_of_others_is_harmless(capsys, monkeypatch):
    """A source file's name is its author's."""
    hostile = record(source="a\x1b[31m::error::.py:3")
    monkeypatch.setattr("precaudit.checks.lint.linting.lint_program", lambda *_: Linted((hostile,), ()))
    monkeypatch.setattr("precaudit.recording.programs.loading.load_program", lambda _: SimpleNamespace())
    assert cli(["lint", "a.py:program"]) == 1
    assert "\x1b" not in capsys.readouterr().out

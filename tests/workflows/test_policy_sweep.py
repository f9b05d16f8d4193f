"""Sweeps: a row a policy with its price, the front by hand, a policy that cannot run, and what is not done again."""

import json
import re
import sys

import pytest
from msgspec.structs import replace

from precaudit.checks.rollouts import drawn
from precaudit.cli import run
from precaudit.reports.policies import PolicyRow
from precaudit.reports.sweep import SweepRow, front
from precaudit.workflows.sweep import policies_of
from tests.helpers.tpus import needs_libtpu

PROMPT = ["tiny", "--text", "def f(x):", "--decode-steps", "1", "--points", "v,logits"]
DRAW = ["--new-tokens", "3", "--rounds", "1"]


def row(policy, kl, ms, verdict="✓ pass", why=None):
    errors = PolicyRow(policy=policy, run=policy, kl=kl, verdict=verdict)
    return SweepRow(policy=policy, errors=errors, decode_ms=ms, why=why)


def test_the_front_is_what_nothing_beats_in_both():
    rows = [
        row("slow and exact", 1e-9, 9.0), row("between", 1e-5, 5.0), row("beaten by between", 1e-4, 5.0),
        row("fast", 1e-2, 1.0), row("faster, and fails", 1e-2, 0.5, "✗ 3 fail"), row("not known", "nan", 0.1),
        row("not timed", 1e-12, None), row("twin of fast", 1e-2, 1.0), row("cannot run", 1e-12, 0.1, why="refused"),
    ]  # fmt: skip
    assert front(rows) == ["slow and exact", "between", "fast", "twin of fast"]


def test_integer_weights_are_on_the_front_by_their_distance_from_the_stored_ones():
    integers = row("int4", 1e-9, 5.0)
    integers = replace(integers, errors=replace(integers.errors, stored_kl=1e-2))
    assert front([row("bf16", 1e-4, 4.0), integers]) == ["bf16"]
    assert front([row("bf16", 1e-4, 6.0), integers]) == ["bf16", "int4"]


def test_the_shipped_policies_are_swept_where_none_is_named():
    assert policies_of(None)[0] == "bf16"
    assert {"fp32", "fp32-highest", "bf16-fp32-scores"} <= set(policies_of(None))
    assert policies_of(" a ,b") == ["a", "b"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three policies and one that a CPU refuses, with a plot; the exit code and the rows."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "refused.toml").write_text('matmul = "TF32_TF32_F32"\n')
    names = f"bf16,fp32,int4-groups,{folder / 'refused.toml'}"
    given = [
        "sweep",
        *PROMPT,
        *DRAW,
        "--policy",
        names,
        "-o",
        str(folder / "out"),
        "--plot",
        str(folder / "plot.html"),
    ]
    code = run(given)
    return folder, given, code, [json.loads(x) for x in (folder / "out" / "sweep.jsonl").read_text().splitlines()]


@pytest.mark.turn  # 10 s
def test_every_policy_is_a_row_with_what_it_costs(swept):
    _, _, code, rows = swept
    assert code == 3  # one of them cannot run
    bf16, fp32, int4, refused = rows
    assert refused["policy"] == "refused"
    assert "TF32" in refused["why"]
    assert refused["errors"] is None
    for r in (bf16, fp32, int4):
        assert r["why"] is None
        assert r["errors"]["verdict"] == "✓ pass"
        assert 0 <= r["errors"]["excess"] < 1
        assert r["prefill_ms"] > 0
        assert r["decode_ms"] > 0
        assert 0 <= r["abs_diff_max"] < 0.1
    assert (bf16["prefill_ratio"], bf16["decode_ratio"]) == (1.0, 1.0)
    assert fp32["errors"]["kl"] < bf16["errors"]["kl"]
    assert int4["errors"]["stored_kl"] > 10 * int4["errors"]["kl"]  # 4 bits of every weight are gone
    assert {r["errors"]["stored_kl"] for r in (bf16, fp32)} == {None}
    assert fp32["memory"] > 4 * 1_000_000 > bf16["memory"] > 2 * 1_000_000  # tiny has a million weights
    assert any(r["front"] for r in rows)


@pytest.mark.parametrize("name", ["altair", "vl_convert"])
def test_a_plot_without_its_libraries_is_refused_before_anything_runs(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("precaudit.workflows.sweep.sweep", lambda *_, **__: pytest.fail("swept"))
    assert run(["sweep", "tiny", "--policy", "bf16", "--plot", str(tmp_path / "a.png"), "-o", str(tmp_path)]) == 2
    assert "pip install 'precaudit[html]'" in capfd.readouterr().err


@pytest.mark.turn  # 44 s
def test_a_plot_is_a_page_with_title_table_and_both_themes_that_needs_no_network(swept):
    page = (swept[0] / "plot.html").read_text()
    assert "<title>? tiny – precaudit</title>" in page
    assert re.search(r"<h1>tiny</h1>.*4 policies.*What a faster policy costs.*<svg.*Every policy.*<table", page, re.S)
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td>", page)
    assert rows == ["bf16", "fp32", "int4-groups", "refused"]
    drawn = re.search(r"<svg.*?</svg>", page, re.S)[0]
    assert "var(--ink)" in drawn
    assert "prefers-color-scheme: dark" in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)


def test_what_was_drawn_is_not_drawn_again(swept, monkeypatch, capfd):
    folder, given, _, rows = swept
    monkeypatch.setattr(drawn, "draw_all", None)
    assert run([*given, "--resume"]) == 3
    assert [json.loads(x) for x in (folder / "out" / "sweep.jsonl").read_text().splitlines()] == rows
    assert "refused" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--policy", "bf61"], "bf61"), (["--policy", " ,"], "names no policy"), (["--plot", "a.gif"], ".png"),
        (["--policy", "bf16,bf16"], "twice"), (["--new-tokens", "0"], "at least 1"),
        (["--prompt", "nobody"], "nobody"),
        (["--tpu", "v9"], "v9"),
    ],
)  # fmt: skip
def test_wrong_use_is_said(more, told, tmp_path, capfd):
    assert run(["sweep", "tiny", "--text", "a", "-o", str(tmp_path / "x"), "--policy", "bf16", *more]) == 2
    message = capfd.readouterr().err
    assert told in message
    assert "Traceback" not in message
    assert not (tmp_path / "x" / "bf16" / "run.json").exists()


@pytest.mark.turn  # 11 s
@needs_libtpu
def test_a_tpu_that_is_not_here_is_predicted_in_a_column(tmp_path, capfd):
    given = ["sweep", *PROMPT, *DRAW, "--policy", "fp32", "--tpu", "v5e", "-o", str(tmp_path / "out"), "--json"]
    assert run(given) == 0
    (row,) = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert row["predicted_why"] is None
    assert row["predicted"] > 1000 * row["errors"]["logits"]  # one bfloat16 pass against float32 products

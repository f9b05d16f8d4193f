"""A rollout as Markdown and as a page: what stands in them, its pictures, and that nothing of others acts there."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from precaudit.checks.rollouts.budgets import engine_budget
from precaudit.checks.rollouts.causes import TokenCause
from precaudit.checks.rollouts.drawn import draw_all, grade
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.parity import Checks
from precaudit.checks.rollouts.questions import Question
from precaudit.checks.rollouts.recording import of_drawn
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.checks.rollouts.timing import How, tasks
from precaudit.cli import run
from precaudit.diagnosis.evidence.records import Share
from precaudit.recording.tracing.subject import load
from precaudit.reports import pages, rollout_charts
from precaudit.reports.rollout_charts import along, beyond, distribution_chart, svg
from precaudit.reports.rollout_report import RolloutStory, rollout_report
from precaudit.reports.rollouts import cell
from precaudit.reports.templates import template_file
from tests.helpers.hostile import BAD, HOSTILE, MARKDOWN, TAGS, Page, tables

DRAWING = {"svg", "g", "path", "text", "line"}
QUESTIONS = [Question(prompt="a", answer="(?s).", id="a", match="regex"), Question(prompt="b", answer="7", id="b")]
CAUSE = TokenCause(
    id="a", policy="bf16", index=3, token=32, engine=0.1, change=0.2, decode=0.1, rescore=-0.1, explained=0.2,
    shares=(Share(layer=1, point="attn_out", share=0.15),), points=(("attn_out", 0.15, 0.25), ("v", 0.05, 0.05)),
    verdict="rounding", records=7,
)  # fmt: skip


@pytest.fixture(scope="module")
def told():
    subjects = [load("tiny", name, device="cpu") for name in ("bf16", "fp32")]
    given, how = (
        tasks([("a", (100, 101, 102)), (BAD, (84, 104))], 1),
        How(2, 16, Sampling(1.0, seed=1), rounds=2, loops=("python", "while")),
    )
    checks = Checks(limits=(engine_budget("k3_kl", 1.0),))
    found = grade(draw_all(subjects, given, how, checks), QUESTIONS, lambda _: "xyz")
    return RolloutStory(of_drawn(found, subjects, given, how, checks, QUESTIONS), found.parities, (CAUSE,), found)


def section(page, heading):
    """Return a section's text, of HTML."""
    part = page[page.index(f"<h2>{heading}</h2>") :]
    return Page(part[: part.index("</section>")]).said["text"]


@pytest.mark.turn  # 6 s
def test_the_page_has_times_metrics_causes_and_answers(told):
    text = pages.as_html(rollout_report(told))
    assert "✓" in Page(text).said["text"]
    times = section(text, "What sampling takes")
    assert [times.count(name) for name in ("python", "while")] == [2, 2]
    metrics = section(text, "Mismatch, under verl&#x27;s names")
    assert all(name in metrics for name in METRICS)
    for p in told.parities:
        for r in p.whole:
            assert cell(r, "rollout_probs_diff_mean") in metrics
            assert cell(r, "abs_diff_p99") in section(text, "Quantiles of |Δ log p|")
    assert "k3_kl" in section(text, "Limits")
    because = section(text, "What explains the worst tokens")
    assert "+75.0 %" in because  # 0.15 of 0.2
    assert "125 %" in because  # 0.25 of 0.2
    said = section(text, "Answers")
    assert "50.0 % (9.5 to 90.5)" in said  # Wilson, 1 of 2: ½ ± 1.96 √(½·½/2 + 1.96²/16) / (1 + 1.96²/2)
    assert "the difference is 0.0 points, 95 % " in said


def test_the_markdown_has_the_same_numbers(told):
    text = pages.as_markdown(rollout_report(told))
    assert text.startswith("### precaudit rollout: `tiny`\n\n✓ ")
    found = tables(text)
    by_head = {tuple(t[0]): t for t in found}
    rows = by_head["policy", "sides", "50 %", "90 %", "99 %", "largest", "clipped", "first clipped"]
    assert [row[:2] for row in rows[1:]] == [[p.policy, f"{r.rollout} / {r.trainer}"] for p in told.parities
                                             for r in p.whole]  # fmt: skip
    metrics = [t for t in found if t[0][0] == "metric"]
    assert [[row[0] for row in t[1:]] for t in metrics] == [list(METRICS)] * 2
    assert "versions" not in text
    assert "new tokens: 16" in text


def test_the_page_is_whole_without_a_script_and_nothing_acts(told):
    hostile = replace(
        told, causes=(msgspec.structs.replace(CAUSE, id=BAD),),
        origin=msgspec.structs.replace(told.origin, model=BAD, device=BAD, asked={HOSTILE: BAD}, versions={BAD: BAD}),
    )  # fmt: skip
    page = Page(pages.as_html(rollout_report(hostile)))
    assert set(page.tags) <= TAGS | DRAWING, set(page.tags) - TAGS
    assert "script" not in page.tags
    assert page.tags["svg"] == 4  # two charts, each for wide windows and for phones
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    policy = next(v for k, v in page.attributes if k == "content" and "default-src" in v)
    assert "script-src 'none'" in policy
    assert not [v for k, v in page.attributes if k in ("src", "href", "xlink:href") and v not in ("data:,", "#words")]
    assert page.said["text"].count("window.acted=1") > 4  # shown, as text
    shown = [
        t for t in MARKDOWN.parse(pages.as_markdown(rollout_report(hostile))) if t.type in ("inline", "html_block")
    ]
    assert not [t for t in shown if t.type == "html_block"]
    assert not {c.type for t in shown for c in t.children} & {"html_inline", "image", "link"}


@pytest.mark.parametrize("name", [BAD, "a\0b", "a\x1bb", "a\ud800b"], ids=["markup", "null", "escape", "surrogate"])
def test_names_in_a_picture_are_text(name):
    """vl-convert aborts the process at a null or an escape."""
    drawing = svg(distribution_chart({name: np.array([[1e-3, 2e-3]])}))
    assert set(Page(drawing).tags) <= DRAWING | {"div"}


def test_a_picture_is_drawn_for_wide_windows_and_for_phones():
    """A phone of 390 pixels shows all of it, with as large letters, and each name of its own line."""
    sizes = {"bf16: engine / fp64": np.array([[1e-3, 2e-3]]), "fp32: engine / fp64": np.array([[1e-6, 2e-6]])}
    drawing = svg(distribution_chart(sizes))
    assert re.findall(r'<div class="(\w+)"><svg[^>]* width="(\d+)"', drawing) == [("wide", "900"), ("narrow", "337")]
    style = template_file("report.css")
    assert ".still .narrow { display: none; }" in style
    assert ".still .wide { display: none; }" in style[style.index("@media (max-width: 40rem)") :]


# What is drawn


def test_the_share_beyond_is_counted():
    """Of 0, 0, 1, 2, 2, NaN: 3 of 5 reach 1, 2 of 5 reach 2; 0 has no place on a logarithmic axis."""
    sizes, shares = beyond(np.array([[0.0, -2.0, 1.0], [0.0, 2.0, np.nan]]))
    assert sizes.tolist() == [1, 2, 2]
    assert shares.tolist() == pytest.approx([3 / 5, 2 / 5, 1 / 5])


def test_a_long_line_keeps_its_ends():
    values = np.random.default_rng(0).standard_normal((50, 100))
    sizes, shares = beyond(values)
    assert len(sizes) <= rollout_charts.STEPS
    assert (sizes[0], sizes[-1]) == (np.abs(values).min(), np.abs(values).max())
    counted = [(np.abs(values) >= x).mean() for x in sizes]
    np.testing.assert_allclose(shares, counted)


def test_drift_is_the_mean_of_a_bin():
    values = np.arange(32.0).reshape(2, 16) * np.array([1, -1] * 8)
    values[1, 8:] = np.nan
    at, mean = along(values)  # 24 tokens: 3 bins of positions, from 0, 5 and 10
    assert at.tolist() == [0, 5, 10]
    expected = [[*range(5), *range(16, 21)], [*range(5, 10), *range(21, 24)], [*range(10, 16)]]
    np.testing.assert_allclose(mean, [np.mean(x) for x in expected])
    assert along(np.full((1, 3), np.nan))[0].tolist() == []


def test_what_is_apart_leaves_out_a_sequence_with_a_fault(told):
    p = told.parities[0]
    sides = {k: x.copy() for k, x in p.sides.items()}
    sides["engine"][0, 2] = np.nan
    spoilt = replace(p, sides=sides).apart("engine", "fp64")
    assert np.isnan(spoilt[0]).all()
    np.testing.assert_array_equal(spoilt[1], (p.sides["fp64"] - p.sides["engine"])[1])
    sides["engine"][0, 2] = 0.5
    assert np.isnan(replace(p, sides=sides).apart("engine", "fp64")[0]).all()


# The command


@pytest.mark.parametrize("name", ["altair", "vl_convert"])
def test_a_page_without_its_libraries_is_refused_before_anything_is_drawn(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("precaudit.cli._drawing.draw_rollouts", lambda *_: pytest.fail("drawn"))
    assert run(["rollout", "tiny", "--html", str(tmp_path / "r.html")]) == 2
    assert "pip install 'precaudit[html]'" in capsys.readouterr().err


def test_the_command_writes_pages_of_rollouts_made_elsewhere(tmp_path, capsys):
    file, page, out = tmp_path / "r.jsonl", tmp_path / "a" / "r.html", tmp_path / "r.md"
    line = {"id": "r<b>", "prompt_token_ids": [100, 101], "token_ids": [32, 101, 9], "logprobs": [-1.0, -2.0, -3.0]}
    file.write_text(json.dumps(line))
    call = ["rollout", "tiny", "--from", str(file), "--no-fp64", "--fail-above", "k3_kl=1e-9"]
    assert run([*call, "--html", str(page), "--markdown", str(out)]) == 1
    assert "✗" in Page(page.read_text()).said["text"]
    assert "r<b>" in Page(page.read_text()).said["text"]
    assert re.search("### precaudit rollout: `tiny`\n\n✗ engine against policy: k3", out.read_text())
    assert run([*call, "--html", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err


def test_small_numbers_of_a_rollout_are_written_as_everywhere():
    record = SimpleNamespace(mismatch=SimpleNamespace(k3_kl=7.5554e-5, ppl_ratio=1.0037872, kl=None))
    assert [cell(record, name) for name in ("k3_kl", "ppl_ratio", "kl")] == ["7.56e-5", "1 (+0.00379)", "undefined"]

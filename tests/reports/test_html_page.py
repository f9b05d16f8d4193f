"""One page of a run, whole by itself: what stands in it, what cannot act in it, and how it looks in a browser."""

import json
import os
import re
import shutil
import sys
from base64 import b64decode, b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

import precaudit
from precaudit import Entry, Program
from precaudit.cli import run
from precaudit.diagnosis.evidence.records import Finding, LineRemedy, Remedy, Share, Shares
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import Verdict
from precaudit.recording.programs.tracing import trace_program as trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.written import recall
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions
from precaudit.references.comparison.programs import compare_program as compare_program
from precaudit.reports import charts, html
from precaudit.reports.cells import cells, first_map, map_cells, story
from precaudit.reports.escaping import escape_html as escaped
from precaudit.reports.escaping import plain, script
from precaudit.reports.fitting import Table
from precaudit.reports.gate import gate_report
from precaudit.reports.gathered import gather_run
from precaudit.reports.meanings import SHOWN, meaning
from precaudit.reports.pages import as_html, as_markdown
from precaudit.reports.report import Headline, Report, Section
from precaudit.reports.rollout_charts import distribution_chart, svg
from precaudit.reports.templates import template_file
from precaudit.reports.tokens import text_of, token_ids, worst_ratios
from precaudit.schema.glossary import look_up
from precaudit.schema.limits import default_limits
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import FormulaError, as_kind
from precaudit.schema.records.lines import write_lines
from precaudit.schema.selection import Selection
from tests.helpers.hostile import BAD, MARKDOWN, TAGS, Page, texts


def write_diagnosis(folder, text):
    """Write beside a run what diagnose would, with ``text`` wherever it holds words."""
    of = file_hash(folder / "run.json")
    finding = Finding(
        kind="semantics", cause=text, says=text, layer=0, point="v", layers=(0, 1), phases=(text,), prompts=(text,),
        records=3, rel_l2=None, explained=1.0, equal=1.0, second=(text, 0.1), worst=None, fix=text, fails=text,
        shadow=0.1,
    )  # fmt: skip
    share = Shares(
        run=of, prompt=text, objective="margin", fp64=1.0, change=0.1, explained=0.1, absolute=0.2,
        shares=(Share(0, text, 0.06), Share(None, "v", 0.04)),
    )  # fmt: skip
    remedy = Remedy(
        run=of, part=text, settings={}, command=text, code=text, kl=(1.0, 0.1), rms=(1.0, 0.1), margin=(1.0, 0.1),
        point="v", local=None, flips=(2, 1), positions=8, gain=0.9, time=1.2, decode_time=1.1, memory=1.3,
    )  # fmt: skip
    line = LineRemedy(
        run=of, output=text, measure="kl", sources=(text,), text=(text,), size=(1.0, 0.5), all=0.1, flips=(1, 0),
        rows=4, gain=0.5, error=0.1, bytes=256,
    )  # fmt: skip
    write_lines(folder / "findings.jsonl", [finding])
    write_lines(folder / "shares.jsonl", [share, msgspec.structs.replace(share, run="another", prompt="other run's")])
    write_lines(folder / "remedies.jsonl", [remedy])
    write_lines(folder / "lines.jsonl", [line])


@pytest.fixture(scope="module")
def hostile(honest, tmp_path_factory):
    """Return the same with a diagnosis that is full of markup."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(honest, folder)
    write_diagnosis(folder, BAD)
    return folder


def with_errors(found, errors):
    return replace(found, compared=replace(found.compared, errors=errors))


def inert(text):
    """Check that nothing of others acts in a page, and return the page parsed."""
    page = Page(text)
    assert set(page.tags) <= TAGS, set(page.tags) - TAGS
    assert (page.tags["script"], page.tags["style"], page.tags["link"], page.tags["title"]) == (3, 1, 1, 1)
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "srcset", "action", "formaction"), name
        assert name != "href" or re.fullmatch(r"#[a-z-]+|data:,", value), value
    assert not re.search(r"url\(|@import|expression\(", page.said["style"])
    rest = text.replace(html._libraries(), "")
    assert not any("$schema" in x for x in page.data["charts"].values())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", rest)
    assert not re.search(r"::[a-z]+-[a-z]+::|##\[", rest)
    return page


# What cannot act


@settings(max_examples=50)
@given(texts)
def test_an_html_text_is_text(text):
    page = Page(f'<p title="{escaped(text)}">{escaped(text)}</p>')
    assert page.tags == {"p": 1}
    assert page.said["text"] == plain(text)
    assert page.attributes == [("title", plain(text))]
    assert not re.search(r"::\w|##\[", escaped(text))


@settings(max_examples=50)
@given(texts)
def test_json_in_a_script_is_json_and_ends_nothing(text):
    made = script({"a": [text, 1, None], text: True})
    assert not re.search(r"[<>&\n\r]|::\w|##\[", made)
    assert json.loads(made) == {"a": [plain(text), 1, None], plain(text): True}


@pytest.mark.turn  # 5 s
def test_text_of_others_acts_nowhere_in_the_page(hostile):
    text = html.render(hostile)
    page = inert(text)
    shown, said = plain(BAD), page.said["text"]
    assert said.count(shown) >= 10  # finding, share, remedy, tokens, tables, provenance
    assert any(shown in line for its in page.data["stories"].values() for _, *told in its for _, line in told)
    # what diagnosis found is said first, and what is of another run nowhere
    assert said.index(f"v of layer 0, {shown}: {shown}.") < said.index("Where the error is")
    assert {"remedies", "share0"} <= set(page.data["charts"])
    assert "share1" not in page.data["charts"]
    assert "other run's" not in text
    assert "precaudit diagnose" not in said


def test_no_script_but_the_page_s_own_runs(honest):
    text = html.render(honest)
    page = inert(text)
    policy = re.search(r'Policy" content="([^"]*)"', text)[1]
    known = {f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in page.said["script"][1:]}
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert set(allowed["script-src"].split()) == known
    assert allowed["default-src"] == "'none'"


# What stands in it


def test_an_honest_run_before_diagnosis(honest):
    found = gather_run(honest)
    page = inert(html.gathered_page(found))
    said = page.said["text"]
    assert f"rounding explains all {found.judgement.counts['pass']:,} errors that were judged." in said
    assert f"precaudit diagnose {honest}" in said
    assert set(page.data["charts"]) == {"local", "forward", "growth"}
    for wanted in ("The worst tokens", "Prefill against decode", "What was run", "bit for bit", jax.__version__):
        assert wanted in said, wanted
    for kind in ("local", "forward"):
        shown = page.data["charts"][kind]["data"]["values"]
        assert len(shown) == len(page.data["stories"][kind]) == len(cells(found.errors, kind)) > 30


def test_findings_that_the_verdict_contradicts_are_of_something_else(honest, tmp_path):
    """They were written of a part of the run, or before its reference was mended."""
    shutil.copytree(honest, tmp_path / "run")
    write_diagnosis(tmp_path / "run", "told")
    (kept,) = gather_run(tmp_path / "run").findings
    assert kept.says == "told"
    write_lines(tmp_path / "run" / "findings.jsonl", [msgspec.structs.replace(kept, rel_l2=0.1)])
    found = gather_run(tmp_path / "run")
    assert found.findings is None
    assert html._verdict(found).mark == "✓"
    write_lines(tmp_path / "run" / "findings.jsonl", [])
    assert gather_run(tmp_path / "run").findings == ()


def test_what_is_not_known_is_no_success(honest):
    found = gather_run(honest)
    unknown = Verdict.of(found.errors[1], "unknown", text="no weights")
    j = replace(found.judgement, verdicts=(unknown,), counts={"unknown": 1, "pass": 9})
    assert html._verdict(replace(found, judgement=j)).mark == "?"
    assert html._verdict(replace(found, judgement=replace(j, verdicts=(), counts={}))).mark == "?"
    failed = replace(j, verdicts=(msgspec.structs.replace(unknown, status="nonfinite"),), counts={"nonfinite": 1})
    assert html._verdict(replace(found, judgement=failed)).mark == "✗"


def test_a_cell_is_its_worst_record(honest):
    errors = recall(honest).errors
    at = next(i for i, e in enumerate(errors) if (e.kind, e.point, e.layer) == ("local", "q", 3))
    for change, mark, band in (
        ({"nonfinite": 3}, "✗", "≥ 10"),
        ({"unknown": "no weights", "rel_l2": None, "unexplained": None}, "?", None),
        ({"rel_l2": "nan"}, "✗", None),
    ):
        changed = [*errors[:at], msgspec.structs.replace(errors[at], **change), *errors[at + 1 :]]
        (cell,) = (c for c in cells(changed, "local") if (c.point, c.layer) == ("q", 3))
        assert cell.mark == mark
        assert band is None or charts.band("local", cell.size) == band
        assert sum(cell.counts.values()) == sum((e.kind, e.point, e.layer) == ("local", "q", 3) for e in errors)
    told = dict(story(cell))
    assert {"where", "verdict", "worst element"} <= set(told)
    assert "layer 3 q" in told["where"]


def test_every_verdict_is_in_a_cell_and_the_worst_is_shown_first(honest):
    """A formula that is another, a tensor that is not there, and two views that part have no local record."""
    found = gather_run(honest)
    one = next(e for e in found.errors if (e.kind, e.point, e.layer) == ("forward", "attn_out", 4))
    formula = as_kind(one, FormulaError, rel_l2=0.3, scopes=None)
    missing = Verdict(
        status="missing", kind="local", prompt="a", phase="prefill", layer=3, point="gone", text="no such"
    )
    parts = Verdict(status="fail", kind="prefill/decode", prompt="a", phase="decode", point="logits", metric="top1",
                    text="prefill says 1, decode 2")  # fmt: skip
    maps = map_cells([*found.errors, formula], verdicts=[missing, parts])
    ((cell,), (absent,), (logits,)) = (
        [c for c in maps[kind] if (c.layer, c.point) == at]
        for kind, at in (("formula", (4, "attn_out")), ("local", (3, "gone")), ("forward", (None, "logits")))
    )
    assert (cell.mark, absent.mark, logits.mark) == ("✗", "?", "✗")
    assert cell.size == pytest.approx(3e5)
    assert "no such" in dict(story(absent))["verdict"]
    assert "prefill says 1" in dict(story(logits))["verdict"]
    assert first_map(maps) == "forward"  # of maps with a failure the first
    assert first_map({**maps, "forward": [], "local": [absent]}) == "formula"
    page = inert(html.gathered_page(with_errors(found, [*found.errors, formula])))
    assert page.data["first"]["formula"] == 0
    before = msgspec.structs.replace(formula, layer=2, rel_l2=0.003)  # smaller, and where the fault begins
    page = inert(html.gathered_page(with_errors(found, [*found.errors, formula, before])))
    assert "layer 2" in str(page.data["stories"]["formula"][page.data["first"]["formula"]][1])
    assert {"local", "forward", "formula"} <= set(page.data["charts"])
    orders = [page.data["charts"][kind]["layer"][0]["encoding"]["y"]["sort"] for kind in ("local", "formula")]
    assert orders[0] == orders[1]
    chosen = page.data["charts"]["formula"]["params"][0]["value"]
    assert chosen == [{"cell": page.data["first"]["formula"]}]


def sections_of(text):
    """Return the (heading, what follows it) of every section, and the links of the menu."""
    bodies = re.findall(r"<section[^>]*>\s*<h2>(.*?)</h2>(.*?)</section>", text, re.S)
    menu = re.search(r"<nav.*?</nav>", text, re.S)[0]
    return bodies, re.findall(r">([^<>\n]+)</a>", menu)


def test_findings_come_first_and_the_menu_has_the_headings(honest, hostile):
    for folder in (honest, hostile):
        text = html.render(folder)
        bodies, menu = sections_of(text)
        assert [heading for heading, _ in bodies] == menu
        assert all(re.sub(r"<[^>]*>|\s", "", body) or 'class="chart"' in body for _, body in bodies)
        assert len(menu) == len(set(menu)) >= 6
    assert menu[:2] == ["Findings", "Where the error is"]  # right after the verdict


def test_what_is_not_there_is_a_note_and_no_section(honest):
    bodies, _ = sections_of(html.render(honest))
    notes = dict(bodies)["Notes"]
    assert "Findings" not in dict(bodies)
    assert "Findings: not known yet, nor what would help. Run: precaudit diagnose" in notes


def test_no_box_of_a_page_cuts_its_last_row():
    style = template_file("report.css")
    assert not re.search(r"max-height: (?!none)|(?<!overflow-)(?<!-)overflow: (auto|scroll)", style)


def test_axes_of_powers_write_numbers_as_everywhere_and_wide_tables_keep_their_last_column():
    """No 1e+1 and 0e+0; the verdict of a sweep, its sixteenth column, is in view at 1,400 pixels."""
    assert charts.POWERS["labelExpr"] == "replace(replace(datum.label, 'e+', 'e'), 'e0', '')"
    assert "table:has(th:nth-child(13))" in template_file("report.css")


def test_names_of_marks_do_not_overlap():
    rng = np.random.default_rng(3)
    for n in (0, 1, 2, 14, 60):
        rows = [{"is": f"n{i}", "x": float(x), "y": float(y)} for i, (x, y) in enumerate(rng.random((n, 2)).round(1))]
        found = charts.named_apart(rows, "is", "x", "y")
        assert len(found) == n
        assert not any(r["left"] and r["right"] for r in found)
        if not n:
            continue
        xs, ys = ([r[k] for r in rows] for k in "xy")
        wide, high = charts.LABEL * (max(xs) - min(xs)), charts.LINE * (max(ys) - min(ys))
        ends = [(r["x"] - bool(r["left"]) * wide, r["x"] + bool(r["right"]) * wide) for r in found]
        room = charts.EDGE * (max(xs) - min(xs))
        assert n == 1 or all(min(xs) - room <= a and b <= max(xs) + room for a, b in ends)  # none is cut
        boxes = [(r["x"] - (wide if r["left"] else 0), r["y"]) for r in found if r["left"] or r["right"]]
        assert boxes
        assert not any(
            abs(a - c) < wide - 1e-9 and abs(b - d) < high - 1e-9
            for i, (a, b) in enumerate(boxes) for c, d in boxes[:i]
        )  # fmt: skip


def test_names_of_lines_and_of_axes_have_room():
    spec = charts.style(charts.altair_of().Chart(charts.data_of([])).mark_line(), charts.LIGHT, 100).to_dict()["config"]
    assert spec["legend"]["columnPadding"] >= 28
    assert spec["axisY"]["titlePadding"] >= 14


def test_a_list_has_one_mark_and_long_tables_are_folded():
    rows = tuple((str(i),) for i in range(101))
    of = [
        Section("a", lines=("- one", "two")),
        Section("b", tables=(Table("", ("n",), rows[:100]), Table("", ("n",), rows))),
    ]
    text = as_html(Report(Headline("✓", "said."), tuple(of), command="x", title="t"))
    assert "<li>one</li><li>two</li>" in text
    assert re.findall(r"<summary>(\d+) rows", text) == ["101"]


def columns(page):
    """Yield the heads of each table of a page, and its rows."""
    for table in re.findall(r"<table.*?</table>", page, re.S):
        rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in re.findall(r"<tr>.*?</tr>", table, re.S)]
        yield [re.sub(r"<[^>]*>", "", x) for x in rows[0]], rows[1:]


def test_a_gate_s_page_has_no_empty_column_and_no_empty_line():
    """Of a model no line is known, and without budgets nobody wrote a reason."""
    plain = Verdict(status="fail", kind="local", point="q", layer=1, prompt="a", phase="prefill", step=0,
                    metric="excess", scope="tensor", value=3.2, limit=1.5)  # fmt: skip
    reasoned = msgspec.structs.replace(plain, point="v", why="users see it")
    for verdicts, names in (
        ([plain], ["verdict", "where", "kind", "metric", "value", "limit"]),
        ([plain, reasoned], ["verdict", "where", "kind", "metric", "value", "limit", "budget&#x27;s reason"]),
        ([], None),
    ):
        status = {"fail": len(verdicts)} if verdicts else {"pass": 7}
        report = gate_report(Judgement("run", tuple(verdicts), status), "run")
        page = as_html(report)
        found = list(columns(page))
        assert [heads for heads, _ in found] == ([] if names is None else [names])
        assert all(any(cells) for _, rows in found for cells in zip(*rows, strict=True))
        assert not re.search(r"<(p|ul|h2|h3|section|dl)[^>]*>\s*</\1>", page)
        assert ("budget's reason" in as_markdown(report)) == (reasoned in verdicts)


def test_remedies_name_device_spread_and_direction(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "run")
    write_diagnosis(tmp_path / "run", "told")
    (kept,) = gather_run(tmp_path / "run").remedies
    known = msgspec.structs.replace(kept, device="cpu:0", ranges={"prefill": (1.1, 1.4), "decode": (1.0, 1.25)})
    write_lines(tmp_path / "run" / "remedies.jsonl", [known])
    page = inert(html.render(tmp_path / "run"))
    for wanted in (
        "more is nearer FP64",
        "on cpu:0, beyond 1 costs more",
        "1.20 × (1.10 – 1.40)",
        "1.10 × (1.00 – 1.25)",
    ):
        assert wanted in page.said["text"], wanted
    titles = json.dumps(page.data["charts"]["remedies"])
    assert "over 1: slower" in titles
    assert "up is nearer FP64" in titles


def test_the_chosen_cell_is_drawn_over_its_neighbours(honest):
    (last,) = charts.heat_map(recall(honest).errors).to_dict()["layer"][-1:]
    assert last["transform"] == [{"filter": {"param": "picked", "empty": False}}]
    assert last["mark"]["fill"] == "transparent"


def test_the_limit_itself_is_not_beyond():
    names = charts.bands("local")
    assert (charts.band("local", 1.0), charts.band("local", 1.0001)) == (names[4], names[5])
    assert (charts.band("local", None), charts.band("local", float("nan"))) == (charts.NONE, charts.NONE)
    assert charts.band("local", float("inf")) == names[-2]
    assert charts.STEPS["forward"][charts.WITHIN - 1] == default_limits().ratio.value
    assert len(names) == 1 + len(charts.LIGHT.cool) + len(charts.LIGHT.hot)


def test_charts_are_plotted_from_python(honest):
    found = recall(honest)
    spec = precaudit.plot(found).to_dict()
    assert len({r["point"] for r in spec["data"]["values"]}) > 10
    grown = precaudit.plot(found, "growth").to_dict()["data"]["values"]
    assert {r["of"] for r in grown} == {"measured", "emulated policy"}
    assert {r["layer"] for r in grown} == {3, 4}
    with pytest.raises(precaudit.errors.UserError, match="none of local, forward, formula, growth"):
        precaudit.plot(found, "everything")


def test_a_program_s_errors_are_plotted_too(program_run):
    assert precaudit.plot(gather_run(program_run).errors).to_dict()["data"]["values"]


def test_tokens_are_text_where_the_tokenizer_is_the_runs_own(honest):
    found = recall(honest)
    text = text_of(found.run)
    assert text(found.run.prompts["a"].tokens) == "x = 1"
    assert any("=" in t.before + t.text + t.after for t in worst_ratios(found, text) if t.prompt == "a")
    ids = token_ids(found.run, "a")
    assert [ids[i] for i in range(5)] == list(b"x = 1")
    assert len(ids) > 5  # those that were generated
    other = replace(found.run, prompts={"a": msgspec.structs.replace(found.run.prompts["a"], text="another text")})
    assert text_of(other) is None
    assert all(re.fullmatch(r"[\d ]*", t.before) for t in worst_ratios(found, None))


def test_the_tokens_with_the_largest_ratios_are_told(honest):
    """Ten are kept while records stream by: they are the ten of all, each by the largest of its records."""
    found = recall(honest)
    one = next(e for e in found.errors if e.kind == "forward" and "ratio" in (e.scopes or {}).get("token", {}))
    ratios = np.random.default_rng(5).permutation(400).reshape(50, 8)  # of 50 tokens, 8 records each, none twice
    errors = [
        msgspec.structs.replace(one, scopes={"token": {"ratio": (float(ratios[t, i]), t)}})
        for i in range(8) for t in range(50)
    ]  # fmt: skip
    largest = np.argsort(-ratios.max(1))[:10]
    told = [(t.position, t.ratio) for t in worst_ratios(replace(found, errors=errors), None)]
    assert told == [(t, ratios[t].max()) for t in largest]


@pytest.mark.turn  # 3 s
def test_a_model_of_thirty_layers_is_less_than_three_megabytes(honest):
    found = gather_run(honest)
    one = [e for e in found.errors if e.layer == 3]
    grown = [msgspec.structs.replace(e, layer=i) for i in (*range(3), *range(5, 30)) for e in one]
    text = html.gathered_page(with_errors(found, [*found.errors, *grown]))
    assert len(text.encode()) < 3e6
    assert len(json.loads(Page(text).said["script"][0])["stories"]["forward"]) > 30 * 15


def test_words_are_those_of_the_glossary():
    assert meaning("excess") == look_up("excess")[0].meaning.replace("`", "")
    assert all(map(meaning, SHOWN))
    assert meaning("a word that is none") == ""


# Programs


def test_a_program_s_run(program_run, tmp_path):
    page = inert(html.render(program_run))
    assert "rounding explains all" in page.said["text"]
    assert {"local", "forward"} <= set(page.data["charts"])
    assert any(label == "line" for _, *told in page.data["stories"]["local"] for label, _ in told)
    assert "Prefill against decode" not in page.said["text"]
    shutil.copytree(program_run, tmp_path / "run")
    write_diagnosis(tmp_path / "run", BAD)
    page = inert(html.render(tmp_path / "run"))
    assert {"remedies", "share0"} <= set(page.data["charts"])
    assert "256" in page.said["text"]


def test_a_program_that_says_its_tokens_has_its_worst_ones_and_what_decode_sees_again(tmp_path):
    """Means of embeddings so far: of four tokens at once, of two more one by one, of all six; each is seen twice."""
    ids = (3, 1, 4, 1, 5, 9)

    def whole(e, tokens):
        mean = jnp.cumsum(e[tokens], 0) / jnp.arange(1.0, 1.0 + len(tokens))[:, None]
        return jnp.tanh(mean) @ e.T, e[tokens].sum(0)

    def decode(e, token, at, total):
        total = total + e[token]
        return jnp.tanh(total / (at.astype(jnp.float32) + 1)) @ e.T, total

    then = {
        "decode": Entry(
            decode, lambda _, out: (jnp.int32(ids[4]), jnp.int32(4), out[1]), 1,
            lambda _, out: (jnp.int32(ids[5]), jnp.int32(5), out[1]), ("logits", "total"), tokens=0, start=1,
        ),
        "again": Entry(whole, lambda *_: (jnp.array(ids),), outputs=("logits", "total"), tokens=0),
    }  # fmt: skip
    embedded = jax.random.normal(jax.random.key(3), (10, 8), jnp.float32)
    given = (embedded, {"a": (jnp.array(ids[:4]),)})
    program = Program(whole, *given, outputs=("logits", "total"), tokens=0, entry="prefill", then=then)
    compare_program(trace_program(program, tmp_path / "run"), program)
    found = gather_run(tmp_path / "run")
    told = worst_ratios(found.compared, None)
    assert len({(t.at.phase, t.at.step, t.position) for t in told}) == len(told) >= 3
    held = {"prefill call": ids[:4], "again call": ids}
    for t in told:
        its = held.get(t.at.phase) or ids[4 + t.at.step :][:1]
        assert (t.before, t.text) == (" ".join(map(str, its[: t.position])), str(its[t.position]))
    assert told[0].ratio == max(
        e.scopes["token"]["ratio"][0] for e in found.errors
        if e.kind == "forward" and (e.phase == "decode call" or e.n > 10)  # n of a sum over all tokens is 8
    )  # fmt: skip
    bodies, _ = sections_of(html.gathered_page(found))
    assert "top-1 equal at 6 of 6 positions" in dict(bodies)["Prefill against decode"]
    assert dict(bodies)["The worst tokens"].count("<tr") == len(told) + 1


# The command


def test_the_command_writes_the_page_whole(honest, tmp_path, capfd):
    file = tmp_path / "new" / "report.html"
    assert run(["report", str(honest), "--html", str(file)]) == 0
    assert file.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert str(file) in capfd.readouterr().out


@pytest.mark.parametrize("name", ["altair", "vl_convert"])
def test_without_the_extra(honest, tmp_path, monkeypatch, capfd, name):
    html._libraries.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    assert run(["report", str(honest), "--html", str(tmp_path / "r.html")]) == 2
    said = capfd.readouterr().err
    assert "pip install 'precaudit[html]'" in said
    assert "Traceback" not in said
    assert not (tmp_path / "r.html").exists()


def test_findings_are_told_in_a_terminal_and_in_markdown_too(honest, hostile, capfd):
    for folder, there in ((honest, False), (hostile, True)):
        assert run(["report", str(folder)]) == 0
        said = capfd.readouterr().out
        assert ("\n1. semantics: " in said) == there
        assert ("\n   also in layers 1" in said) == there
        assert run(["report", str(folder), "--markdown", "-"]) == 0
        tokens = MARKDOWN.parse(capfd.readouterr().out)
        heads = ["".join(c.content for c in t.children) for t in tokens if t.type == "inline"]
        assert ("Findings" in heads) == any(h.startswith("1. semantics") for h in heads) == there
        assert not {c.type for t in tokens for c in t.children or ()} & {"html_inline", "image", "link"}


def test_a_run_that_was_not_compared(honest, tmp_path, capfd):
    shutil.copytree(honest, tmp_path / "run")
    (tmp_path / "run" / "errors.jsonl").write_bytes(b"")
    assert run(["report", str(tmp_path / "run"), "--html", str(tmp_path / "r.html")]) == 2
    assert "precaudit compare" in capfd.readouterr().err
    assert not (tmp_path / "r.html").exists()
    shutil.copytree(honest, tmp_path / "other")
    (tmp_path / "other" / "findings.jsonl").write_text('{"kind": "rounding"}\n')
    assert run(["report", str(tmp_path / "other"), "--html", str(tmp_path / "r.html")]) == 2
    assert "findings.jsonl:1" in capfd.readouterr().err


# In a browser. Slow: two minutes, most of it for the trace and diagnosis of a mistake.


@pytest.fixture(scope="module")
def browser():
    """Return headless Chromium."""
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    binary = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromium-driver (Debian: apt-get install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for x in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(x)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = selenium.Chrome(options=options, service=Service(driver))
    yield made
    made.quit()


def show(browser, file, width=1280, height=900, scheme="light"):
    """Open a page in a window of a size and wait until its charts are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(file.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.documentElement.dataset.drawn"))
    assert [x for x in browser.get_log("browser") if x["level"] != "INFO"] == []


def screenshot(browser, file):
    found = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
    file.write_bytes(b64decode(found["data"]))


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """Return the page of tiny with a mistake in layer 2: the scale of the scores is applied twice in decode."""
    from exams.exam_diagnose import MIDDLE
    from exams.mistakes import MISTAKES, placed
    from precaudit.diagnosis.diagnose import diagnose

    mistake = next(m for m in MISTAKES if m.name == "scale twice in decode")
    folder = tmp_path_factory.mktemp("mistaken")
    subject = mistake.subject(MIDDLE)
    prompts = [
        Prompt(id="capital", prompt="What is the capital of Argentina, and on which river does it lie?"),
    ]
    with placed():
        run = trace(subject, folder / "decode", prompts, Selection.parse(points="all"), TraceOptions(4))
        diagnose(run, None, CompareOptions(accum=(), cache=folder / "refs"), subject=subject)
    file = folder / "report.html"
    file.write_text(html.render(folder / "decode"), encoding="utf-8")
    return SimpleNamespace(file=file, layer=MIDDLE)


@pytest.mark.slow
def test_a_browser_shows_the_page(browser, mistaken, tmp_path):
    for width, height in ((1280, 900), (390, 844)):
        for scheme in ("light", "dark"):
            show(browser, mistaken.file, width, height, scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
            dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 27)"
            assert dark == (scheme == "dark")
            drawn = browser.execute_script("return document.querySelectorAll('.chart svg').length")
            assert drawn == browser.execute_script("return document.querySelectorAll('.chart').length") >= 5
            file = tmp_path / f"{scheme}-{width}.png"
            screenshot(browser, file)
            assert file.stat().st_size > 10_000
    wanted = os.environ.get("PRECAUDIT_SCREENSHOT")
    if wanted:
        show(browser, mistaken.file, height=1260)
        screenshot(browser, Path(wanted))
        assert Path(wanted).stat().st_size <= 300_000


def test_a_picture_fits_a_phone(browser, tmp_path):
    """Nothing of it is cut, and it is not scrolled sideways."""
    chart = distribution_chart({"bf16: engine / fp64": np.array([[1e-3, 2e-3]])})
    file = tmp_path / "page.html"
    of = Section("a", pictures=lambda: [("", svg(chart))])
    file.write_text(as_html(Report(Headline("✓", "said."), (of,), command="x", title="t")), encoding="utf-8")
    for width, shown in ((390, [0, 337]), (1400, [900, 0])):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(file.as_uri())
        widths = "[...document.querySelectorAll('.chart svg')].map((x) => Math.round(x.getBoundingClientRect().width))"
        assert browser.execute_script(f"return {widths}") == shown
        room = "document.querySelector('.chart').scrollWidth - document.querySelector('.chart').clientWidth"
        assert browser.execute_script(f"return {room}") == 0
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_a_wide_table_has_a_shadow_where_it_goes_on(browser, tmp_path):
    """Two of four layers move with the table, and cover the shadows of its ends where it ends."""
    wide = Table("", tuple(f"column {i}" for i in range(20)), (("0.123",) * 20,))
    file = tmp_path / "page.html"
    file.write_text(as_html(Report(Headline("✓", "said."), (Section("a", tables=(wide,)),), command="x", title="t")))
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(file.as_uri())
    table = "document.querySelector('.scroll')"
    assert browser.execute_script(f"return {table}.scrollWidth > {table}.clientWidth")
    shown = browser.execute_script(
        f"const s = getComputedStyle({table}); return [s.backgroundAttachment, s.backgroundImage]"
    )
    assert shown[0] == "local, local, scroll, scroll"
    assert shown[1].count("linear-gradient") == 4


@pytest.mark.slow
def test_a_cell_tells_its_story_when_it_is_clicked(browser, mistaken):
    from selenium.webdriver.common.by import By

    show(browser, mistaken.file)

    def title(kind):
        return browser.find_element(By.CSS_SELECTOR, f"#story-{kind} h3").text

    def click(kind, layer, point):
        browser.find_element(
            By.CSS_SELECTOR, f'#{kind} path[aria-label*="layer: {layer};"][aria-label*="point: {point};"]'
        ).click()

    assert title("local").startswith(f"✗ layer {mistaken.layer} scores (")  # the worst is told first
    assert "scale twice" in browser.find_element(By.ID, "story-local").text
    click("local", 1, "attn_out")
    assert title("local").startswith("✓ layer 1 attn_out (")
    assert "scale twice" not in browser.find_element(By.ID, "story-local").text
    browser.find_element(By.ID, "tab-forward").click()
    click("forward", 0, "q")
    assert title("forward").startswith("✓ layer 0 q (")
    assert title("local") == ""  # away


@pytest.mark.slow
def test_a_table_sorts_when_a_header_is_clicked(browser, mistaken):
    from selenium.webdriver.common.by import By

    show(browser, mistaken.file)
    browser.find_element(By.CSS_SELECTOR, "#to-details summary").click()

    def column(i):
        return [c.text for c in browser.find_elements(By.CSS_SELECTOR, f"#to-details tbody td:nth-child({i})")]

    heads = [c.text for c in browser.find_elements(By.CSS_SELECTOR, "#to-details th button")]
    at = heads.index("rel_l2") + 1
    button = browser.find_element(By.CSS_SELECTOR, f"#to-details th:nth-child({at}) button")
    for down in (True, False):
        button.click()
        found = [float(x) for x in column(at) if x]
        assert found == sorted(found, reverse=down)
        assert len(found) > 100
    browser.find_element(By.CSS_SELECTOR, "#to-details th:nth-child(2) button").click()
    names = column(2)
    assert names == sorted(names)


@pytest.mark.slow
def test_nothing_of_others_acts_in_a_browser(browser, hostile, tmp_path):
    file = tmp_path / "hostile.html"
    file.write_text(html.render(hostile), encoding="utf-8")
    show(browser, file)
    assert browser.execute_script("return [window.acted, document.images.length, document.title.length > 0]") == [
        None,
        0,
        True,
    ]

"""Several policies at once: runs like any other on the same tokens, one table, and sentences of what differs."""

import io
import json
import shutil
from unittest.mock import patch

import pytest
from rich.console import Console

from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.session import Session
from precaudit.recording.tracing.subject import load
from precaudit.reports import fitting
from precaudit.reports.policies import PolicyRow, policies_report, row_texts
from precaudit.schema.digits import short
from precaudit.schema.policies import load_policy
from precaudit.schema.records.errors import ERROR_KINDS
from precaudit.schema.records.lines import read_lines
from precaudit.workflows import several
from tests.helpers.paths import FIXTURES

MODEL = str(FIXTURES / "llama-gqa")
PROMPTS = [("a", [1, 2, 3, 4, 5]), ("b", [7, 8]), ("c", [3, 1, 4, 1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of bf16 and fp32, compared; ``runs`` beside it is as trace left it."""
    folder = tmp_path_factory.mktemp("policies")
    lines = [json.dumps({"id": name, "tokens": tokens}) for name, tokens in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    assert run(asked(folder, folder / "traced")) == 0
    shutil.copytree(folder / "traced", folder / "runs")
    return folder


def asked(folder, output, *more):
    given = {
        "--prompts": folder / "prompts.jsonl",
        "--decode-steps": 2,
        "--points": "v,logits",
        "--policy": "bf16,fp32",
    }
    return ["trace", MODEL, *(str(x) for pair in given.items() for x in pair), "-o", str(output), *more]


@pytest.fixture(scope="module")
def compared(folder):
    """The rows that compare prints as JSON; its records are kept for those who ask again."""
    rows, said = several.compare_policies(folder / "runs", several_options(folder), lambda *_: None)
    return rows, said


def several_options(folder):
    from precaudit.references.comparison.compare import CompareOptions

    return CompareOptions(accum=(), cache=folder / "references")


@pytest.mark.turn  # 4 s
def test_each_is_a_run_like_any_other_on_the_first_one_s_tokens(folder):
    first, second = (open_run(folder / "traced" / name) for name in ("bf16", "fp32"))
    assert [r.record.policy["activations"] for r in (first, second)] == ["bfloat16", "float32"]
    assert second.record.requested.tokens_from == str(folder / "traced" / "bf16")
    for name, _ in PROMPTS:
        assert Recorded.of(first).fed_tokens(name) == Recorded.of(second).fed_tokens(name)
    both = [{(p.key, p.file, p.shape) for p in r.points if not p.support} for r in (first, second)]
    assert both[0] == both[1]


def test_the_table_is_of_the_records(folder, compared):
    rows, _ = compared
    assert [(r.policy, r.run) for r in rows] == [("bf16", "bf16"), ("fp32", "fp32")], "the first policy first"
    for row in rows:
        errors = read_lines(folder / "runs" / row.run / "errors.jsonl", ERROR_KINDS)
        local = max((e for e in errors if e.kind == "local"), key=lambda e: e.rel_l2)
        logits = [e for e in errors if e.kind == "forward" and e.point == "logits"]
        assert (row.local, row.where) == (local.rel_l2, _at(local))
        assert row.logits == max(e.rel_l2 for e in logits)
        assert row.kl == max(x for e in logits for x in e.distribution.kl)
        assert row.flips == sum(x == 0 for e in logits for x in e.distribution.top1)
        assert row.positions == sum(len(e.distribution.top1) for e in logits) == 3 * (1 + 3 + 3)
        assert row.explained == row.operations > 0
        assert row.verdict == "✓ pass"
    assert rows[1].logits < rows[0].logits / 1000, "float32 is nearer"


def _at(e):
    return e.point if e.layer is None else f"{e.point} layer {e.layer}"


def test_what_differs_is_said_of_each_against_the_first(compared):
    _, (formats, tokens) = compared
    assert formats.startswith("fp32 against bf16: ")
    assert "activations" in formats
    assert "float32, there bfloat16" in formats
    assert "the same tokens were fed" in tokens
    assert "of 21 positions" in tokens


@pytest.mark.usefixtures("compared")
def test_compare_of_a_folder_prints_one_table(folder, capfd, monkeypatch):
    monkeypatch.setenv("PRECAUDIT_CACHE", str(folder))
    assert run(["compare", str(folder / "runs"), "--accum", "none"]) == 0
    out = capfd.readouterr().out
    table = [line.split() for line in out.splitlines() if line.split()[:1] in (["bf16"], ["fp32"])]
    assert [row[0] for row in table] == ["bf16", "fp32"]
    assert all(row[-2:] == ["✓", "pass"] for row in table)
    assert out.count("fp32 against bf16") == 2
    assert (folder / "runs" / "fp32" / "report.md").is_file()
    assert run(["compare", str(folder / "runs"), "--accum", "none", "--json"]) == 0
    assert [json.loads(line)["policy"] for line in capfd.readouterr().out.splitlines()] == ["bf16", "fp32"]


@pytest.mark.usefixtures("compared")
def test_other_tokens_are_said_and_positions_not_compared(folder):
    from dataclasses import replace

    from precaudit.recording.runs.written import recall
    from precaudit.reports.policies import policy_differences

    first, other = (recall(folder / "runs" / name) for name in ("bf16", "fp32"))
    steps = [s if s.step < 1 else type(s)(**{**_fields(s), "token": 1 + s.token % 2}) for s in other.run.steps]
    said = policy_differences(first, replace(other, run=replace(other.run, steps=steps)))
    assert "3 of 3 prompts were fed other tokens; positions are not compared" in said[-1]


def _fields(record):
    return {name: getattr(record, name) for name in record.__struct_fields__}


@pytest.mark.usefixtures("compared")
def test_a_flip_is_told_with_the_side_that_fp64_takes(folder):
    from dataclasses import replace

    from precaudit.recording.runs.written import recall
    from precaudit.reports.policies import policy_differences

    first, other = (recall(folder / "runs" / name) for name in ("bf16", "fp32"))
    same = {(s.prompt, s.phase, s.position): s.top_ids[0] for s in first.run.steps}
    assert all(s.top_ids[0] == same[s.prompt, s.phase, s.position] for s in other.run.steps)
    flipped = other.run.steps[0]
    changed = type(flipped)(**{**_fields(flipped), "top_ids": flipped.top_ids[::-1]})
    errors = [_off(e, flipped) for e in other.errors]
    altered = replace(other, run=replace(other.run, steps=[changed, *other.run.steps[1:]]), errors=errors)
    said = policy_differences(first, altered)[-1]
    assert "differs at 1 of 21 positions; FP64 agrees with bf16 at 1 and fp32 at 0 of these" in said


def _off(e, step):
    """The record whose position has another top-1 than FP64."""
    if (e.kind, e.point, e.prompt, e.phase) != ("forward", "logits", step.prompt, step.phase):
        return e
    d = e.distribution
    top1 = tuple(0.0 if p == step.position else x for p, x in zip(d.positions, d.top1, strict=True))
    return type(e)(**{**_fields(e), "distribution": type(d)(**{**_fields(d), "top1": top1})})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--policy", "bf16,bf61"], ["unknown policy 'bf61'"]),
        (["--policy", "bf16,bf16"], ["bf16 twice"]),
        (["--layers", "99"], ["none of 2 policies can run", "layer 99"]),
        ([], ["holds a run already"]),
        (["--resume", "-o", "nowhere"], ["no runs here to go on with"]),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(folder, tmp_path, monkeypatch, capfd, more, words):
    monkeypatch.chdir(tmp_path)
    output = folder / "traced" if not more else tmp_path / "out"
    before = sorted(output.rglob("*"))
    capfd.readouterr()
    assert run(asked(folder, output, *more)) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert not [w for w in words if w not in said], said
    assert sorted(output.rglob("*")) == before


def test_a_policy_that_cannot_run_is_a_row_and_the_others_run(folder, tmp_path, capfd):
    """XLA:CPU does not honour the preset; the tokens are those of the first that ran."""
    (tmp_path / "fast.toml").write_text('matmul = "BF16_BF16_F32"\n')
    out = tmp_path / "out"
    assert run(asked(folder, out, "--policy", f"{tmp_path}/fast.toml,bf16")) == 3
    table, err = capfd.readouterr()
    assert [line.split()[0] for line in table.splitlines() if line.split()[-1:] == ["recorded"]] == ["bf16"]
    assert "not honoured" in " ".join(table.split())
    assert "fast cannot run:" in err
    assert sorted(p.name for p in out.iterdir()) == ["bf16", several.REFUSED]
    rows, _ = several.compare_policies(out, several_options(folder), lambda *_: None)
    assert [r.policy for r in rows] == ["bf16", "fast"]
    assert rows[1].why.startswith("not recorded: ")
    assert policies_report(rows, str(out)).headline.sentence == "1 of 2 policies cannot be judged: fast."
    assert open_run(out / "bf16").record.requested.tokens_from is None
    assert run(asked(folder, tmp_path / "none", "--policy", f"{tmp_path}/fast.toml,{tmp_path}/fast.toml")) == 2


def test_interrupted_half_way_and_resumed(folder, tmp_path, capfd):
    """What is finished stays; the run that was cut off and those that had not begun are made."""
    out = tmp_path / "traced"
    shutil.copytree(folder / "traced", out)
    for name in ("bf16", "fp32"):
        record = json.loads((out / name / "run.json").read_text())
        if record["requested"]["tokens_from"]:
            record["requested"]["tokens_from"] = str(out / "bf16")
        (out / name / "run.json").write_text(json.dumps(record))
    shutil.rmtree(out / "fp32")
    before = {p: p.stat().st_mtime_ns for p in (out / "bf16").rglob("*")}

    whole = Session.run

    def stop(session, batch, begin):
        if batch.prompts[0].id == "c":
            session.background.put(lambda: None)
            raise KeyboardInterrupt
        whole(session, batch, begin)

    with patch.object(Session, "run", stop):
        assert run(asked(folder, out)) == 2, "the first is there"
        assert run(asked(folder, out, "--resume")) == 130
    said = capfd.readouterr().err.splitlines()[-1]
    assert f"precaudit: interrupted; {out / 'fp32'} holds " in said
    assert " of 3 prompts. Next: precaudit " in said
    assert said.endswith("--resume")
    assert run(asked(folder, out, "--resume")) == 0
    assert {p: p.stat().st_mtime_ns for p in (out / "bf16").rglob("*")} == before
    for path in (folder / "traced" / "fp32" / "tensors").iterdir():
        assert (out / "fp32" / "tensors" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("compared")
def test_a_run_that_cannot_be_compared_is_a_row_with_its_reason(folder, tmp_path, capfd):
    runs = tmp_path / "runs"
    shutil.copytree(folder / "runs", runs)
    record = json.loads((runs / "bf16" / "run.json").read_text())
    (runs / "bf16" / "run.json").write_text(json.dumps(record | {"finished": None}))
    rows, said = several.compare_policies(runs, several_options(folder), lambda *_: None)
    assert [r.why is None for r in rows] == [False, True]
    assert "cut off" in rows[0].why
    assert row_texts(rows[0])[-1].startswith("? ")
    assert said == []
    shutil.rmtree(runs / "fp32")
    assert run(["compare", str(runs)]) == 2
    assert "none of 1 runs can be compared" in capfd.readouterr().err
    assert run(["compare", str(folder / "runs"), "--layers", "0"]) == 2
    assert "compared whole; leave out --layers" in capfd.readouterr().err


def test_runs_in_a_folder(folder, tmp_path):
    assert [p.name for p in several.runs_in(folder / "runs")] == ["bf16", "fp32"]
    assert several.runs_in(folder / "runs" / "bf16") == []
    assert several.runs_in(tmp_path) == []
    assert several.runs_in(tmp_path / "nowhere") == []


HONEST = PolicyRow(policy="bf16", run="bf16", local=0.00123, where="attn_out layer 29", explained=9294, operations=9294,
                   logits=0.0123, kl=1.2e-4, flips=1, positions=1027, verdict="✓ pass")  # fmt: skip
BROKEN = PolicyRow(policy="fp16-scores", run="x", local="nan", where="scores layer 2", explained=1, operations=9294,
                   logits="nan", kl="inf", flips=1027, positions=1027, verdict="✗ 9,293 nonfinite")  # fmt: skip
NOTHING = PolicyRow(policy="q", run="q", verdict="? nothing judged")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_number_is_cut_at_any_width(width):
    console = Console(file=io.StringIO(), width=width)
    rows = [HONEST, BROKEN, NOTHING, PolicyRow(policy="x", run="x", why="the device \x1b[2J is lost")]
    fitting.print_table(policies_report(rows, "runs").sections[0].tables[0], console)
    text = console.file.getvalue()
    assert "…" not in text
    assert "\x1b" not in text
    words = [w for row in rows[:3] for cell in row_texts(row)[:-1] for w in cell.split()]
    assert not [w for w in words if w not in text.split()]
    assert len(text.splitlines()) < (10 if width >= 120 else 40), "a table, a row a policy; in parts where it must"


def test_a_table_of_policies_begins_with_the_verdict():
    assert policies_report([HONEST], "runs").headline.text == "✓ rounding explains every error of all 1 policies."
    found = policies_report([HONEST, BROKEN, NOTHING], "runs").headline
    assert found.text == "✗ 1 of 3 policies fail: fp16-scores."
    assert found.next == "precaudit diagnose runs/x"
    assert policies_report([HONEST, NOTHING], "runs").headline.text == "? 1 of 2 policies cannot be judged: q."
    assert policies_report([], "runs").headline.mark == "?"


def test_what_is_not_known_is_no_success():
    assert [row_texts(BROKEN)[i] for i in (1, 3, 4, 5)] == ["NaN", "1 of 9,294", "NaN", "inf"]
    assert row_texts(NOTHING)[1:] == ("unknown", "", "unknown", "unknown", "unknown", "unknown", "? nothing judged")
    assert short(0.0) == "0"


def test_policies_of_a_file_with_a_comma(tmp_path):
    from precaudit.cli._options import policy_names

    path = tmp_path / "a,b.toml"
    path.write_text("")
    assert policy_names(str(path)) == [str(path)]
    assert policy_names("bf16, fp32") == ["bf16", "fp32"]
    with pytest.raises(UserError, match="twice"):
        several.folders_of([load_policy("bf16")] * 2, tmp_path)
    with pytest.raises(UserError, match="unknown policy"):
        load(MODEL, policy_names("")[0])

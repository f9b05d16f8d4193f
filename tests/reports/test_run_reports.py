"""What people read first: the verdict, tables that fit, and what one run is against another."""

import io
import re
import shutil
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from safetensors.numpy import load_file, save_file

from precaudit.cli import run as cli
from precaudit.diagnosis.evidence.records import Shares
from precaudit.judging.gate import gate, judge_found
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.jax_decoder.parts import Parts, attention_scores
from precaudit.recording.tracing.subject import load
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.reports import fitting
from precaudit.reports.comparison import comparison_page, comparison_report
from precaudit.reports.diagnosis import shares_text
from precaudit.reports.differences import difference_sentences, difference_verdict
from precaudit.reports.headline import headline
from precaudit.reports.pages import as_markdown
from precaudit.reports.summary import local_sentence
from precaudit.reports.terminal import print_report
from precaudit.reports.tokens import quote_tokens
from precaudit.reports.worst import explained_by
from precaudit.schema.digits import error_share
from precaudit.schema.records.errors import FormulaError, as_kind
from precaudit.schema.selection import Selection
from tests.helpers.runs import everything, record

NUMBER = re.compile(r"\d\.\d(?:e[-+]?\d+)? L\d+|\d\.\de-\d+")
PROMPTS = ["import os\n\n\ndef read(path):\n", "class Abc:\n    def"]


def doubled(q, k, scale, a):
    return attention_scores(q, k, scale * 2, a)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An honest run, the same in float32, and one whose scores are scaled twice; all compared."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, policy, parts in (
        ("honest", "bf16", None),
        ("single", "fp32-highest", None),
        ("faulty", "bf16", replace(Parts(), scores=doubled)),
    ):
        record(folder / name, policy=policy, parts=parts, prompts=PROMPTS, select=everything(), decode_steps=1)
        found[name] = compare(folder / name, options=CompareOptions(accum=("float16",), cache=folder / "refs"))
    return found


def printed(found, width, **options):
    out = io.StringIO()
    print_report(comparison_report(found, **options), Console(width=width, file=out, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("every", [False, True])
def test_no_number_is_cut_at_any_width(runs, width, every):
    whole, found = (sorted(NUMBER.findall(printed(runs["honest"], w, every=every))) for w in (10_000, width))
    text = printed(runs["honest"], width, every=every)
    assert "…" not in text
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert len(whole) > 50
    assert found == whole


names, cells = st.text("abcdefgh_~1", min_size=1, max_size=30), st.text("0123456789.e-", max_size=12)


@given(names=st.lists(names, min_size=1, max_size=9, unique=True), data=st.data(), width=st.integers(40, 120))
def test_a_table_in_parts_has_every_cell_whole(names, data, width):
    rows = tuple(tuple(data.draw(cells) for _ in names) for _ in range(3))
    table = fitting.Table("t", tuple(names), rows, (names[0],))
    parts = fitting.fit_tables(table, width)
    columns = [c for part in parts for c in part.columns[1:]]
    assert columns == names[1:]
    for part in parts:
        assert part.columns[0] == names[0]
        for row, whole in zip(part.rows, rows, strict=True):
            held = dict(zip(names, whole, strict=True))
            assert row == tuple(held[c] for c in part.columns)


def test_an_honest_run_begins_with_what_explains_it(runs):
    found = headline(judge_found(runs["honest"]), "runs/a")
    assert re.fullmatch(r"✓ rounding explains all [\d,]+ errors that were judged\.", found.text)
    assert not found.next


def test_a_fault_is_named_first_with_the_command_that_helps(runs):
    found = headline(judge_found(runs["faulty"]), "runs/a")
    assert found.text.startswith("✗ scores of layer 0, prefill: ")
    assert found.next == "precaudit diagnose runs/a"
    assert all(len(n.replace(".", "").lstrip("0")) <= 3 for n in re.findall(r"\d+(?:\.\d+)?", found.sentence))


def test_a_point_that_fails_is_marked_in_its_row(runs):
    table = printed(runs["faulty"], 100).partition("\n- ")[0]
    rows = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert "✗" in rows["scores"]
    assert "✗" not in rows["attn_norm"]


def test_one_screen_however_many_layers(runs):
    """30 layers and more prompts than these add no line: points are rows, and what is equal is counted."""
    e = [x for x in runs["honest"].errors if x.layer == 0]
    many = [
        msgspec.structs.replace(x, layer=i, prompt=f"{x.prompt}{n}") for x in e for i in range(30) for n in range(4)
    ]
    more = replace(runs["honest"], errors=[*runs["honest"].errors, *many])
    assert len(printed(more, 80).splitlines()) <= 45
    assert printed(more, 80).count("\n") - printed(runs["honest"], 80).count("\n") <= 2


def test_the_page_in_markdown_begins_with_the_verdict_and_reads_as_text(runs):
    verdict = headline(gate(runs["faulty"]), "run")
    text = as_markdown(comparison_page(runs["faulty"], verdict), 1, None)
    assert text.splitlines()[2] == verdict.text
    assert verdict.mark == "✗"
    assert "&#" not in text


def test_sentences_count_local_errors_as_the_gate_does(runs):
    """Attention's output after wrong scores is not a fault of its own: it inherits, and the gate suspects its input."""
    by_status = Counter(v.status for v in gate(runs["faulty"]).verdicts if v.kind == "local")
    said = local_sentence(runs["faulty"].errors)
    assert by_status["fail"] > 0
    assert by_status["input suspect"] > 0
    assert said.startswith(f"{by_status['fail']} of ")
    assert f"; {by_status['input suspect']} inherit from a point that is. First: layer 0 scores" in said
    line = next(x for x in explained_by(runs["faulty"].errors).split("; ") if "none of these" in x)
    assert line.endswith("none of these: scores")


def told(runs, a, b, unknown=()):
    folders = [runs[x].run.folder for x in (a, b)]
    pairs = compare(*folders).errors
    known = [None if x in unknown else runs[x].errors for x in (a, b)]
    return difference_verdict(pairs, *known, f"precaudit compare {folders[1]}"), difference_sentences(pairs)


def test_two_policies_differ_no_more_than_rounding_makes(runs):
    first, rest = told(runs, "honest", "single")
    assert first.mark == "✓"
    assert "by no more than rounding: at most" in first.sentence
    assert rest[0].startswith("Top-1 tokens differ at ")
    assert "KL from the reference run is" in rest[0]


def noisy(x, draw):
    return x * (1 + 0.01 * draw.standard_normal(x.shape))


def by_step(x, draw):
    return x - 1e-3 * np.sign(draw.standard_normal(x.shape))


def in_int8(x, _draw):
    scale = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.round(x / scale) * scale


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("change", [noisy, by_step, in_int8])
def test_other_weights_are_never_called_fine(runs, tmp_path, change, capsys):
    """No tensor alone is beyond rounding: the median of a layer and point is."""
    draw, model = np.random.default_rng(0), tmp_path / "model"
    shutil.copytree(open_checkpoint("tiny").path, model)
    held = load_file(model / "model.safetensors")
    held = {k: change(x.astype(np.float32), draw).astype(x.dtype) if x.ndim > 1 else x for k, x in held.items()}
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    record(tmp_path / "run", str(model), prompts=PROMPTS, select=everything(), decode_steps=1)
    other = compare(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    every = compare(runs["honest"].run.folder, tmp_path / "run").errors
    pairs = [e for e in every if e.point in ("q", "k", "v", "attn_out", "logits")]  # the points of a run by default
    first = difference_verdict(pairs, runs["honest"].errors, other.errors)
    assert first.mark == "✗"
    assert "beyond rounding in the median at " in first.sentence
    cli(["compare", str(runs["honest"].run.folder), str(tmp_path / "run")])
    assert capsys.readouterr().out.startswith("✗")


@pytest.mark.turn  # 5 s
def test_weights_in_other_formats_are_told_by_the_command(tmp_path, capsys):
    for policy in ("bf16", "int8-weights"):
        record(tmp_path / policy, policy=policy, prompts=PROMPTS[:1], select=Selection.parse(points="logits"))
        compare(tmp_path / policy, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    cli(["compare", str(tmp_path / "bf16"), str(tmp_path / "int8-weights")])
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("? ")
    assert said.endswith("but the runs are of different weights (tiny; tiny in int8).")


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.5, "50 %"), (0.0, "none of it"), (-0.4, "none of it")]
)
def test_a_share_is_between_none_and_all(share, text):
    assert error_share(share) == text


def test_other_weights_within_rounding_are_not_called_fine(runs):
    pairs = compare(*(runs[x].run.folder for x in ("honest", "single"))).errors
    known = [runs[x].errors for x in ("honest", "single")]
    found = difference_verdict(pairs, *known, weights="the runs are of different weights (a; b)")
    assert found.mark == "?"
    assert found.sentence.endswith("but the runs are of different weights (a; b).")


def test_a_fault_is_where_two_runs_first_differ_by_more(runs):
    first, _ = told(runs, "faulty", "single")
    assert first.mark == "✗"
    assert "first beyond rounding: scores of layer 0, prefill" in first.sentence


@pytest.mark.turn  # 4 s
def test_runs_that_were_not_compared_are_not_called_the_same(runs):
    first, _ = told(runs, "honest", "single", unknown=("single",))
    assert first.mark == "?"
    assert first.next.endswith("single")


def test_what_one_run_lacks_is_not_called_equal(runs):
    folder = runs["honest"].run.folder
    pairs = compare(folder, folder).errors
    lacking = msgspec.structs.replace(pairs[0], missing="not in the reference run")
    found = difference_verdict([*pairs, lacking], runs["honest"].errors, runs["honest"].errors)
    assert found.text == f"? {len(pairs):,} tensors are equal, and 1 could not be compared."
    apart = compare(folder, runs["single"].run.folder).errors
    known = [runs[x].errors for x in ("honest", "single")]
    assert difference_verdict(apart, *known).mark == "✓"
    found = difference_verdict([*apart, lacking], *known)
    assert found.mark == "?"
    assert "none beyond rounding; 1 could not be compared" in found.sentence


def test_a_difference_without_a_yardstick_is_no_rounding(runs):
    apart = compare(runs["honest"].run.folder, runs["single"].run.folder).errors
    known = [runs[x].errors for x in ("honest", "single")]
    off = next(e for e in apart if e.point == "scores" and e.max_diff)
    blind = [e for e in known[1] if not (e.kind == "forward" and e.point == "scores")]
    assert "the error of rounding is not known" in difference_verdict(apart, known[0], blind).sentence
    assert difference_verdict(apart, known[0], blind, asked={"logits"}).mark == "✓", "recorded for the sake of others"
    broken = [msgspec.structs.replace(e, rel_l2="nan") if e is off else e for e in apart]
    assert difference_verdict(broken, *known).mark == "✗"


def test_findings_that_cannot_be_read_change_no_verdict(runs, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(runs["faulty"].run.folder, folder)
    code = cli(["gate", str(folder)])
    (folder / "findings.jsonl").write_text('{"kind": broken\n')
    assert cli(["gate", str(folder)]) == code == 1
    assert "note: what diagnose found is omitted: " in capsys.readouterr().err


def test_a_failure_that_was_found_once_stays_in_the_sentence(runs, tmp_path, capsys):
    """A plain compare after one with --formula says what the gate says."""
    shutil.copytree(runs["honest"].run.folder, tmp_path / "run")
    found = compare(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert gate(found).exit_code == 0
    place = next(e for e in found.errors if e.kind == "local" and e.point == "scores")
    formula = as_kind(place, FormulaError, rel_l2=0.5, scopes={"token": {"rel_l2": (0.5, 0)}})
    sentence = headline(gate(replace(found, errors=[*found.errors, formula])), "runs/a").sentence
    assert "the formula is not the reference's: it differs by 0.5 without any rounding" in sentence
    assert cli(["compare", str(tmp_path / "run"), "--layers", "1"]) == 0
    assert re.search(
        r"rounding explains all [\d,]+ errors that were judged in what was selected\.", capsys.readouterr().out
    )


def test_a_broken_budget_says_that_it_is_one(runs, tmp_path):
    folder = runs["honest"].run.folder
    (tmp_path / "budgets.toml").write_text(
        '[[budget]]\nkind = "forward"\npoints = ["logits"]\nmetric = "rel_l2"\nlimit = 1e-9\nwhy = "a promise"\n'
    )
    found = headline(gate(folder, tmp_path / "budgets.toml"), "my run")
    assert re.search(r"logits, prefill: rel_l2 is [\d.e-]+, over its stated limit 1e-9\.", found.sentence), (
        found.sentence
    )
    assert found.next == "precaudit diagnose 'my run'"
    (tmp_path / "budgets.toml").write_text(
        '[[budget]]\nkind = "forward"\npoints = ["logits"]\nmetric = "cosine"\nlimit = 1.0\nwhy = "a promise"\n'
    )
    sentence = headline(gate(folder, tmp_path / "budgets.toml"), "my run").sentence
    assert re.search(r"logits, prefill: cosine is 1 \(-\d\.\d\de-\d\), below its stated limit 1\.", sentence), sentence


def test_a_file_of_records_has_no_command_that_needs_a_run(runs):
    file = runs["faulty"].run.folder / "errors.jsonl"
    found = headline(gate(file), str(file))
    assert (found.mark, found.next) == ("✗", "")


def test_a_run_is_itself(runs):
    first, rest = told(runs, "honest", "honest")
    assert re.fullmatch(r"all [\d,]+ tensors that were compared are equal\.", first.sentence)
    assert re.match(r"Top-1 tokens differ at 0 of \d+ positions; KL from the reference run is 0 at most", rest[0])


@pytest.mark.turn  # 7 s
def test_the_commands_that_are_named_next_run(runs, tmp_path, capsys):
    shutil.copytree(runs["faulty"].run.folder, tmp_path / "run")
    shutil.copytree(runs["single"].run.folder, tmp_path / "single")
    (tmp_path / "single" / "compare.json").unlink()
    said = ""
    for words, codes in (
        (["gate", str(tmp_path / "run")], {1}),
        (["compare", str(tmp_path / "run"), str(tmp_path / "single")], {0}),
        (["report", str(tmp_path / "run"), "--all"], {0}),
    ):
        assert cli(words) in codes
        said += capsys.readouterr().out
    commands = set(re.findall(r"precaudit ((?:explain|diagnose|compare) \S+)", said))
    assert {c.split()[0] for c in commands} == {"explain", "diagnose", "compare"}
    for command in commands:
        assert cli(command.split()) in (0, 1), command


@pytest.mark.turn  # 15 s
@pytest.mark.parametrize("command", ["compare", "report", "gate"])
def test_the_verdict_is_the_first_line(runs, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, mark in (("honest", "✓"), ("faulty", "✗")):
        code = cli([command, str(runs[name].run.folder)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{mark} ")
        assert code == (1 if (command, mark) == ("gate", "✗") else 0)
        assert (lines[1] == f"  Next: precaudit diagnose {runs[name].run.folder}") == (mark == "✗")
    assert sum(line.startswith("input suspect: ") for line in lines) == (command == "gate")


def test_what_is_piped_has_lines_of_any_length(runs, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    cli(["report", str(runs["honest"].run.folder)])
    header = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("point"))
    assert header.split()[:3] == ["point", "local", "2nd"]
    assert header.rstrip().endswith("× emul.")


def test_tokens_are_told_as_text_beside_their_ids(runs):
    found = runs["honest"]
    p = next(x for x in found.prefill_decode if x.against == "prefill")
    other = msgspec.structs.replace(p, decode_top1=ord("Q") + 3, match=False)
    text = printed(replace(found, prefill_decode=[other]), 100)
    tokenizer = load("tiny", "bf16").tokenizer
    assert f"{other.decode_top1} {tokenizer.decode([other.decode_top1])!r}" in text


def test_tokens_of_a_model_that_is_not_here_are_ids(runs):
    run = runs["honest"].run
    model = msgspec.structs.replace(run.record.model, reference="/no/such")
    assert quote_tokens(run, [5])
    assert quote_tokens(replace(run, record=msgspec.structs.replace(run.record, model=model)), [5]) == {}


@pytest.mark.parametrize(
    ("objective", "fp64", "says"),
    [
        ("distance", 0.0, "the distance from FP64 of a is 2.5e-1; "),
        ("kl", 0.0, "the KL from FP64 of a is 2.5e-1; "),
        ("margin", 0.0, "the top-1 margin of a is 0 in FP64 and changed by 2.5e-1; "),
        ("kl", 0.5, "the KL from FP64 of a is 5.0e-1 in FP64 and changed by 2.5e-1; "),
    ],
)
def test_a_distance_that_is_0_in_fp64_is_a_distance_and_no_change(objective, fp64, says):
    told = Shares(
        run="", prompt="a", objective=objective, fp64=fp64, change=0.25, explained=0.25, absolute=1, shares=()
    )
    assert shares_text(told).startswith(says)

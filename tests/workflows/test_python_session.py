"""What a Python session and a notebook see: short texts, escaped tables, frames of fixed columns, keywords."""

import doctest
import importlib
import inspect
import io
import subprocess
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from html.parser import HTMLParser
from inspect import Parameter

import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit.errors import UserError
from precaudit.models.jax_decoder.parts import attention_scores
from precaudit.progress import Progress
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.references.comparison.compare import CompareOptions
from precaudit.reports.cards import WIDE, card_text
from precaudit.reports.points import recorded_entries
from precaudit.schema.filed import of_kinds
from precaudit.schema.frames import ERRORS, SCOPED, errors_frame
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import LocalError
from precaudit.schema.selection import Selection
from precaudit.workflows.keywords import FILTERS, option_names
from tests.helpers.hostile import HOSTILE
from tests.helpers.runs import everything, record


def step(params, x):
    return jnp.tanh(x @ params)


def program(*cases):
    x = jnp.ones((4, 8), jnp.bfloat16)
    return precaudit.Program(
        call=step, params=jnp.full((8, 8), 0.3, jnp.bfloat16), cases=dict.fromkeys(cases or ("a",), (x,)), outputs="out"
    )


def doubled(q, k, scale, a):
    return attention_scores(q, k, 2 * scale, a)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    record(folder / "run", select=everything(layers="0"), decode_steps=1)
    return precaudit.compare(folder / "run", cache=folder / "refs")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    parts = replace(precaudit.load("tiny").parts, scores=doubled)
    select = everything(layers="0:2", phases="prefill")
    prompts = [Prompt(id=HOSTILE, prompt="x = 1"), Prompt(id="b", prompt="x = 2")]
    subject = precaudit.load("tiny", "bf16", None, "cpu", parts)
    run = precaudit.trace(subject, folder / "run", prompts, select)
    return precaudit.compare(run, accum="none", cache=folder / "refs")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return precaudit.trace(program(HOSTILE, "b"), tmp_path_factory.mktemp("own") / "run")


# What is shown


class Tags(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data):
        self.text.append(data)


def shown(x):
    """Return the text and table of a value, each checked to be small and made harmless."""
    text, page = repr(x), x._repr_html_()
    lines = text.split("\n")
    assert len(lines) <= 10
    assert max(map(len, lines)) <= WIDE
    assert all(line.isprintable() for line in lines)
    parsed = Tags()
    parsed.feed(page)
    assert {tag for tag, _ in parsed.tags} <= {"table", "tr", "th", "td"}
    assert {a for _, attrs in parsed.tags for a in attrs} <= {"style", "colspan"}
    assert page.count("<tr>") <= 12
    assert len(page) < 6000
    return text, " ".join(parsed.text)


@pytest.mark.turn  # 4 s
def test_a_cell_prints_a_few_lines(honest, own):
    errors = precaudit.compare(own, program(HOSTILE, "b"))
    for x in (
        honest.run, honest, precaudit.gate(honest), precaudit.diagnose(honest.run, accum=(), points="q"), own, errors,
        precaudit.gate(errors), precaudit.diagnose(own), program(), precaudit.load("tiny"),
    ):  # fmt: skip
        shown(x)
    assert len(errors) > 3
    assert "10" not in repr(program()) or "array" not in repr(program())


def test_a_subclass_is_shown_as_what_it_is():
    """Cards are found by type, whatever a class is called and wherever it is from."""
    other = type("Run", (precaudit.Program,), {})(**vars(program()))
    assert shown(other) == shown(program())
    subject = precaudit.load("tiny")
    theirs = type("Model", (type(subject),), {"__module__": "precaudit.models.theirs"})(**vars(subject))
    assert shown(theirs) == shown(subject)
    with pytest.raises(TypeError, match="dict has no card"):
        card_text({})
    bare = object.__new__(type(other))
    assert repr(bare) == object.__repr__(bare)  # while it is being made


@pytest.mark.turn  # 4 s
def test_what_is_shown_is_what_was_found(honest, faulty, own):
    text, table = shown(honest.run)
    assert text.startswith("Run run of tiny, policy bf16, cpu")
    assert "layers: 0 of 5" in text
    text, table = shown(honest)
    passes = precaudit.gate(honest).counts["pass"]
    assert f"{passes} pass" in text
    assert f"{passes} pass" in table
    assert "fail" not in text
    text, table = shown(faulty)
    assert "fail: layer 0 scores" in text
    assert " pass" in text
    assert f"{sum(e.kind == 'local' for e in faulty.errors)} local" in table
    text, _ = shown(precaudit.gate(faulty))
    assert "exit code: 1" in text
    assert "fail: layer 0 scores" in text
    text, _ = shown(own)
    assert "cases: 2: " in text


def test_a_diagnosis_says_its_findings(faulty):
    found = precaudit.diagnose(faulty.run, points="scores", phases="prefill")
    text, _ = shown(found)
    assert "findings: 1" in text
    assert "semantics at layer 0 scores" in text
    frame = found.frame()
    assert list(frame["point"]) == ["scores"]
    assert list(frame["layers"]) == ["0,1"]
    assert str(frame["layer"].dtype) == "Int64"


def test_two_runs_and_a_repeat_are_short(honest, tmp_path):
    again = precaudit.repeat(honest.run, tmp_path / "again")
    text, _ = shown(again)
    assert "tensors are bit-identical" in text
    text, _ = shown(precaudit.compare(again.run, honest.run))
    assert "differ: 0 of" in text


def test_a_program_s_repeat_is_short(own, tmp_path):
    text, _ = shown(precaudit.repeat(own, tmp_path / "again", program(HOSTILE, "b")))
    assert "recorded once more: all" in text


def test_a_recorded_run_is_shown_without_jax(honest):
    code = (
        "import sys\nsys.modules['jax'] = None\nfrom precaudit.recording.runs.reader import open_run\n"
        f"from pathlib import Path\nprint(repr(open_run(Path({str(honest.run.folder)!r}))))"
    )
    assert "Run run of tiny" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def test_ids_of_others_are_shown_as_text(faulty, own):
    for x in (faulty.run, faulty, precaudit.gate(faulty), own):
        text, table = shown(x)
        assert "\\n::" not in text.replace("\\x3a", "")
        assert "\x1b" not in text + table


# Frames


def dtypes(frame):
    return {name: str(kind) for name, kind in frame.dtypes.items()}


def test_columns_are_the_same_whatever_the_values(honest, faulty, own):
    empty = dtypes(replace(honest, errors=[]).frame())
    assert list(empty) == [c.name for c in ERRORS]
    assert set(empty.values()) == {"string", "Int64", "float64", "boolean"}
    for found in (honest, faulty, precaudit.compare(own, program(HOSTILE, "b"))):
        assert dtypes(found.frame()) == empty
    lone = [e for e in honest.errors if e.layer is None]
    assert dtypes(errors_frame(lone)) == empty
    assert {empty[name] for name in ("layer", "step", "nonfinite", "head_index", "max_ulp")} == {"Int64"}


def test_a_frame_holds_the_records(honest):
    frame = honest.frame()
    assert len(frame) == len(honest.errors)
    i, e = next((i, e) for i, e in enumerate(honest.errors) if e.kind == "local" and "head" in (e.scopes or {}))
    row = frame.iloc[i]
    assert (row["token_rel_l2"], row["token_index"]) == tuple(e.scopes["token"]["rel_l2"])
    assert (row["head_excess"], row["head_excess_index"]) == tuple(e.scopes["head"]["excess"])
    assert row["tokens"] == e.slices["token"]
    assert row["worst_index"] == ",".join(map(str, e.worst.index))
    assert row["unexplained_gain_noise"] == e.unexplained.gain.noise
    assert row["explained_policy"] == e.explained["policy:bf16"]
    assert row["explained"] == max(e.explained.values())
    outside = frame[frame["point"] == "logits"]
    assert outside["layer"].isna().all()
    logits = outside[outside["kind"] == "forward"].iloc[0]
    assert logits["kl"] >= 0
    assert 0 <= logits["top1"] <= 1


def test_every_number_of_a_scope_has_a_column(honest, faulty):
    held = {(s, m) for f in (honest, faulty) for e in f.errors for s, x in (e.scopes or {}).items() for m in x}
    assert held <= {(s, m) for s, metrics in SCOPED.items() for m in metrics}
    assert ("head", "ratio") in held


def test_nan_and_absence_are_not_numbers(honest):
    e = next(e for e in honest.errors if e.kind == "local")
    from msgspec.structs import replace as changed

    frame = errors_frame([changed(e, rel_l2="nan", max_diff="inf"), changed(e, rel_l2=None, missing="lost")])
    assert frame["rel_l2"].isna().all()
    assert frame["max_diff"][0] == np.inf
    assert list(frame["missing"].isna()) == [True, False]


def test_frames_of_pairs_and_verdicts(honest, faulty):
    pairs = honest.prefill_decode_frame()
    assert len(pairs) == len(honest.prefill_decode) > 0
    assert str(pairs["match"].dtype) == "boolean"
    assert dtypes(replace(honest, prefill_decode=[]).prefill_decode_frame()) == dtypes(pairs)
    verdicts = precaudit.gate(faulty)
    assert len(verdicts.frame()) == len(verdicts.verdicts) > 0
    assert dtypes(precaudit.gate(honest).frame()) == dtypes(verdicts.frame())
    assert (verdicts.frame()["value"] > verdicts.frame()["limit"]).any()


# Keywords


@pytest.mark.turn  # 3 s
def test_keywords_are_the_command_line_s(tmp_path):
    run = precaudit.trace(
        "tiny", tmp_path / "run", prompts=["Hello", "x = 1"], layers=0, points=["q", "logits"], phases="prefill",
        policy="fp32", device="cpu",
    )  # fmt: skip
    assert list(run.prompts) == ["p0", "p1"]
    assert run.prompts["p0"].text == "Hello"
    asked = run.record.requested
    assert (asked.layers, asked.points, asked.phases) == ((0,), ("q", "logits"), ("prefill",))
    assert run.record.policy["name"] == "fp32"
    with pytest.raises(UserError, match="holds a run already"):
        precaudit.trace("tiny", tmp_path / "run", prompts=["Hello"])
    again = precaudit.trace("tiny", tmp_path / "run", {"hi": "Hello"}, layers="1", points="q", force=True)
    assert list(again.prompts) == ["hi"]
    assert again.record.requested.layers == (1,)
    found = precaudit.compare(again, accum="float16", cache=tmp_path / "refs", prompt=["hi"], phases="prefill")
    assert {e.phase for e in found.errors} == {"prefill"}
    assert {n for e in of_kinds(found.errors, LocalError) for n in e.explained or {}} == {
        "policy:bf16", "accum:float16", "policy:bf16+accum:float16",
    }  # fmt: skip
    options = CompareOptions(accum=(), cache=tmp_path / "refs")
    same = precaudit.compare(again, select=Selection.parse(phases="decode", points="q"), options=options)
    assert {e.phase for e in same.errors} == {"decode"}


def test_a_program_takes_layers_and_force_alone(tmp_path):
    precaudit.trace(program(), tmp_path / "run")
    precaudit.trace(program(), tmp_path / "run", force=True)
    with pytest.raises(UserError, match=r"precaudit.trace of a Program takes no 'batch'"):
        precaudit.trace(program(), tmp_path / "run", batch=2)


@pytest.fixture(scope="module")
def two_calls(tmp_path_factory):
    p = replace(program(), steps=1, advance=lambda inputs, outputs: (inputs[0] + outputs,))
    run = precaudit.trace(p, tmp_path_factory.mktemp("calls") / "run")
    return p, run, precaudit.compare(run, p)


def test_positions_of_a_program_are_its_calls(two_calls):
    p, run, every = two_calls
    part = precaudit.compare(run, p, positions=1)
    assert {e.step for e in every} == {0, 1}
    assert {e.step for e in part} == {1}
    assert precaudit.gate(run, positions="1").counts["pass"] < precaudit.gate(run).counts["pass"]
    assert precaudit.diagnose(run, p, positions=[1]).explained < precaudit.diagnose(run, p).explained


def test_a_run_that_begins_later_is_compared_with_the_same_calls(two_calls, tmp_path):
    p, run, _ = two_calls
    later = precaudit.trace(p, tmp_path / "later", positions="1")
    for found, step in ((precaudit.compare(later, run), 0), (precaudit.compare(run, later, positions="1"), 1)):
        assert {e.step for e in found.errors} == {step}
        assert {e.rel_l2 for e in found.errors} == {0.0}
        assert not any("inputs" in note for note in found.notes)
    sketched = [precaudit.trace(p, tmp_path / at, sketch=8, positions=at) for at in ("0:2", "1")]
    found = precaudit.compare(*sketched)
    assert {(r.call, r.equal) for r in found.records} == {(1, True)}


def test_a_program_is_recorded_as_a_device_that_is_not_here_and_without_tensors(tmp_path):
    predicted = precaudit.trace(program(), tmp_path / "predicted", device="tpu-emulated:v5e")
    assert predicted.record.device == "TPU v5e:2x2 (emulated from the jaxpr)"
    both = [precaudit.trace(program(), tmp_path / name, sketch=8) for name in "ab"]
    assert [run.record.sketch for run in both] == [8, 8]
    found = precaudit.compare(both[0], both[1].folder)
    assert [(r.point, r.equal) for r in found.records][-1] == ("outputs.out", True)
    (tmp_path / "names.toml").write_text('mine = "step"\n')
    renamed = precaudit.trace(program(), tmp_path / "renamed", rename=tmp_path / "names.toml")
    assert "mine" in {x.name for x in renamed.record.points}
    with pytest.raises(UserError, match="a program says itself what it runs on; leave out device='cpu'"):
        precaudit.trace(program(), tmp_path / "never", device="cpu")


@pytest.mark.turn  # 3 s
def test_sketches_of_a_model_are_a_run_for_each_length(tmp_path):
    how = {"decode_steps": 0, "points": "q", "phases": "prefill", "sketch": 8}
    runs = precaudit.trace("tiny", tmp_path / "a", ["x = 1", "y = 2", "a, b = 1, 2"], **how)
    assert len(runs) == 2
    found = precaudit.compare(tmp_path / "a", tmp_path / "a")
    assert {r.case for r in found.records} == {"p0", "p1", "p2"}
    listed = recorded_entries(tmp_path / "a")
    assert {name.partition("-")[0] for name in listed} == {"tokens"}
    assert all({p.name for p in its} >= {"q"} for its in listed.values())
    with pytest.raises(UserError, match="trace of a model with sketch= takes no 'batch'"):
        precaudit.trace("tiny", tmp_path / "b", ["x = 1"], batch=2, sketch=8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: precaudit.gate("nowhere", layer="0"), "gate takes no 'layer'; did you mean 'layers'"),
        (lambda: precaudit.trace("tiny", "nowhere", layer="0"), "trace takes no 'layer'; did you mean 'layers'"),
        (lambda: precaudit.compare("nowhere", formla=True), "compare takes no 'formla'; did you mean 'formula'"),
        (lambda: precaudit.diagnose("nowhere", point="q"), "diagnose takes no 'point'; did you mean 'points'"),
        (
            lambda: precaudit.compare("nowhere", options=CompareOptions(), formula=True),
            "options= or formula=, not both",
        ),
        (lambda: precaudit.trace("tiny", "x", select=Selection(), layers="0"), "select= or layers=, not both"),
        (lambda: precaudit.trace(precaudit.load("tiny"), "x", policy="fp32"), "policy belong to precaudit.load"),
        (lambda: precaudit.trace("tiny", "x", points=True), "points=True is no text"),
    ],
)
def test_a_keyword_that_is_none_is_told(call, words):
    with pytest.raises(UserError, match=words):
        call()


@pytest.mark.parametrize("verb", [precaudit.compare, precaudit.diagnose])
def test_a_program_that_is_given_twice_is_told(verb, own):
    with pytest.raises(UserError, match="program was given twice"):
        verb(own, program(), program=program())


@pytest.mark.parametrize("verb", ["trace", "compare", "diagnose"])
def test_editors_complete_what_verbs_take(verb):
    """Every keyword of options and filters is a parameter of its own, and none is known by its place alone."""
    taken = inspect.signature(getattr(precaudit, verb)).parameters
    options = TraceOptions if verb == "trace" else CompareOptions
    assert {*FILTERS, *option_names(options), "progress"} <= taken.keys()
    assert {p.kind for p in taken.values()}.isdisjoint({Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY})
    assert all(p.default is None for p in taken.values() if p.kind == Parameter.KEYWORD_ONLY)


@pytest.mark.turn  # 3 s
def test_progress_is_shown_or_told_where_asked(own):
    told = []
    precaudit.compare(own, program(HOSTILE, "b"), progress=lambda done, total, _what: told.append((done, total)))
    precaudit.compare(own, program(HOSTILE, "b"), progress=Progress(advance=lambda *x: told.append(x)))
    assert len(told) > 1
    with redirect_stderr(io.StringIO()) as stream:
        precaudit.compare(own, program(HOSTILE, "b"))
        assert stream.getvalue() == ""
        precaudit.compare(own, program(HOSTILE, "b"), progress=True)
    assert "\x1b]0;" not in stream.getvalue()


# What the package exports


def test_what_is_exported_is_listed_and_documented():
    assert set(precaudit.__all__) <= set(dir(precaudit))
    for name in ("Parts", "Program", "reap", "shadow", "plant", "trace", "compare", "diagnose"):
        assert name in precaudit.__all__
        assert ">>> " in getattr(precaudit, name).__doc__, name


DOCUMENTED = (
    "models.jax_decoder.parts", "recording.programs.program", "interpreters.jaxpr.reap", "interpreters.jaxpr.shadow",
    "interpreters.jaxpr.plant",
)  # fmt: skip


@pytest.mark.parametrize("module", DOCUMENTED)
def test_examples_of_docstrings_run(module):
    found = doctest.testmod(importlib.import_module(f"precaudit.{module}"))
    assert found.attempted > 0
    assert not found.failed


def test_points_of_a_notebook_s_cell_are_named_after_its_variables():
    import linecache

    source = "def step(params, x):\n    mixed = x @ params\n    return jnp.tanh(mixed)\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
    held = {"jnp": jnp}
    exec(compile(source, "<cell 1>", "exec"), held)
    from precaudit.recording.programs.planning import points

    assert [p.name for p in points(replace(program(), call=held["step"], outputs=None))] == ["mixed", "step"]

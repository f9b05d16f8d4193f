"""Words, help and health: ``explain``, ``doctor``, examples of every command, completion."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from typing import get_args

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from precaudit.checks.doctor import caches
from precaudit.checks.doctor.packages import extras
from precaudit.checks.rollouts.answers import answers_sentence, pair_answers
from precaudit.cli import SPELT, cli, run
from precaudit.cli._examples import EXAMPLES
from precaudit.diagnosis.evidence.records import Finding, LineRemedy, Remedy, Share, Shares
from precaudit.errors import UserError
from precaudit.judging.budgets import SCOPES
from precaudit.judging.metrics import METRICS
from precaudit.judging.verdicts import STATUSES, Verdict
from precaudit.numbers.arrays import widen
from precaudit.numbers.formats import FORMATS
from precaudit.reports.words import paragraphs, word_lines
from precaudit.schema.glossary import AXES, KEY, POINT, headings, look_up, lookup_key, terms, terms_by_name
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import SAME
from precaudit.schema.metrics.logits import distribution, kl, log_softmax
from precaudit.schema.metrics.sizes import explained_share as share_explained
from precaudit.schema.metrics.sizes import half_ulp, sizes
from precaudit.schema.policies import KEYS
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS, Distribution, Kind, Signed, Unexplained, Worst
from precaudit.schema.records.probe import ProbeRecord
from precaudit.schema.records.runs import Neutrality, Stats, StepRecord
from precaudit.schema.selection import PHASES
from tests.helpers.paths import ROOT
from tests.helpers.shown_texts import heading_texts, note_texts

GLOSSARY = ROOT / "precaudit" / "bundled" / "glossary.md"
# Fields whose name says it all, or whose records are not shown.
PLAIN = {"text", "output", "logsumexp"}
RECORDS = (
    *get_args(ERROR_KINDS), Unexplained, Signed, Distribution, Worst, Stats, StepRecord, PrefillDecodeRecord,
    Neutrality, Verdict, Finding, Share, Shares, Remedy, LineRemedy, ProbeRecord,
)  # fmt: skip


def printed(*arguments):
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def item(term, label="Example", of=""):
    entry = next(e for e in look_up(term) if e.of == of)
    return dict(entry.items)[label]


# The glossary


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_every_field_a_user_reads_is_a_word(record):
    for name in set(record.__struct_fields__) - PLAIN:
        assert lookup_key(name) in terms_by_name(), (record.__name__, name)


def test_every_status_kind_metric_and_phase_is_a_word():
    kinds = [*get_args(Kind), *Finding.__annotations__["kind"].__args__]
    for name in (*STATUSES, *kinds, "neutrality", "coverage", *METRICS, *SCOPES, *PHASES, "exit-codes", *FORMATS):
        if name not in FORMATS:
            assert lookup_key(name) in terms_by_name(), name
        else:
            assert name in item("format") + look_up("fp64")[0].meaning or name == "float64"


def test_every_point_and_policy_key_is_a_word():
    assert {e.name for e in terms() if e.of == POINT} == set(POINTS)
    assert [e.name for e in terms() if e.of == KEY] == sorted(KEYS)
    for p in POINTS.values():
        told = dict(next(e for e in look_up(p.name) if e.of == POINT).items)
        assert set(p.axes) <= AXES.keys()
        for name in p.inputs:
            assert re.search(rf"\b{name}\b", told["Holds the rows of" if p.state else "Reads"])
        assert p.format in told["Stored in"]


def test_every_link_leads_to_a_section_and_none_is_there_twice():
    text = GLOSSARY.read_text()
    titles = re.findall(r"^## (.+)$", text, re.M)
    anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
    assert len(set(anchors)) == len(anchors)
    links = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", text)
    assert links
    for word, anchor in links:
        assert anchor in anchors, anchor
        assert lookup_key(word) in terms_by_name()
    plainly = [t for t in titles if "(" not in t]
    assert plainly == sorted(plainly, key=str.lower)


def test_every_sign_of_the_glossary_can_be_spelt_in_ascii():
    every = "".join(f"{e.title}{e.meaning}{e.items}" for e in terms())
    assert {c for c in every if not c.isascii()} <= SPELT.keys()


def test_the_examples_of_two_elements_are_true():
    """r = [3, 4], c = [3.03, 4.04]: computed as records are."""
    c, r = np.array([[3.03, 4.04]]), np.array([[[3.0, 4.0]]])
    found = sizes(c, r, "TD", [0])
    expected = {"mae": 0.035, "max_diff": 0.04, "rel_l2": 0.01, "cosine": 1, "gain": 0.01, "mean": 0.035, "snr": 40}
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, abs=1e-12), name
        assert re.search(rf"{re.escape(f'{number:g}')}(?!\d)", item(name).split("[3, 4]")[1]), name


def test_the_examples_of_formats_are_true():
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        p = int(-math.log2(FORMATS[name].unit_roundoff))
        assert re.search(rf"{name}: (u = )?2\^-{p}\b", item("format"))
        if not name.startswith("float8"):
            digits, exponent = f"{2.0**-p:.1e}".split("e")
            written = f"{2.0**-p:.4f}" if p == 8 else f"{digits}e{int(exponent)}"
            assert f"{name}: 2^-{p} = {written}" in item("u")
    ulps = 2 * half_ulp(np.array([1.0, 100.0]), "bfloat16")
    assert ulps.tolist() == [2.0**-7, 0.5]
    assert "2^-7 = 0.0078 in bfloat16; near 100 it is 0.5" in item("ulp")
    assert f"{2.0**-7:.4f}" == "0.0078"
    n, u = 512, FORMATS["float32"].unit_roundoff
    assert f"{n} roundings in float32: {n * u / (1 - n * u):.2e}".replace("e-0", "e-") in item("gamma_n")
    assert f"{2.0**-8 / 3**0.5:.2e}".replace("e-0", "e-") in item("noise")
    two = sizes(np.array([[1.015625]], ml_dtypes.bfloat16), np.array([[[1.0]]]), "TD", [0])
    assert two["max_ulp"] == 2
    assert "is 2 steps" in item("max_ulp")
    c = widen(np.array([[101.0, 100.0]], ml_dtypes.bfloat16))
    off = sizes(c.astype(ml_dtypes.bfloat16), c[None] / np.array([1.02, 1.0]), "TD", [0])
    assert off["bits_lost"] == pytest.approx(math.log2(off["rel_l2"] / 2.0**-8))
    assert f"{math.log2(0.01 / 2.0**-8):.2f} bits" in item("bits_lost")


def test_the_example_of_the_componentwise_bound_is_true():
    bound = float(half_ulp(np.array(1.0), "bfloat16")) + 100 * 2.0**-24
    assert f"= {bound:.4f}" in item("componentwise")
    assert f"is {0.02 / bound:.1f} bounds" in item("componentwise")
    assert f"the limit is {default_limits().narrow.componentwise.value:.1f}" in item("componentwise")


def test_the_examples_of_shares_explained_are_true():
    r, error = np.array([3.0, 4.0]), np.array([0.03, 0.04])
    size = float(np.linalg.norm(error))
    half, opposite = (share_explained(r + error, size, r + k * error) for k in (0.5, -1.0))
    assert half == pytest.approx(0.75)
    assert opposite == pytest.approx(-3)
    assert "explains 0.75" in item("explained")
    assert "−3." in item("explained")


def test_the_examples_of_rollouts_are_true():
    assert f"{math.exp(0.1) - 1.1:.5f}" in item("k3_kl")
    assert f"e^0.25 = {math.exp(0.25):.3f}" in item("clip_fraction")
    tail = sum(math.comb(8, i) for i in (0, 1)) / 2**8
    assert f"= {2 * tail:.4f}" in item("mcnemar")
    assert f"pass@2 {1 - math.comb(3, 2) / math.comb(4, 2):g}" in item("pass@k")
    question = [(a, b) for a, b, n in ((1, 1, 498), (1, 0, 12), (0, 1, 10), (0, 0, 480)) for _ in range(n)]
    told = answers_sentence(pair_answers([bool(a) for a, _ in question], [bool(b) for _, b in question]))
    assert told.split("is ")[1].split(" (")[0] in item("answers_difference")


def test_the_examples_of_distributions_are_true():
    p, q = np.log([0.5, 0.5]), np.log([0.6, 0.4])
    assert f"{kl(p, q):.4f} nats" in item("kl")
    d = distribution(q[None], p[None], np.array([0]), None)
    assert f"+{float(d.logprob_error[0]):.3f}" in item("logprob_error")
    assert log_softmax(q)[0] - log_softmax(p)[0] == pytest.approx(0.182, abs=5e-4)
    row = np.array([[2.0, 1.5, -1.0]])
    assert distribution(row, row, np.array([0]), None).gap == (0.5,)
    assert "a gap of 0.5" in item("gap")
    a, b = np.arange(10.0), np.arange(10.0)
    a[5], a[4] = a[4], a[5]
    assert distribution(a[None], b[None], np.array([0]), None).top5 == (0.8,)
    assert "a top5 of 0.8" in item("top1")


def test_the_limits_told_are_the_limits():
    limits = default_limits()
    told = item("excess")
    assert f"float32 is {limits.narrow.tensor.value}, " in told
    assert f"up to {limits.narrow.token.n} tokens {limits.narrow.token.value};" in told
    assert f"{limits.float32.tensor.value} and {limits.float32.token.value} (" in told
    grown = limits.narrow.token.at(4096)
    assert f"up to {limits.narrow.token.n} tokens: {limits.narrow.token.value}; of 4,096 tokens: {grown:.2f}" in (
        item("limit")
    )
    assert (
        f"is {limits.ratio.value}, on its worst token {limits.token.value}, on its worst head {limits.head.value}"
        in (item("ratio"))
    )
    assert f"at most {limits.ratio.value} " in item("forward", "Formula")
    assert f"limit is {limits.kl.value:g} of them" in look_up("kl_noise")[0].meaning
    assert f"limit from {SAME:.0e}".replace("e-0", "e-") in look_up("formula")[0].meaning


def test_masked_scores_are_counted_as_told():
    assert "10 of 25" in item("excluded")
    assert np.triu(np.ones((5, 5)), 1).sum() == 10


# explain


def test_explaining_a_word_is_wrapped_to_columns_and_not_when_piped(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed("explain", "excess").splitlines()
    assert lines[0].startswith("excess: What rounding does not explain")
    assert len(lines) == 1 + len(look_up("excess")[0].items)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = printed("explain", "excess").splitlines()
    assert max(map(len, narrow)) <= 60
    assert len(narrow) > len(lines)
    assert " ".join(" ".join(narrow).split()) == " ".join(" ".join(lines).split())


@pytest.mark.parametrize("term", ["not run", "not-run", "NOT_RUN", "skipped"])
def test_a_word_is_found_however_it_is_written(term):
    assert printed("explain", *term.split()).startswith("not run: ")


def test_a_word_of_two_meanings_prints_both():
    text = printed("explain", "attn_out")
    assert "attn_out (point): " in text
    assert "attn_out (policy key): " in text
    assert "Reads: q, k, v; in decode k_cache, v_cache" in text


def test_an_unknown_word_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'excess'"):
        look_up("exces")
    with pytest.raises(UserError, match="precaudit explain"):
        look_up("xqzj")
    assert run(["explain", "exces"]) == 2


@pytest.mark.parametrize("width", [60, 80, 100])
def test_every_word_fits_a_terminal(width):
    for line in (*word_lines(terms(), width), *(line for e in terms() for line in paragraphs(e, width))):
        assert len(line) <= width, line
    shown = "\n".join(word_lines(terms(), None))
    for e in terms():
        assert re.search(rf"^  {re.escape(e.name)}\b", shown, re.M)


def test_words_are_printed_where_the_terminal_has_no_greek():
    done = subprocess.run(
        [sys.executable, "-m", "precaudit", "explain", "excess"], capture_output=True, check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert b"||c - E|| / sqrt(||noise||^2" in done.stdout


def known(text):
    try:
        return look_up(text)
    except UserError:
        return ()


def test_explain_knows_every_heading_and_note_that_is_printed():
    shown, notes = set(heading_texts()), set(note_texts())
    assert (len(shown) > 150, len(notes) > 8) == (True, True)
    assert [(file, text) for file, text in sorted(shown | notes) if not known(text)] == []


def test_no_heading_is_told_that_nothing_prints_or_that_is_a_word():
    assert headings().keys() <= {lookup_key(text) for _, text in heading_texts()}
    assert not headings().keys() & terms_by_name().keys()


def test_a_printed_line_is_explained_word_by_word():
    line = "note: not judged where float32 leaves its range, excess precision and input suspect"
    assert {"note", "input suspect", "excess precision"} <= {e.name for e in look_up(line)}


# Help, examples, completion


@pytest.mark.parametrize("arguments", [["--help"], ["trace", "--help"], ["explain", "q"]])
def test_help_and_words_need_no_heavy_library(arguments):
    code = (
        "import sys\n"
        "for name in ('jax', 'numpy', 'pandas', 'rich', 'transformers'): sys.modules[name] = None\n"
        f"sys.argv = ['precaudit', *{arguments}]\n"
        "from precaudit.cli import main; main()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


COMMANDS = cli.list_commands(click.Context(cli))


def test_summaries_are_whole_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed("--help")
    assert "..." not in text
    assert max(map(len, text.splitlines())) <= 80
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", text, re.M), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    text = printed(name, "--help")
    assert "..." not in text
    assert "\n  Examples:\n    precaudit " in text
    assert 1 <= len(EXAMPLES[name]) <= 3
    for line in EXAMPLES[name]:
        assert f"    {line}\n" in text  # whole, on a line of its own
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("precaudit", name)
        parsed = cli.get_command(click.Context(cli), name).make_context(name, arguments)
        for key in ("subject", "program"):
            subject = parsed.params.get(key)
            assert subject in (None, "tiny") or (ROOT / subject.partition(":")[0]).is_file(), line
        for option in ("points", "phases", "layers"):
            if parsed.params.get(option):
                from precaudit.schema.selection import Selection

                Selection.parse(**{option: parsed.params[option]})
        if parsed.params.get("term"):
            look_up(" ".join(parsed.params["term"]))


def test_there_are_examples_of_commands_alone():
    assert set(EXAMPLES) == set(COMMANDS)


def completed(words, index):
    started = {"COMP_WORDS": words, "COMP_CWORD": str(index), "_PRECAUDIT_COMPLETE": "bash_complete"}
    code = (
        "import sys; sys.modules['jax'] = sys.modules['numpy'] = None; sys.argv = ['precaudit']\n"
        "from precaudit.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | started | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("precaudit co", 1, ["compare"]),
        ("precaudit trace --points q,attn_n", 3, ["q,attn_norm"]),
        ("precaudit compare runs/a --phases pre", 4, ["prefill"]),
        ("precaudit explain max", 2, ["max-diff", "max-ulp", "max"]),
        ("precaudit nonsense x", 2, []),
    ],
)
def test_a_shell_completes_without_jax(words, index, expected):
    assert sorted(completed(words, index)) == sorted(expected)


@pytest.mark.parametrize("shell", ["zsh", "fish"])  # bash's is in test_the_completion_that_doctor_names_works
def test_a_completion_script_is_printed(shell):
    done = subprocess.run(
        [sys.executable, "-m", "precaudit"], capture_output=True, text=True, check=True,
        env=os.environ | {"_PRECAUDIT_COMPLETE": f"{shell}_source", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "_PRECAUDIT_COMPLETE" in done.stdout


def test_the_completion_that_doctor_names_works(monkeypatch, tmp_path):
    from precaudit.checks.doctor.machine import completion

    monkeypatch.setenv("SHELL", "/bin/bash")
    line, file = completion()
    assert file == "~/.bashrc"
    named = tmp_path / "precaudit"
    named.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m precaudit "$@"\n')
    named.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", f"{line}; complete -p precaudit"], capture_output=True, text=True, env=env)
    assert "_precaudit_completion" in done.stdout, done.stderr


# doctor


def doctor(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "precaudit", "doctor", *arguments], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "JAX_PLATFORMS": "cpu"} | environment,
    )  # fmt: skip


def test_a_checkup_is_one_screen_and_says_what_is_here(tmp_path):
    done = doctor(PRECAUDIT_CACHE=str(tmp_path), PYTHONIOENCODING="ascii", NO_COLOR="1", SHELL="/usr/bin/fish")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "ok what precaudit needs is here"
    assert len(lines) <= 40
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)  # a path is never cut
    for word in ("jax 0.", "1 x cpu", "NO_COLOR", "encoding ascii", "fish_source", "torch is not needed"):
        assert word in " ".join(done.stdout.split()), word
    assert not list(tmp_path.iterdir())  # looking leaves nothing behind


def test_a_checkup_as_json_has_the_same(tmp_path):
    import jax

    done = doctor("--json", PRECAUDIT_CACHE=str(tmp_path))
    found = json.loads(done.stdout)
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"] == {"cpu": 1}
    assert found["broken"] == []
    assert {c["kind"] for c in found["caches"]} == {"references", "programs", "trusted", "buckets"}
    assert {x["name"]: x["installed"] for x in found["extras"]} == {x.name: x.installed for x in extras()}


def test_what_is_broken_comes_first(tmp_path):
    (tmp_path / "file").write_text("")
    done = doctor(PRECAUDIT_CACHE=str(tmp_path / "file"), JAX_PLATFORMS="nonsense")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    first, second = (" ".join(x.split()) for x in re.findall(r"^✗ (.*(?:\n  \S.*)*)", done.stdout, re.M))
    assert first.startswith("JAX does not start: ")
    assert "nonsense" in first
    assert "cannot be kept" in second
    assert "Not a directory" in second
    assert done.stdout.startswith("✗")


def test_a_plugin_that_does_not_start_is_said(tmp_path):
    plugin = tmp_path / "jax_plugins" / "broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize():\n    raise RuntimeError('driver too old')\n")
    done = doctor(PYTHONPATH=f"{ROOT}:{tmp_path}", PRECAUDIT_CACHE=str(tmp_path))
    assert "driver too old" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 0  # the CPU runs


def test_a_requirement_that_is_too_old_is_broken(monkeypatch):
    from importlib import metadata

    from precaudit.checks.doctor import packages

    version = metadata.version
    monkeypatch.setattr(packages.metadata, "version", lambda name: "0.7.0" if name == "jax" else version(name))
    assert any(text.startswith("jax>=") and text.endswith("(here 0.7.0)") for text in packages.missing_packages())
    monkeypatch.undo()
    assert packages.missing_packages() == ()


def test_extras_are_those_of_the_installed_package(monkeypatch):
    from precaudit.checks.doctor import packages

    requires = {
        "precaudit": ["jax>=0.8", 'pandas>=2.2; extra == "frames"', 'jax[tpu]; extra == "tpu"'],
        "jax": ["numpy", 'no-such-libtpu; extra == "tpu"'],
    }
    monkeypatch.setattr(packages.metadata, "requires", lambda name: requires.get(name, []))
    monkeypatch.setattr(packages.metadata, "metadata", lambda _: _Names())
    frames, tpu = packages.extras()
    assert frames.installed
    assert tpu.lacks == ("no-such-libtpu",)
    assert tpu.line == "pip install 'precaudit[tpu]'"


class _Names:
    def get_all(self, _field):
        return ["tpu", "frames"]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache with files of ours, files that are not, and links to what must stay."""
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0.q.fp64").write_bytes(b"x" * 10)
    (outside / "jit_f-0-cache").write_bytes(b"x" * 10)
    references, programs, trusted = (caches.folder(k) for k in ("references", "programs", "trusted"))
    for folder in (references / ("a" * 32), references / ("b" * 32), references / "mine", programs, trusted):
        folder.mkdir(parents=True)
    (references / ("a" * 32) / "0.q.fp64").write_bytes(b"x" * 100)
    (references / ("b" * 32) / "0.q.fp64").write_bytes(b"x" * 20)
    (references / ("b" * 32) / "notes.txt").write_bytes(b"mine")
    (references / ("b" * 32) / "1.q.fp64").symlink_to(outside / "0.q.fp64")
    (references / "mine" / "0.q.fp64").write_bytes(b"mine")
    (references / ("c" * 32)).symlink_to(outside)
    (programs / "jit_f-12-cache").write_bytes(b"x" * 1000)
    (programs / "jit_f-12-atime").write_bytes(b"x" * 8)
    (programs / "thesis.txt").write_bytes(b"mine")
    (trusted / ("d" * 32)).write_bytes(b"x" * 5)
    return tmp_path


def everything(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()}


def test_clearing_deletes_our_own_names_and_follows_no_link(kept, capsys):
    assert [(c.kind, c.bytes, c.files) for c in caches.find_caches()] == [
        ("references", 120, 2), ("programs", 1008, 2), ("trusted", 5, 1), ("buckets", 0, 0),
    ]  # fmt: skip
    before = everything(kept)
    assert run(["doctor", "--clear", "references"]) == 0
    assert "references: 120 B freed, 2 files" in capsys.readouterr().out
    assert before - everything(kept) == {f"cache/references/{x * 32}/0.q.fp64" for x in "ab"}
    assert not (kept / "cache" / "references" / ("a" * 32)).exists()  # empty: gone, too
    assert run(["doctor", "--clear", "all"]) == 0
    left = everything(kept)
    assert left == {
        "outside/0.q.fp64", "outside/jit_f-0-cache", f"cache/references/{'b' * 32}/notes.txt",
        f"cache/references/{'b' * 32}/1.q.fp64", "cache/references/mine/0.q.fp64", f"cache/references/{'c' * 32}",
        "cache/xla/thesis.txt",
    }  # fmt: skip


def test_a_cache_that_is_a_link_is_left_alone(kept):
    programs = caches.folder("programs")
    programs.rename(programs.with_name("moved"))
    programs.symlink_to(kept / "outside")
    assert caches.clear("programs").files == 0
    assert (kept / "outside" / "jit_f-0-cache").exists()


def test_programs_that_jax_keeps_elsewhere_are_shown_and_not_cleared(kept, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(kept / "outside"))
    shown = next(c for c in caches.find_caches() if c.kind == "programs")
    assert (shown.folder, shown.bytes, shown.ours) == (str(kept / "outside"), 10, False)
    caches.clear("programs")
    assert (kept / "outside" / "jit_f-0-cache").exists()


@pytest.mark.usefixtures("kept")
def test_what_cannot_be_deleted_is_said(monkeypatch, capsys):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(caches.os, "unlink", refuse)
    assert run(["doctor", "--clear", "programs"]) == 2
    assert "2 could not be deleted" in capsys.readouterr().out

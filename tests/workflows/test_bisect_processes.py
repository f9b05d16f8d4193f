"""Bisections whose trials are processes of their own: flags, commits and versions, with planted answers."""

import json
import shutil
import subprocess
import sys

import pytest

from precaudit.cli import run
from precaudit.diagnosis.bisection import commits, environments
from precaudit.diagnosis.bisection.flags import flag_sides
from precaudit.errors import UserError
from tests.helpers.paths import ROOT

FLAGS = [f"--xla_flag_{i}={i}" for i in range(8)]


def bisect(tmp_path, by, *given, subject="mine.py:program"):
    return run(["bisect", subject, "--by", by, "-o", str(tmp_path / "out"), *given])


def found_in(tmp_path):
    return json.loads((tmp_path / "out" / "bisect.json").read_text())


def test_two_flags_that_only_together_break_it_are_found(tmp_path, capsys):
    command = 'case "$XLA_FLAGS $JAX_ENABLE_X64" in *flag_3=*1) exit 1;; esac'
    bad = f'XLA_FLAGS="{" ".join(FLAGS)}" jax_enable_x64=1'
    assert bisect(tmp_path, "flags", "--good", "", "--bad", bad, "--test-command", command) == 0
    assert "✓ --xla_flag_3=3, JAX_ENABLE_X64=1 together, 2 of 9 that differ, break" in capsys.readouterr().out


def test_flags_that_a_side_sets_otherwise_or_not_are_changes():
    sides = flag_sides("XLA_FLAGS='--a=1 --b' OTHER=x", "XLA_FLAGS='--a=2'")
    assert sorted(sides.names) == ["--a=2", "without --b", "without OTHER"]
    with sides.site(("--a=2", "without OTHER")) as site:
        assert site.variables == {"XLA_FLAGS": "--a=2 --b"} or site.variables == {"XLA_FLAGS": "--b --a=2"}


@pytest.mark.parametrize(
    ("bad", "says"),
    [("jax_enable_x46=1", "is no name of jax.config"), ("--xla_a", "sets nothing"), ("A='", "quotation"), ("", "same")],
)
def test_what_sets_nothing_is_refused(tmp_path, capsys, bad, says):
    assert bisect(tmp_path, "flags", "--good", "", "--bad", bad, "--test", "bits") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--text", "a"], "a program says itself what it runs on; leave out --text"),
        (["--between", "1"], "--by flags takes no --between"), (["--raise", "float32"], "--by flags takes no --raise"),
    ],
)  # fmt: skip
def test_an_option_that_says_nothing_of_the_trials_is_refused(tmp_path, capsys, given, says):
    assert bisect(tmp_path, "flags", "--good", "", "--bad", "A=1", "--test", "bits", *given) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_trials_of_a_model_without_decode_run(tmp_path, capsys):
    given = ["--good", "", "--bad", "OTHER=1", "--test", "bits", "--text", "def", "--decode-steps", "0"]
    assert bisect(tmp_path, "flags", *given, subject="tiny") == 2
    assert "B (OTHER=1) is good already by bits" in capsys.readouterr().err


@pytest.mark.slow
def test_the_xla_flag_that_changes_bits_is_found(tmp_path, capsys):
    flags = "--xla_allow_excess_precision=false --xla_cpu_multi_thread_eigen=true"
    given = ["--good", "", "--bad", f'XLA_FLAGS="{flags}"', "--test", "bits"]
    assert bisect(tmp_path, "flags", *given, subject=f"{ROOT / 'examples' / 'own_decoder.py'}:program") == 0
    assert "✓ --xla_allow_excess_precision=false alone, of 2 that differ, breaks bits" in capsys.readouterr().out


PASSED = """\
import jax.numpy as jnp
import numpy as np

from precaudit import Program


def call(w, x):
    return {formula}


DRAW = np.random.default_rng(0)
w, x = (jnp.asarray(DRAW.standard_normal(s), jnp.{form}) for s in ((64, 64), (16, 64)))
program = Program(call, w, {{"a": (x,)}}, outputs="y")
"""
PASSES = [
    ("jnp.tanh(x @ w) / 3", "float32", "algsimp"),  # which multiplies by a third
    (
        "(jnp.square(jnp.tanh(x) * x) + x).astype(jnp.float32)",
        "bfloat16",
        "float-normalization-bf16",
    ),  # excess precision
]


@pytest.mark.slow
@pytest.mark.parametrize(("formula", "form", "which"), PASSES)
def test_the_pass_that_changes_bits_is_found_and_what_it_makes_of_the_line(tmp_path, capsys, formula, form, which):
    (tmp_path / "mine.py").write_text(PASSED.format(formula=formula, form=form))
    subject = f"{tmp_path / 'mine.py'}:program"
    assert bisect(tmp_path, "passes", "--test", "bits", "--jobs", "2", subject=subject) == 0
    said = capsys.readouterr().out
    assert f"without {which}" in said.splitlines()[0]
    assert "Records part first at" in said
    assert found_in(tmp_path)["hlo"]


def test_passes_take_no_sides_but_on_and_off(tmp_path, capsys):
    assert bisect(tmp_path, "passes", "--good", "algsimp", "--bad", "off", "--test", "bits") == 2
    assert "give --good on --bad off" in capsys.readouterr().err


@pytest.fixture
def history(tmp_path, monkeypatch):
    """A repository of 30 commits of a program; the 19th after the first sets another epsilon."""
    repository = tmp_path / "repository"
    repository.mkdir()
    text = (ROOT / "examples" / "own_decoder.py").read_text()
    assert text.count("1e-5") == 1
    git(repository, "init", "--quiet")
    for i in range(31):
        wrong = text.replace("1e-5", "1e-2") if i >= 19 else text
        (repository / "mine.py").write_text(f"{wrong}\n# commit {i}\n")
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", f"change {i}")
    monkeypatch.chdir(repository)
    return repository


def git(where, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True, text=True).stdout


@pytest.mark.usefixtures("history")
def test_the_commit_of_thirty_that_changed_an_epsilon_is_found_by_a_command(tmp_path, capsys):
    given = ["--good", "HEAD~30", "--bad", "HEAD", "--test-command", "grep -q 1e-5 mine.py"]
    assert bisect(tmp_path, "commits", *given) == 0
    said = capsys.readouterr().out
    assert "change 19 is the first that breaks" in said.splitlines()[0]
    found = found_in(tmp_path)
    assert found["proof"] == "adjacent"
    assert found["trials"] <= 7
    assert len(git(".", "worktree", "list").splitlines()) == 1


@pytest.mark.usefixtures("history")
def test_ctrl_c_leaves_no_worktree(tmp_path, capsys, monkeypatch):
    from precaudit.diagnosis.bisection import processes

    def broken(*_words):
        assert len(git(".", "worktree", "list").splitlines()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "run_command", broken)
    given = ["--good", "HEAD~30", "--bad", "HEAD", "--test-command", "true"]
    assert bisect(tmp_path, "commits", *given) == 130
    assert "0 trials are kept" in capsys.readouterr().err
    assert len(git(".", "worktree", "list").splitlines()) == 1


@pytest.mark.usefixtures("history")
def test_commits_that_cannot_be_told_leave_a_range_and_3(tmp_path, capsys):
    command = "tail -1 mine.py | grep -qE 'commit (18|19|20)$' && exit 125; grep -q 1e-5 mine.py"
    assert bisect(tmp_path, "commits", "--good", "HEAD~30", "--bad", "HEAD", "--test-command", command) == 3
    assert "? one of 4, " in capsys.readouterr().out
    assert len(found_in(tmp_path)["sets"][0]) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("history")
def test_the_commit_is_found_by_the_errors_of_logits_from_a(tmp_path, capsys):
    given = ["--good", "HEAD~30", "--bad", "HEAD", "--test", "logits<1e-6"]
    assert bisect(tmp_path, "commits", *given) == 0
    assert "change 19 is the first that breaks logits<1e-6" in capsys.readouterr().out


@pytest.mark.usefixtures("history")
@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("here", "HEAD", "here is no commit"),
        ("HEAD", "HEAD~3", "is no ancestor"),
        ("HEAD", "HEAD", "same commit"),
    ],
)
def test_what_is_no_row_of_commits_is_refused(tmp_path, capsys, good, bad, says):
    assert bisect(tmp_path, "commits", "--good", good, "--bad", bad, "--test", "bits") == 2
    assert says in capsys.readouterr().err


def test_no_repository_and_no_git_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    given = ["--good", "a", "--bad", "b", "--test", "bits"]
    assert bisect(tmp_path, "commits", *given) == 2
    assert "not a git repository" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert bisect(tmp_path, "commits", *given) == 2
    assert "there is no git here" in capsys.readouterr().err


def test_git_bisect_run_takes_the_exit_codes_as_the_docs_say(history):
    page = (ROOT / "docs" / "bisect.md").read_text()
    script = page.partition("cat > judge.sh <<'END'\n")[2].partition("\nEND\n")[0]
    assert script
    (history / "precaudit").write_text("#!/bin/sh\ntest $1 != gate && exit 0\ngrep -q 1e-5 mine.py\n")
    (history / "precaudit").chmod(0o755)
    (history / "judge.sh").write_text(script)
    git(history, "bisect", "start", "HEAD", "HEAD~30")
    said = git(history, "bisect", "run", "env", f"PATH={history}:/usr/bin:/bin", "sh", "judge.sh")
    assert "change 19" in said


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("jax>=0.10", "jax==0.11.0", "is no version"), ("jax==0.10.2", "flax==0.1", "two packages"),
        ("jax==0.10.2", "jax==0.10.2", "both A and B"),
    ],
)  # fmt: skip
def test_what_are_no_versions_is_refused(tmp_path, capsys, good, bad, says):
    assert bisect(tmp_path, "versions", "--good", good, "--bad", bad, "--test", "bits") == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of four versions of a package, of which the third prints otherwise, in place of a package index."""
    folder = tmp_path / "wheels"
    for version in ("1.0", "1.1", "1.2", "1.3"):
        source = tmp_path / version
        (source / "planted-pkg").mkdir(parents=True)
        write_wheel(folder, version, "2" if version >= "1.2" else "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda _name: None)  # uv has an index of its own
    return folder


def write_wheel(folder, version, holds):
    import zipfile

    folder.mkdir(exist_ok=True)
    info = f"planted-{version}.dist-info"
    with zipfile.ZipFile(folder / f"planted-{version}-py3-none-any.whl", "w") as f:
        f.writestr("planted.py", f"value = {holds}\n")
        f.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n")
        f.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        f.writestr(f"{info}/RECORD", f"planted.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.mark.turn
@pytest.mark.usefixtures("wheels")
def test_the_version_that_changed_a_value_is_found_and_its_environments_are_kept(tmp_path, capsys, monkeypatch):
    command = "python -c 'import planted, numpy; raise SystemExit(planted.value != 1)'"
    given = ["--good", "planted==1.0", "--bad", "planted==1.3", "--between", "1.1,1.2", "--test-command", command]
    assert bisect(tmp_path, "versions", *given) == 0
    assert "✓ planted==1.2 is the first that breaks" in capsys.readouterr().out

    def refuse(*_words):
        raise AssertionError("made again")

    monkeypatch.setattr(environments, "_make", refuse)
    assert environments.environment("planted==1.2").is_file()


@pytest.mark.usefixtures("wheels")
def test_an_environment_that_cannot_be_made_is_one_line_and_2(tmp_path, capsys):
    given = ["--good", "planted==1.0", "--bad", "planted==9.9", "--test-command", "true"]
    assert bisect(tmp_path, "versions", *given) == 2
    said = capsys.readouterr().err
    assert "no environment with planted==9.9" in said
    assert len(said.strip().splitlines()) == 1


def test_an_index_that_cannot_be_reached_is_told():
    said = "raise SystemExit('WARNING: Failed to establish a new connection: Temporary failure in name resolution')"
    with pytest.raises(UserError, match="no environment with a==1: the package index cannot be reached"):
        environments._make("a==1", [sys.executable, "-c", said])


def test_git_s_refusal_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UserError, match="not a git repository"):
        commits.ask_git(tmp_path, "status")

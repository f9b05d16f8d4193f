"""A gate in CI: what init writes, what its steps do, and what a pull request shows."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from precaudit.cli import run
from precaudit.diagnosis.evidence.records import Finding
from precaudit.errors import UserError
from precaudit.judging.budgets import read_budgets
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import Verdict
from precaudit.reports import annotations, junit
from precaudit.reports.escaping import workflow, workflow_property
from precaudit.reports.findings import causes_by_place
from precaudit.reports.gate import gate_report
from precaudit.reports.pages import as_markdown
from precaudit.workflows import package_source
from precaudit.workflows.audit import read_config
from precaudit.workflows.starter import IGNORED, init
from tests.helpers.paths import ROOT

yaml = pytest.importorskip("yaml")
FINE = """import jax
import jax.numpy as jnp
import numpy as np

import precaudit


def call(params, x):
    product = jnp.dot(x, params)
    scores = product * jnp.bfloat16(0.25)
    return scores


def exact(params, x):
    return {"scores": np.float64(x) @ np.float64(params) * 0.25}


weights = jax.random.normal(jax.random.key(0), (16, 8), jnp.bfloat16)
inputs = jax.random.normal(jax.random.key(1), (4, 16), jnp.bfloat16)
program = precaudit.Program(call, weights, {"short": (inputs,)}, outputs="scores")
"""
BROKEN = FINE.replace("jnp.bfloat16(0.25)", "jnp.bfloat16(0.5)")
LINE = FINE[: FINE.index("scores =")].count("\n") + 1


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prog.py").write_text(FINE)
    return tmp_path


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


# What init writes


@pytest.fixture(autouse=True)
def _released(monkeypatch):
    """Have init know of no repository, whatever clone the tests run in."""
    monkeypatch.setattr(package_source, "_repository", lambda: None)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://user:secret@host.example/a/b.git", "https://host.example/a/b.git"),
        ("git@host.example:a/b.git", "ssh://git@host.example/a/b.git"),
        ("ssh://git@host.example:22/a/b", "ssh://git@host.example:22/a/b"),
        ("/somewhere/on/this/disk", None),
        ("https://host.example/a$(b)", None),
        ("", None),
    ],
)
def test_ci_installs_from_a_repository_that_others_reach(url, found):
    """A URL's password, and what a shell would run, never reach a workflow."""
    assert package_source._checked(url, "abc") == (None if found is None else (found, "abc"))


def test_init_says_where_ci_installs_from(project, capsys, monkeypatch):
    monkeypatch.setattr(package_source, "_repository", lambda: ("https://host.example/a", "0123456789abcdef"))
    assert run(["init", "owner/model"]) == 0
    assert "assumed: CI installs precaudit from https://host.example/a at 0123456789ab" in capsys.readouterr().out
    steps = (project / ".github/workflows/precaudit.yml").read_text()
    assert '"${PACKAGE:-precaudit[html] @ git+https://host.example/a@0123456789abcdef}"' in steps


def test_init_is_of_the_program_named(project):
    (project / ".gitignore").write_bytes(b"mine\n/.cache/")
    assert run(["init", "prog.py:program", "--reference", "prog.py:exact"]) == 0
    found = read_config(project / "precaudit.toml")
    assert (found.subject, found.reference, found.diagnose) == ("prog.py:program", "prog.py:exact", True)
    assert read_budgets(project / "budgets.toml") == ()
    lines = (project / ".gitignore").read_text().splitlines()
    assert lines[:2] == ["mine", "/.cache/"]
    assert sorted(lines[1:]) == sorted(IGNORED)  # each once
    steps = (project / ".github/workflows/precaudit.yml").read_text()
    assert "@" not in steps.replace("@v", "").replace("body=@$", "")
    assert f"precaudit[html]=={version('precaudit')}" in steps


def test_init_writes_all_or_nothing(project, capsys):
    (project / "budgets.toml").write_text("# mine\n")
    before = files(project)
    assert run(["init", "prog.py:program"]) == 2
    told = capsys.readouterr().err
    assert "budgets.toml" in told
    assert "precaudit.yml" not in told
    assert "--force" in told
    assert files(project) == before
    (project / ".github").write_text("a file where a folder should be")
    before = files(project)
    assert run(["init", "prog.py:program", "--force"]) == 2
    assert files(project) == before
    (project / ".github").unlink()
    assert run(["init", "prog.py:program", "--force"]) == 0
    once = files(project)
    assert b"# mine" not in once["budgets.toml"]
    assert run(["init", "prog.py:program", "--force"]) == 0
    assert files(project) == once


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "precaudit init FILE.py:NAME"),
        (["prog.py:programme"], "did you mean 'program'"),
        (["gone.py:program"], "gone.py: no such file"),
        (["nowhere"], "no such checkpoint"),
        (["tiny", "--reference", "prog.py:exact"], "is for a program"),
        (["prog.py:program", "--reference", "prog.py:exakt"], "did you mean 'exact'"),
    ],
)
def test_init_refuses_what_is_no_subject(project, capsys, arguments, told):
    before = files(project)
    assert run(["init", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert files(project) == before


def test_init_of_a_checkpoint_has_a_budget_of_its_logits(tmp_path):
    init("owner/model", tmp_path)
    assert read_config(tmp_path / "precaudit.toml").subject == "owner/model"
    assert len(read_budgets(tmp_path / "budgets.toml")) == 1


def test_what_a_program_says_itself_is_refused(project):
    path = project / "precaudit.toml"
    path.write_text('subject = "prog.py:program"\npolicy = "bf16"\n')
    with pytest.raises(UserError, match="leave out policy"):
        read_config(path)
    path.write_text('subject = "tiny"\nreference = "prog.py:exact"\n')
    with pytest.raises(UserError, match="tiny is no program; leave out reference"):
        read_config(path)


# What a pull request shows


def verdict(status, layer, point, prompt="a", **more):
    more = {"metric": "excess", "scope": "token", "value": 9.0, "limit": 1.0} | more
    return Verdict(status=status, kind="local", prompt=prompt, phase="call", layer=layer, point=point, **more)


BAD = (verdict("fail", 0, "q"), verdict("unknown", 0, "q", text="no numbers"), verdict("missing", None, "gone"))
PLACES = ((0, "q"), (1, "q"), (None, "logits"))


def test_junit_cases_are_of_layers_and_points_alone():
    def cases(*verdicts, name="run-1"):
        j = Judgement(name, verdicts, {}, places=PLACES)
        return ElementTree.fromstring(junit.render_junit(j)).findall(".//testcase")

    fine, bad = cases(), cases(*BAD, verdict("fail", 0, "q", prompt="b", value=77.0), name="run-2")
    names = [c.get("name") for c in fine]
    assert names == ["run", "layer 0 q", "layer 1 q", "logits"]
    assert [c.get("name") for c in bad] == [*names, "gone"]
    assert {c.get("classname") for c in (*fine, *bad)} == {"precaudit"}
    assert not any(len(c) for c in fine)
    found = {c.get("name"): [(r.tag, r.get("type")) for r in c] for c in bad}
    assert found["layer 0 q"] == [("failure", "fail"), ("error", "unknown")]
    assert found["gone"] == [("error", "missing")]
    assert found["layer 1 q"] == []


def test_an_annotation_names_the_line_from_the_root(project):
    odd = project / "sub" / "a, b:c%.py"
    odd.parent.mkdir()
    odd.write_text("")
    sources = {"q": f"{odd}:7", "gone": "elsewhere.py:3"}
    j = Judgement("run", BAD, {}, places=PLACES, sources=sources)
    fail, missing, _ = annotations.annotations(j, project)
    assert fail.startswith("::error file=sub/a%2C b%3Ac%25.py,line=7,title=precaudit fail::")
    assert missing.startswith("::warning title=precaudit missing::")
    outside = annotations.annotations(j, project / "other")
    assert not any("file=" in a for a in outside)
    assert workflow_property("a\n::error::b,c") == "a\\n%3A\\x3aerror%3A\\x3ab%2Cc"


def cause(point, layers, fix=""):
    fields = dict.fromkeys(("rel_l2", "explained", "equal", "second", "worst"))
    return Finding(
        **fields, kind="semantics", cause="scale 2", says="it is times 2", layer=layers[0], point=point,
        layers=layers, phases=("call",), prompts=("a",), records=3, fix=fix,
    )  # fmt: skip


def test_a_diagnosis_stands_where_a_judgement_is_read(project):
    """At the place that it is of, and where no verdict names that, at the first that fails; suspects say nothing."""
    later = (verdict("fail", 3, "k"), verdict("input suspect", 1, "q"))
    j = Judgement("run", (*BAD, *later), {"fail": 2}, places=(*PLACES, (3, "k")))
    causes = causes_by_place(j, (cause("k", (2, 3), "drop the 2"), cause("k_cache", (0,))))
    at_k, first = (
        "scale 2: k of layer 2: it is times 2; change: drop the 2",
        "scale 2: k_cache of layer 0: it is times 2",
    )
    assert causes == {(3, "k"): (at_k,), (0, "q"): (first,)}
    found = annotations.annotations(j, project, causes)
    assert len(found) == 4
    assert not any("input suspect" in a for a in found)
    assert found[0].endswith(workflow(first))
    assert found[1].endswith(workflow(at_k))
    cases = {c.get("name"): c for c in ElementTree.fromstring(junit.render_junit(j, causes)).findall(".//testcase")}
    assert cases["layer 3 k"].find("failure").text == at_k
    assert cases["layer 0 q"].find("failure").text == first
    text = as_markdown(gate_report(j, "run", causes=causes))
    assert text.index("Diagnosis") < text.index(at_k) < text.index("| fail")
    assert causes_by_place(Judgement("run", (), {}), (cause("k", (2,)),)) == {}


def test_markdown_names_the_line_and_the_budget_s_reason():
    v = verdict("fail", 0, "q", why="scores | stay below 1 % <b>")
    j = replace(Judgement("run", (v,), {"fail": 1}), sources={"q": "prog.py:7"})
    row = next(x for x in as_markdown(gate_report(j, "run")).splitlines() if x.startswith("| fail"))
    assert "prog.py:7" in row
    assert "scores &#124; stay below 1 % &#60;b&#62;" in row


# What GitHub would run


def scripts(path):
    """Return (name, script, environment) of the run steps of a workflow or an action."""
    table = yaml.safe_load(path.read_text())
    runs = table["runs"] if "runs" in table else table["jobs"]["audit"]
    steps = [s for s in runs["steps"] if "run" in s]
    return [
        (s.get("name") or s.get("id") or "Install", s["run"], runs.get("env", {}) | s.get("env", {})) for s in steps
    ]


@pytest.fixture
def written(tmp_path):
    init("owner/model", tmp_path)
    return tmp_path / ".github/workflows/precaudit.yml"


def test_the_workflow_and_the_action_are_as_their_schemas_say(written):
    pytest.importorskip("check_jsonschema")
    for schema, path in (("vendor.github-workflows", written), ("vendor.github-actions", ROOT / "action.yml")):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_steps_are_sound_shell_and_hold_no_expression(written, tmp_path):
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for path in (written, ROOT / "action.yml"):
        for name, script, _ in scripts(path):
            assert "${{" not in script, name  # what others write reaches a shell as a variable alone
            if checker is not None:
                (tmp_path / "step.sh").write_text(script)
                command = [checker, "-s", "bash", str(tmp_path / "step.sh")]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout


def test_a_push_runs_once_and_permissions_are_few(written):
    table = yaml.safe_load(written.read_text())
    assert table[True] == {"push": {"branches": ["main"]}, "pull_request": None}  # YAML 1.1 reads "on" as true
    assert table["concurrency"]["cancel-in-progress"] is True
    assert table["permissions"] == {"contents": "read", "pull-requests": "write"}
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    uses = [s["uses"] for t in (table["jobs"]["audit"], action["runs"]) for s in t["steps"] if "uses" in s]
    assert uses
    for name in uses:
        assert name.startswith("actions/")
        assert name.partition("@v")[2].isdigit()


class Machine:
    """Stands in for a runner: its files, and a precaudit, pip and gh that are found first."""

    def __init__(self, folder):
        self.folder, self.bin, self.log = folder, folder / ".bin", folder / ".bin" / "log"
        self.bin.mkdir()
        self.tool("precaudit", f'exec {sys.executable} -m precaudit "$@"')
        self.tool("python", f'if [ "$2" = pip ]; then echo "$@" >> {self.log}; else exec {sys.executable} "$@"; fi')
        self.tool("gh", f'echo "gh $*" >> {self.log}; case "$*" in *--paginate*) cat {self.bin}/comments;; esac')
        (self.bin / "comments").write_text("")

    def tool(self, name, text):
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def steps(self, path, **given):
        """Run every step as GitHub does; return their exit codes, the output, the summary and the step's outputs."""
        codes, said = {}, ""
        kept = {n: self.bin / n for n in ("summary", "output")}
        for x in (*kept.values(), self.log):
            x.write_text("")
        for name, script, declared in scripts(path):
            plain = {k: v for k, v in declared.items() if "${{" not in v}
            env = os.environ | plain | given | {
                "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "GITHUB_ACTIONS": "true",
                "GITHUB_STEP_SUMMARY": str(kept["summary"]), "GITHUB_OUTPUT": str(kept["output"]),
                "GITHUB_REPOSITORY": "owner/name", "RUNNER_TEMP": str(self.bin), "GITHUB_WORKSPACE": str(self.folder),
            }  # fmt: skip
            done = subprocess.run(
                ["bash", "-e", "-c", script], cwd=self.folder, env=env, capture_output=True, text=True
            )
            codes[name], said = done.returncode, said + done.stdout + done.stderr
        return codes, said, kept["summary"].read_text(), kept["output"].read_text()


@pytest.mark.slow  # four audits of a small program: 40 seconds
def test_the_steps_run_as_written(project):
    init("prog.py:program", ".", "prog.py:exact")
    machine = Machine(project)
    workflow, action = project / ".github/workflows/precaudit.yml", ROOT / "action.yml"
    codes, said, summary, _ = machine.steps(workflow, NUMBER="7", GH_TOKEN="x")
    assert set(codes.values()) == {0}, said
    assert "passes" in summary
    assert "::error" not in said
    log = machine.log.read_text()
    assert "gh api repos/owner/name/issues/7/comments -F body=@" in log
    assert "--method PATCH" not in log
    assert "precaudit[html]==" in log
    given = {"ACTION": str(ROOT), "EXTRAS": "html", "REQUIREMENTS": "", "CONFIG": "precaudit.toml", "ARGUMENTS": ""}
    codes, said, _, output = machine.steps(action, **given)
    assert set(codes.values()) == {0}, said
    assert output.splitlines() == ["verdict=pass", "exit-code=0", f"report={project / 'precaudit.md'}"]
    assert f"pip install {ROOT}[html]" in machine.log.read_text()

    (project / "prog.py").write_text(BROKEN)
    (machine.bin / "comments").write_text("41\n42\n")
    codes, said, summary, _ = machine.steps(workflow, NUMBER="7", GH_TOKEN="x")
    assert codes.pop("Audit") == 1, said
    assert set(codes.values()) == {0}, said
    assert "fails" in summary
    assert f"prog.py:{LINE}" in summary
    assert f"::error file=prog.py,line={LINE},title=precaudit fail::" in said
    assert "Diagnosis:" in said
    assert "--method PATCH repos/owner/name/issues/comments/41 -F body=@" in machine.log.read_text()
    assert (machine.bin / "comment.md").read_text().startswith("<!-- precaudit -->\n### precaudit")
    for name in ("errors.jsonl", "report.md", "findings.jsonl"):
        assert (project / "traces/runs/audit" / name).is_file()
    assert json.loads((project / "traces/runs/audit/findings.jsonl").read_text().splitlines()[0])["point"] == "scores"
    report = (project / "traces/runs/audit/report.md").read_text()
    assert report.startswith("# precaudit compare: `prog.py:program`\n\n✗ ")
    assert "## Findings" in report
    quiet = (project / "precaudit.toml").read_text().replace("# diagnose = false", "diagnose = false")
    (project / "precaudit.toml").write_text(quiet)
    hostile = {"ARGUMENTS": "--json", "EXTRAS": "html]; touch owned; echo ["}
    codes, said, summary, output = machine.steps(action, **given | hostile)
    assert codes["audit"] == 1, said
    assert "Diagnosis:" not in said
    assert "verdict=fail" in output
    assert f"prog.py:{LINE}" in summary
    assert not (project / "owned").exists()

"""``precaudit watch``: scripts run unedited, with their own output, traceback and exit code."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
import precaudit.workflows.audit
from precaudit.cli import run as command
from precaudit.errors import CannotJudge, UserError
from precaudit.recording.runs.compared_programs import program_errors
from precaudit.recording.runs.programs import open_program_run
from precaudit.recording.watching.calls import Jitted, Picked, Watch
from precaudit.workflows.watch import call_numbers, rerun, script_command, watch
from tests.helpers.paths import EXAMPLES, ROOT

SERVE = str(EXAMPLES / "serve.py")
PYTHON = sys.executable


def watched(*arguments):
    done = subprocess.run(
        [PYTHON, "-m", "precaudit", "watch", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def script(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    return str(tmp_path / "script.py")


def test_one_command_from_an_unedited_script_to_a_verdict(tmp_path):
    run = tmp_path / "run"
    picked = ("--gate", "--function", "next_token:serve.py", "--calls", "2:5", "-o", str(run))
    code, out, err = watched(*picked, "--", PYTHON, SERVE)
    plain = subprocess.run([PYTHON, SERVE], capture_output=True, text=True, check=True)
    assert out.startswith(plain.stdout)
    assert code == 0
    assert "next_token  serve.py:" in err
    assert "rounding explains all" in out
    record = open_program_run(run).record
    assert (record.calls, record.cases) == (3, ("call2to4",))
    assert {p.name.partition("~")[0] for p in record.points} >= {"scores", "probs", "logits"}


DECODES = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
sys.path.insert(0, {examples!r})
import own_decoder as own
own.write_checkpoint(Path({model!r}))
step, cache, token = jax.jit(own.step), own.empty, jnp.int32(17)
for position in range(4):
    logits, cache = step(own.params, token, jnp.int32(position), cache)
    token = jnp.argmax(logits).astype(jnp.int32)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "expected"), [("", "", 0), ("HEAD**-0.5", "HEAD**-1.0", 1)])
def test_a_script_is_held_against_the_textbook_of_the_model_that_it_runs(tmp_path, old, new, expected):
    for name in ("own_decoder.py", "own_decoder.json"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text().replace(old or "\0", new))
    model = tmp_path / "model"
    model.with_suffix(".json").write_text((EXAMPLES / "own_decoder.json").read_text())
    serve = script(tmp_path, DECODES.format(examples=str(tmp_path), model=str(model)))
    subprocess.run([PYTHON, serve], check=True)
    picked = ("--gate", "--function", "step", "--calls", "0:4", "--model", str(model), "-o", str(tmp_path / "run"))
    code, out, _ = watched(*picked, "--", PYTHON, serve)
    assert code == expected, out
    assert "formula" in {e.kind for e in program_errors(open_program_run(tmp_path / "run"))}
    assert ("the formula is not the reference's" in out) == (expected == 1)


def test_a_model_that_is_not_there_is_told_before_the_script_runs(tmp_path):
    serve = script(tmp_path, "print('ran')")
    code, out, err = watched(
        "--function", "f", "-o", str(tmp_path / "run"), "--model", "nowhere/model", "--", PYTHON, serve
    )
    assert (code, out) == (2, "")
    assert "nowhere/model" in err


FAILS = """
import sys
from functools import partial
print("before")
def inner():
    raise ValueError("mine")
inner()
"""


def test_a_scripts_traceback_and_exit_code_are_its_own(tmp_path):
    path = script(tmp_path, FAILS)
    plain = subprocess.run([PYTHON, path], capture_output=True, text=True, check=False)
    code, out, err = watched("--", PYTHON, path)
    assert (code, out) == (1, "before\n")
    assert err.startswith(plain.stderr)
    assert "note: the script did not import JAX" in err


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("import sys; sys.exit(7)", 7, "the script did not import JAX"),
        ("import os; os._exit(5)", 5, "it was killed, or ended by os._exit"),
        ("import sys; print(sys.argv[1:], __name__, flush=True); sys.exit('no')", 1, "no\n"),
    ],
)
def test_ways_to_end_keep_the_exit_code(tmp_path, text, code, says):
    found, out, err = watched("--", PYTHON, "-u", script(tmp_path, text), "--a", "b")
    assert (found, says in err) == (code, True)
    assert "argv" not in text or out == "['--a', 'b'] __main__\n"


FLAGS = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax
print(jax.device_count())
"""


def test_what_a_script_sets_before_it_imports_jax_holds(tmp_path):
    assert watched("--", PYTHON, script(tmp_path, FLAGS))[1] == "3\n"


def test_a_name_that_is_not_called_has_the_nearest(tmp_path, capsys):
    code = command(["watch", "--function", "next_tokn", "-o", str(tmp_path / "w"), "--", PYTHON, SERVE])
    assert code == 2
    assert "the script called no jitted function 'next_tokn'; did you mean 'next_token'?" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere: no such command"),
        ([SERVE], "it is a script: precaudit watch -- python "),
        ([PYTHON], "runs no script"),
        ([PYTHON, "-c", "1"], "runs no script"),
        ([PYTHON, "nowhere.py"], "nowhere.py: no such file"),
        (["ls"], "ls runs no Python"),
    ],
)
def test_commands_that_cannot_be_watched_are_refused(words, says):
    with pytest.raises(UserError, match=says):
        script_command(words, ROOT)


def test_options_of_python_stay_before_the_script():
    assert script_command([PYTHON, "-X", "dev", "-u", SERVE, "-v"], ROOT) == (
        [PYTHON, "-X", "dev", "-u"],
        [SERVE, "-v"],
    )
    assert script_command([PYTHON, "-m", "json.tool", "-h"], ROOT) == ([PYTHON], ["-m", "json.tool", "-h"])


def test_calls_are_numbers_and_ranges():
    assert call_numbers("0,2:4,-1") == [-1, 0, 2, 3]
    assert call_numbers(None) == []
    for bad in ("a", "1:", "-2"):
        with pytest.raises(UserError, match=f"--calls {bad}"):
            call_numbers(bad)


def test_a_folder_that_holds_a_run_is_refused_before_the_script_runs(tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    path = script(tmp_path, "print('ran')")
    assert command(["watch", "--function", "f", "-o", str(tmp_path), "--", PYTHON, path]) == 2
    said = capfd.readouterr()
    assert (said.out, str(tmp_path) in said.err) == ("", True)


FAILING = """
import jax
import jax.numpy as jnp
f = jax.jit(lambda w, x: jnp.tanh(x @ w))
for i in range({calls}):
    f(jnp.ones((4, 4), jnp.bfloat16), jnp.full((2, 4), i, jnp.bfloat16))
{end}
"""


def test_calls_of_a_script_that_fails_later_are_recorded_and_compared(tmp_path):
    path = script(tmp_path, FAILING.format(calls=2, end="raise SystemExit(4)"))
    found = watch([PYTHON, path], function="<lambda>", calls="0:2", output=tmp_path / "run")
    assert (found.code, found.runs, found.seen.runs[0].compared) == (4, [tmp_path / "run"], True)
    assert open_program_run(tmp_path / "run").record.calls == 2


def test_calls_that_wait_for_another_that_never_came_are_named(tmp_path):
    path = script(tmp_path, FAILING.format(calls=2, end="raise SystemExit(4)"))
    found = watch([PYTHON, path], function="<lambda>", calls="0:9", output=tmp_path / "run")
    assert (found.code, found.runs) == (4, [])
    assert "the script ended with exit code 4: not recorded was <lambda>: calls 0, 1" in found.seen.notes
    path = script(tmp_path, FAILING.format(calls=2, end=""))
    found = watch([PYTHON, path], function="<lambda>", calls="0:9", output=tmp_path / "run")  # ended as it should
    assert open_program_run(found.runs[0]).record.calls == 2


def test_what_was_recorded_is_there_when_a_script_is_killed(tmp_path, capfd):
    path = script(tmp_path, FAILING.format(calls=1, end="import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    words = ["watch", "--function", "<lambda>", "-o", str(tmp_path / "run"), "--", PYTHON, path]
    assert command(words) == 128 + 9
    assert open_program_run(tmp_path / "run").record.finished
    assert f"precaudit compare {tmp_path / 'run'} --rerun" in capfd.readouterr().err


LIBRARY = """
import equinox as eqx, jax, jax.numpy as jnp
from functools import partial

class Config:  # hashable, static, and with an attribute that arrays have
    dtype = "bfloat16"

@eqx.filter_jit
def train(w, x):
    return jnp.tanh(x @ w)

@partial(jax.jit, static_argnums=0)
def scale(config, x):
    return x * 2

x = train(jnp.ones((4, 4)), jnp.ones((2, 4)))
print(scale(Config(), x).shape)
"""


def test_a_function_that_a_library_wraps_is_placed_where_it_is_defined(tmp_path):
    path = script(tmp_path, LIBRARY)
    found = watch([PYTHON, path], function="train:script.py", output=tmp_path / "run")
    places = {f.name: f.place.rpartition("/")[2] for f in found.functions if f.calls}
    assert (places, found.runs) == ({"train": "script.py:8", "scale": "script.py:12"}, [tmp_path / "run"])
    with pytest.raises(UserError, match=r"'train' in other\.py"):
        watch([PYTHON, path], function="train:other.py", output=tmp_path / "other")


def test_a_static_argument_that_looks_like_an_array_is_none(tmp_path, capfd):
    """MaxText's configuration has a dtype and no shape: the call was broken off by what looked at it."""
    found = watch([PYTHON, script(tmp_path, LIBRARY)], function="scale", output=tmp_path / "run")
    assert (found.code, capfd.readouterr().out, len(found.runs)) == (0, "(2, 4)\n", 1)
    (scale,) = (f for f in found.functions if f.name == "scale")
    assert (scale.shapes, scale.unseen) == ((("float32[2, 4]",),), ())


def test_what_breaks_while_a_call_is_looked_at_is_said_and_the_script_goes_on(monkeypatch):
    watcher = Watch(Picked())
    watcher.use()
    monkeypatch.setattr(watcher, "shapes", lambda *_: 1 / 0)
    f = Jitted(jax.jit(lambda x: x + 1), len, {}, watcher)
    assert f(jnp.ones(2)).tolist() == [2.0, 2.0]
    (seen,) = watcher.functions
    assert "broke off: ZeroDivisionError" in seen.unseen[0]


DONATED = """
import functools, jax, jax.numpy as jnp

@functools.partial(jax.jit, donate_argnums=(1, 2))
def step(w, key, x):
    key, other = jax.random.split(key)
    return key, jnp.tanh(x @ w) + jax.random.normal(other, x.shape)

key, x = jax.random.key(0), jnp.ones((2, 4))
for _ in range(4):
    key, x = step(jnp.ones((4, 4)) / 8, key, x)
print(x.sum())
"""


def test_keys_that_a_call_takes_over_are_kept(tmp_path, capfd):
    path = script(tmp_path, DONATED)
    plain = subprocess.run([PYTHON, path], capture_output=True, text=True, check=True)
    found = watch([PYTHON, path], function="step", calls="1:3", output=tmp_path / "run")
    assert (capfd.readouterr().out, found.seen.notes) == (plain.stdout, ())
    assert precaudit.gate(found.runs[0]).exit_code == 0


SITE = "import jax\nprint('first')\n"


def test_jax_imported_before_the_script_is_told(tmp_path, monkeypatch):
    """``sitecustomize`` runs before anything that is watched."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    code, out, err = watched("--", PYTHON, script(tmp_path, FAILING.format(calls=2, end="")))
    assert (code, out.count("first")) == (0, out.count("\n"))
    assert "note: JAX was imported before the script: functions jitted before it are not watched" in err
    assert "<lambda>  script.py:4      2 " in err  # what the script jits is seen


FORKS = """
import os
if os.fork() == 0:
    raise SystemExit(3)
print(os.wait()[1] >> 8)
"""


def test_a_process_that_the_script_forks_ends_as_it_would(tmp_path):
    code, out, err = watched("--", PYTHON, script(tmp_path, FORKS))
    assert (code, out) == (0, "3\n")
    assert err.count("jitted functions") == 1


def test_more_than_was_allowed_is_not_recorded(tmp_path):
    path = script(tmp_path, FAILING.format(calls=1, end=""))
    found = watch([PYTHON, path], function="<lambda>", output=tmp_path / "run", most="50B")
    assert not found.runs
    assert "--most 50 B leaves 50 B; fewer --calls, --layers or --points take less" in found.seen.notes[0]
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="--most much: a number of bytes is wanted"):
        watch([PYTHON, path], function="<lambda>", output=tmp_path / "run", most="much")


def test_options_that_need_a_function_say_so(capsys):
    assert command(["watch", "--calls", "1", "--points", "x", "--", PYTHON, SERVE]) == 2
    assert "--calls, --points: of which function?" in capsys.readouterr().err


WITHIN = """
import jax
inner = jax.jit(lambda x: x.sum())
jax.grad(lambda x: inner(x))(jax.numpy.ones(3))
"""


def test_a_function_that_is_called_within_others_alone_is_told_so(tmp_path):
    with pytest.raises(UserError, match="<lambda> was called 1 times, all within another jitted function, vmap or"):
        watch([PYTHON, script(tmp_path, WITHIN)], function="<lambda>", output=tmp_path / "run")


def test_filters_and_several_runs(tmp_path):
    path, run = script(tmp_path, FAILING.format(calls=6, end="")), tmp_path / "run"
    found = watch([PYTHON, path], function="<lambda>", calls="0:3,-1", output=run, positions="last:2", points="value")
    assert found.runs == [run / "0", run / "1"]
    first, last = (open_program_run(r).record for r in found.runs)
    assert (first.calls, first.began, last.calls, last.watched.first) == (2, 1, 1, 5)
    with pytest.raises(UserError, match="holds 2 runs already"):
        watch([PYTHON, path], function="<lambda>", output=run)
    found = watch([PYTHON, path], function="<lambda>", output=run, force=True)
    assert found.runs == [run]


DRAWN = """
import os, jax, jax.numpy as jnp
f = jax.jit(lambda w, x: jnp.tanh(x @ w))
w = jax.random.normal(jax.random.key(0), (16, 16)).astype(jnp.bfloat16)
x = jax.random.normal(jax.random.key({seed}), (4, 16)).astype(jnp.bfloat16)
for _ in range(3):
    x = f(w, x)
print("said")
"""


def test_a_command_is_run_again_to_compare_its_calls(tmp_path, capfd):
    run = tmp_path / "run"
    path = script(tmp_path, DRAWN.format(seed=1))
    found = watch([PYTHON, path], function="<lambda>", calls="1:3", output=run, compare=False)
    assert not found.seen.runs[0].compared
    assert command(["compare", str(run)]) == 2
    assert f"precaudit compare {run} --rerun runs it again" in capfd.readouterr().err
    assert command(["compare", str(run), "--rerun"]) == 0
    said = capfd.readouterr()
    assert "said" in said.err
    assert said.out.startswith("✓ rounding explains all")
    assert command(["compare", str(run), "--layers", "all"]) in (0, 2)  # what was compared is shown
    assert command(["compare", str(run)]) == 0
    (tmp_path / "script.py").write_text(DRAWN.format(seed=2))
    assert command(["compare", str(run), "--rerun"]) == 2
    assert f"{path} changed since it was recorded: watch it again" in capfd.readouterr().err


TWO_WAYS = """
import jax
import jax.numpy as jnp
w = jax.random.normal(jax.random.key(0), (4, 4))
x = jax.random.normal(jax.random.key(1), (3, 4))
@jax.jit
def soft(w, x):
    y = x @ w
    return {formula}
soft(w, x)
"""


@pytest.mark.turn
def test_watched_runs_are_one_formula_or_part_where_their_scripts_do(tmp_path, capfd):
    """Each script is run again, and its calls' FP64 values are looked for among the other's, or among a dump's."""
    formulas = {
        "plain": "y / (1 + jnp.exp(-y))",
        "other": "0.5 * y * (1 + jnp.tanh(y / 2))",
        "wrong": "y * jnp.tanh(y)",
    }
    for name, formula in formulas.items():
        (tmp_path / f"{name}.py").write_text(TWO_WAYS.format(formula=formula))
        watch([PYTHON, str(tmp_path / f"{name}.py")], function="soft", output=tmp_path / name, compare=False)
    capfd.readouterr()
    for name, code, mark in (("other", 0, "✓"), ("wrong", 1, "✗")):
        assert command(["same", str(tmp_path / "plain"), str(tmp_path / name)]) == code
        assert capfd.readouterr().out.startswith(f"{mark} plain and {name} are")
    y = np.asarray(jax.random.normal(jax.random.key(1), (3, 4))) @ np.asarray(
        jax.random.normal(jax.random.key(0), (4, 4))
    )
    np.savez(tmp_path / "theirs.npz", y=y / (1 + np.exp(-y)))
    assert command(["same", str(tmp_path / "plain"), str(tmp_path / "theirs.npz")]) == 0
    assert command(["same", str(tmp_path / "theirs.npz"), str(tmp_path / "plain")]) == 2
    assert "the first is a program, FILE.py:NAME, or a watched run" in capfd.readouterr().err
    for refused in (["same", "plain", "gone.npz"], ["compare", "plain", "--rerun", "--model", "gone/model"]):
        assert command([str(tmp_path / x) if x in ("plain", "gone.npz") else x for x in refused]) == 2
        said = capfd.readouterr().err
        assert "gone" in said
        assert "comparing" not in said  # the script was not run for it


def test_a_command_that_gives_its_calls_other_values_cannot_be_compared_again(tmp_path):
    path = script(tmp_path, DRAWN.format(seed="int.from_bytes(os.urandom(3), 'big')"))
    watch([PYTHON, path], function="<lambda>", calls="1:3", output=tmp_path / "run", compare=False)
    with pytest.raises(CannotJudge, match="argument 1 of call 1 is another than in"):
        rerun(tmp_path / "run")


def test_points_of_a_watched_run_are_those_that_were_recorded(tmp_path, capsys):
    path = script(tmp_path, DRAWN.format(seed=1))
    watch([PYTHON, path], function="<lambda>", output=tmp_path / "run", compare=False)
    assert command(["points", str(tmp_path / "run")]) == 0
    assert "dot_general" in capsys.readouterr().out


def test_a_function_needs_a_folder():
    with pytest.raises(UserError, match="--function needs -o RUN"):
        watch([PYTHON, SERVE], function="f")


def test_check_judges_one_call():
    x = jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16)
    w = jnp.full((32, 32), 0.1, jnp.bfloat16)
    assert precaudit.check(lambda w, x: jnp.tanh(w @ x), w, x).exit_code == 0
    precaudit.assert_explained(lambda w, x: jnp.tanh(w @ x), w, x)


def test_check_of_large_matrices_alone():
    """None of them is a parameter of the others: a program without inputs has no points."""
    w, x = (jnp.full((n, 32), 0.1, jnp.bfloat16) for n in (32, 16))
    precaudit.assert_explained(lambda w, x: jnp.tanh(x @ w), w, x)


def test_check_raises_for_what_does_not_pass():
    """A square in float16 overflows at 9e4."""
    x = jnp.full(32, 300.0, jnp.float16)
    judged = precaudit.check(lambda x: (x * x).sum(), x)
    assert judged.exit_code == 1
    with pytest.raises(AssertionError, match="nonfinite"):
        judged.raise_for_failure()
    with pytest.raises(UserError, match="cannot be traced"):
        precaudit.check(lambda x: x + "a", x)


def test_audit_watches_a_command(tmp_path, capfd):
    script(tmp_path, DRAWN.format(seed=1))
    toml = f'command = "{shlex.quote(PYTHON)} script.py"\nfunction = "<lambda>"\ncalls = "1:3"\noutput = "run"\n'
    (tmp_path / "precaudit.toml").write_text(toml)
    assert command(["audit", "--config", str(tmp_path / "precaudit.toml")]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("✓ rounding explains all")
    assert "said" in said.err
    assert open_program_run(tmp_path / "run").record.calls == 2


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('command = "python x.py"', "which function's calls"),
        ('command = "python x.py"\nfunction = "f"\nsubject = "tiny"', "watched as it runs; leave out subject"),
        ('output = "run"', "subject = what is audited, or command ="),
        ('subject = "tiny"\ncalls = "1"', "calls are of a command"),
    ],
)  # fmt: skip
def test_what_a_configuration_may_say_of_a_command(tmp_path, toml, says):
    (tmp_path / "precaudit.toml").write_text(toml)
    with pytest.raises(UserError, match=says):
        precaudit.workflows.audit.read_config(tmp_path / "precaudit.toml")


def test_ctrl_c_ends_the_script_and_what_was_recorded_is_compared(tmp_path):
    path = script(tmp_path, DRAWN.format(seed=1) + "import time, sys; sys.stdout.flush(); time.sleep(100)\n")
    words = [PYTHON, "-m", "precaudit", "watch", "--function", "<lambda>", "-o", str(tmp_path / "run")]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background is given none
    with subprocess.Popen([*words, "--", PYTHON, path], cwd=ROOT, preexec_fn=heard, **how) as child:
        assert child.stdout.readline() == "said\n"
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate()
    assert child.returncode == 130
    assert "KeyboardInterrupt" in err
    assert (tmp_path / "run" / "compared.json").is_file()
    assert f"precaudit gate {tmp_path / 'run'}" in err


OVERFLOWS = """
import jax, jax.numpy as jnp
f = jax.jit(lambda x: (x * x).sum())
f(jnp.full(32, 300.0, jnp.float16))
"""


def test_a_run_that_fails_is_diagnosed_while_its_program_is_there(tmp_path, capfd):
    path, run = script(tmp_path, OVERFLOWS), str(tmp_path / "run")
    words = ["watch", "--gate", "--function", "<lambda>", "-o", run, "--", PYTHON, path]
    assert command(words) == 1
    said = capfd.readouterr()
    assert "nonfinite" in said.out
    assert "Diagnosis:\n✗ " in said.out
    assert command(["diagnose", run, "--rerun"]) == 1
    assert capfd.readouterr().out.startswith("✗ ")
    for verb in ("diagnose", "compare"):
        assert command([verb, "nowhere", "--rerun"]) == 2
        assert "no run here" in capfd.readouterr().err

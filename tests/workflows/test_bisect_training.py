"""Trainings held against each other: what drifts is told from what rounding makes, step for step."""

import json

import pytest

from precaudit.cli import run
from precaudit.diagnosis.training.conclusion import TrainingQuestion, conclude, times_grown
from precaudit.diagnosis.training.judged import Held, Side
from precaudit.diagnosis.training.members import record_side
from precaudit.diagnosis.training.values import chains_folder
from precaudit.errors import UserError
from precaudit.recording.runs.programs import open_program_run
from tests.helpers.training_programs import adam, momentum

STEPS = 8
ASKED = ("s", "programs", "A", "B")


def side(folder, like, drawn, **changed):
    folder.parent.mkdir(exist_ok=True)
    record_side(adam(folder.with_suffix(".py"), **changed), folder, STEPS, like, None, drawn)
    return Side(open_program_run(folder), chains_folder(folder))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return side(tmp_path_factory.mktemp("good") / "a", None, 4)


def held(good, folder, **changed):
    return hold(good, side(folder, good.opened.folder, 0, **changed), STEPS)


def hold(good, bad, steps):
    both = Held(good, bad)
    records = list(both.records())
    return conclude(TrainingQuestion(*ASKED, steps, 4), records, both.squares, tuple(both.lacking), ())


@pytest.mark.turn  # 9 s
@pytest.mark.parametrize(
    ("changed", "step", "name"),
    [
        ({"epsilon": 1e-5}, 1, "params#1"),
        ({"scale": 1.001}, 1, "mu"),
        ({"late": 5, "late_rate": 1.1e-2}, 5, "params"),
        pytest.param({"moments": "bfloat16"}, 1, "mu", marks=pytest.mark.slow),
        pytest.param({"corrects": False}, 1, "params", marks=pytest.mark.slow),
        pytest.param({"second": 0.99}, 1, "nu", marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_drift_from_its_own_line_on(good, tmp_path, changed, step, name):
    found = held(good, tmp_path / "b", **changed)
    assert (found.word, found.first.step, found.first.name) == ("drift", step, name)
    assert found.first.source.startswith("a.py:")
    formula = found.first.exact > 1e-4
    assert formula == ("moments" not in changed)
    assert found.first.formats == (None if formula else ("float32", "bfloat16"))
    assert {g.group for g in found.growth} >= {"loss", "gradient", "parameters", "moments"}


@pytest.mark.turn  # 14 s
def test_the_same_network_with_other_sums_is_rounding(good, tmp_path):
    found = held(good, tmp_path / "b", turned=True)
    assert found.word in ("rounding", "chaos")
    assert float(found.worst) < 2
    assert found.formula is None
    assert found.aside == ("hidden.grad~1",)  # of a matrix that B holds turned


BROKEN = """
import jax.numpy as jnp
from precaudit import Program

def step(params, w):
    return w - jnp.where(jnp.arange(2) < 2, jnp.nan, w)

program = Program(step, (), cases={"a": (jnp.ones(2),)}, steps=1, advance=lambda _, out: (out,), outputs=("w",))
"""


def test_a_training_that_is_nan_on_both_sides_is_not_judged(tmp_path):
    (tmp_path / "a.py").write_text(BROKEN)
    record_side(f"{tmp_path / 'a.py'}:program", tmp_path / "a", 2, None, None, 2)
    one = Side(open_program_run(tmp_path / "a"), chains_folder(tmp_path / "a"))
    found = hold(one, one, 2)
    assert (found.word, found.first, found.parted) == ("unknown", None, None)
    assert found.why == "outputs.w in step 1: A and B hold nothing but NaN"
    assert "parameters" in {g.group for g in found.growth}


KEYED = """
import jax
import jax.numpy as jnp
from precaudit import Program

def step(params, w, key):
    return w - jnp.sin(w), jax.random.fold_in(key, 1)

def of(*names):
    cases = {name: (jnp.ones(2), jax.random.key(0)) for name in names}
    return Program(step, (), cases, steps=1, advance=lambda _, out: out, outputs=("w", "key"))

both, one = of("a", "b"), of("a")
"""


def test_b_begins_with_a_s_cases_and_keys(tmp_path):
    (tmp_path / "k.py").write_text(KEYED)
    record_side(f"{tmp_path / 'k.py'}:both", tmp_path / "a", 1, None, None, 0)
    record_side(f"{tmp_path / 'k.py'}:both", tmp_path / "b", 1, tmp_path / "a", None, 0)
    with pytest.raises(UserError, match="cases are a, b in A, a in B"):
        record_side(f"{tmp_path / 'k.py'}:one", tmp_path / "c", 1, tmp_path / "a", None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_narrow_formats_that_round_otherwise_are_rounding(tmp_path, form):
    good = side(tmp_path / "a" / "a", None, 4, format=form)
    assert held(good, tmp_path / "b", format=form, turned=True).word in ("same", "rounding", "chaos")
    assert held(good, tmp_path / "c", format=form, corrects=False).word == "drift"


@pytest.mark.slow
def test_roundings_that_a_compiler_leaves_out_are_rounding(tmp_path, capsys):
    given = ["--good", "", "--bad", "XLA_FLAGS=--xla_allow_excess_precision=false", "--steps", "16"]
    reference = adam(tmp_path / "a.py", format="bfloat16")
    assert run(["bisect", reference, "--by", "flags", *given, "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("✓ Rounding: B is at most 0.")


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "word"), [(0.3, "rounding"), (2.0, "chaos")])
def test_rounding_that_grows_is_chaos_and_no_drift(tmp_path, rate, word):
    record_side(momentum(tmp_path / "a.py", rate=rate), tmp_path / "a", 20, None, None, 8)
    record_side(momentum(tmp_path / "b.py", rate=rate, turned=True), tmp_path / "b", 20, tmp_path / "a", None, 0)
    found = hold(*(Side(open_program_run(x), chains_folder(x)) for x in (tmp_path / "a", tmp_path / "b")), 20)
    assert (found.word, found.first, found.formula) == (word, None, None)
    mine, members = times_grown(found.growth, "parameters", 1)
    assert (mine > 1e4 and members > 1e4) == (word == "chaos")


@pytest.mark.slow
def test_a_wrong_momentum_is_drift_in_a_chaotic_training(tmp_path):
    record_side(momentum(tmp_path / "a.py", rate=2.0), tmp_path / "a", 12, None, None, 4)
    record_side(momentum(tmp_path / "b.py", rate=2.0, momentum=0.9001), tmp_path / "b", 12, tmp_path / "a", None, 0)
    found = hold(*(Side(open_program_run(x), chains_folder(x)) for x in (tmp_path / "a", tmp_path / "b")), 12)
    assert (found.word, found.first.step) == ("drift", 2)  # the first step has no momentum yet
    assert "a.py" in found.first.source


@pytest.mark.turn
def test_the_command_says_where_two_programs_part(tmp_path, capsys):
    good, bad = adam(tmp_path / "good.py"), adam(tmp_path / "bad.py", corrects=False)
    given = ["bisect", good, "--by", "programs", "--bad", bad, "--steps", "3", "-o", str(tmp_path / "out")]
    page = tmp_path / "page.md"
    assert run([*given, "--members", "4", "--markdown", str(page)]) == 1
    said = capsys.readouterr().out
    assert "✗ Drift: B departs from A in step 1 at params (good.py:" in said
    assert "a formula differs" in said
    assert "parameters A–B" in page.read_text()
    found = json.loads((tmp_path / "out" / "training.json").read_text())
    assert found["word"] == "drift"
    assert run(given) == 2
    assert "holds a training that was compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--by", "policy", "--steps", "2"], "a program's formats are its own"),
        (["--by", "flags", "--steps", "2", "--test", "bits"], "searches nothing; leave out --test"),
        (["--by", "flags", "--steps", "2", "--good", ""], "give both"),
        (["--by", "programs", "--steps", "2", "--jobs", "2"], "leave out --jobs"),
        (["--by", "programs", "--steps", "2", "--between", "1"], "takes no --between"),
        (["--by", "programs", "--steps", "2", "--bad", "nowhere"], "nowhere is no training program"),
        (["--by", "programs", "--bad", "x.py:y"], "give --steps N"),
    ],
)
def test_wrong_use_is_one_line_and_2(tmp_path, capsys, given, says):
    assert run(["bisect", "mine.py:program", "-o", str(tmp_path / "out"), *given]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1

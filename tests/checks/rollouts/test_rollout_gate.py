"""Baselines of rollouts, their budgets, and what gate says of a rollout's records."""

import json
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from precaudit.checks.rollouts.budgets import read_rollout_budgets
from precaudit.checks.rollouts.frozen import HELD, freeze_rollouts, read_rollout_baseline
from precaudit.checks.rollouts.gating import gate_rollouts
from precaudit.checks.rollouts.kinds import is_rollouts
from precaudit.checks.rollouts.limits import RolloutRecord
from precaudit.checks.rollouts.mismatch import METRICS, mismatch
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.questions import Question, changed_answers, read_answers
from precaudit.checks.rollouts.written import read_written
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.reports.gate import gate_report
from precaudit.reports.judgement import drift_lines
from precaudit.reports.junit import render_junit
from precaudit.reports.pages import as_markdown
from precaudit.schema.records.base import SCHEMA, value
from precaudit.schema.records.lines import encode

TOKENS = 400
SIDES = (("engine", "policy"), ("engine", "fp64"))
SIGNS = np.array([1.0, -1.0] * (TOKENS // 2)).reshape(4, 100)
ORIGIN = RolloutRun(
    schema=SCHEMA, model="m", weights="w" * 64, policies={"a": {"scores": "bfloat16"}}, refused={}, apart=(),
    sides=SIDES, trainer={}, prompts="p", questions="", asked={"seed": "0"}, device="cpu", versions={"jax": "1"},
)  # fmt: skip


def record(delta, policy="a", sides=SIDES[0], **other):
    """Return the record of an engine that is off by ``delta`` [4, 100] from log p = −2."""
    trainer = np.full(SIGNS.shape, -2.0)
    found = mismatch(trainer, trainer - np.broadcast_to(delta, SIGNS.shape), np.ones(SIGNS.shape, bool))
    return RolloutRecord(id=None, policy=policy, rollout=sides[0], trainer=sides[1], mismatch=found, **other)


def file(path, delta=0.01 * SIGNS, origin=ORIGIN, more=(), sides=SIDES):
    lines = [origin, *(record(delta, name, s) for name in origin.policies for s in sides), *more]
    path.write_bytes(b"".join(map(encode, lines)))
    return path


@pytest.fixture
def frozen(tmp_path):
    path = tmp_path / "baseline.jsonl"
    freeze_rollouts(file(tmp_path / "first.jsonl"), path)
    return path


def k3(delta):
    return (math.exp(delta) - 1 - delta + math.exp(-delta) - 1 + delta) / 2


# A baseline


def test_what_has_not_changed_passes_and_alone_is_not_judged(tmp_path, frozen):
    now = file(tmp_path / "now.jsonl")
    found = gate_rollouts(now, baseline=frozen)
    assert (found.exit_code, found.counts, found.notes) == (0, {"pass": 2 * len(HELD)}, ())
    alone = gate_rollouts(now)
    assert (alone.exit_code, alone.counts) == (3, {})


def test_a_baseline_holds_every_metric_that_is_defined(frozen):
    lines = [json.loads(x) for x in frozen.read_text().splitlines()]
    assert lines[0]["kind"] == "rollout baseline"
    assert lines[0]["of"]["model"] == "m"
    assert {(x["policy"], x["rollout"], x["trainer"], x["metric"]) for x in lines[1:]} == {
        ("a", *sides, metric) for sides in SIDES for metric in METRICS if metric != "rollout_actor_probs_pearson_corr"
    }  # fmt: skip
    k = next(x for x in lines if x.get("metric") == "k3_kl")
    assert (k["value"], k["tokens"]) == (pytest.approx(k3(0.01), rel=1e-9), TOKENS)


def test_twice_as_large_is_the_limit(tmp_path, frozen):
    """Of k3, a square, four times; of a share, what chance makes of none."""
    assert gate_rollouts(file(tmp_path / "b.jsonl", 0.0199 * SIGNS), baseline=frozen).exit_code == 0
    found = gate_rollouts(file(tmp_path / "c.jsonl", 0.0201 * SIGNS), baseline=frozen)
    assert found.exit_code == 1
    limits = {(v.point, v.metric): (value(v.value), value(v.limit)) for v in found.verdicts}
    assert {v.status for v in found.verdicts} == {"fail"}
    assert {m for _, m in limits} == {*HELD} - {"clip_fraction"}
    for a, b in SIDES:
        at = f"policy a, {a} / {b}"
        assert limits[at, "k3_kl"] == pytest.approx((k3(0.0201), 4 * k3(0.01)), rel=1e-9)
        assert limits[at, "abs_diff_p99"] == pytest.approx((0.0201, 0.02), rel=1e-9)
    assert "drift: policy a, engine / policy: k3_kl 4.04 × the baseline's" in gate_report(found, "r.jsonl").lines


def test_a_ratchet_may_be_the_usual_one(tmp_path, frozen):
    path = tmp_path / "budgets.toml"
    path.write_text('[[rollout]]\nmetric = "k3_kl"\nratchet = true\nwhy = "w"\n')
    found = gate_rollouts(file(tmp_path / "c.jsonl", 0.0201 * SIGNS), path, frozen)
    assert [value(v.limit) for v in found.verdicts if v.why] == [pytest.approx(4 * k3(0.01), rel=1e-9)] * 2


def test_a_smaller_mismatch_passes(tmp_path, frozen):
    assert gate_rollouts(file(tmp_path / "b.jsonl", 0.001 * SIGNS), baseline=frozen).exit_code == 0


@pytest.mark.parametrize(("size", "code"), [(2.0**-19, 0), (2.0**-17, 1)])
def test_what_float32_rounds_breaks_no_baseline_of_zero(tmp_path, size, code):
    freeze_rollouts(file(tmp_path / "a.jsonl", 0.0), tmp_path / "b.jsonl")
    assert gate_rollouts(file(tmp_path / "c.jsonl", size * SIGNS), baseline=tmp_path / "b.jsonl").exit_code == code


@pytest.mark.parametrize(("clipped", "failing"), [(3, set()), (4, {"clip_fraction"})])
def test_a_share_of_tokens_may_be_what_chance_makes_of_it(tmp_path, clipped, failing):
    """Wilson's upper end for none of 400: z² / (400 + z²) = 0.0095, between 3 and 4 tokens."""
    base = np.full(SIGNS.shape, 0.15)
    freeze_rollouts(file(tmp_path / "a.jsonl", base), tmp_path / "b.jsonl")
    now = base.copy()
    now[0, :clipped] = 0.25
    found = gate_rollouts(file(tmp_path / "c.jsonl", now), baseline=tmp_path / "b.jsonl")
    assert {v.metric for v in found.verdicts} == failing


def test_a_new_baseline_needs_a_reason_and_keeps_the_chain(tmp_path, frozen):
    second = file(tmp_path / "second.jsonl", 0.013 * SIGNS)
    with pytest.raises(UserError, match="--accept --why"):
        freeze_rollouts(second, frozen)
    with pytest.raises(UserError, match="needs --why"):
        freeze_rollouts(second, frozen, accept=True)
    first = read_rollout_baseline(frozen).record.sha256
    freeze_rollouts(second, frozen, accept=True, why="another kernel")
    record_ = read_rollout_baseline(frozen).record
    assert [(x.sha256, x.why) for x in record_.chain] == [(first, "another kernel")]
    found = gate_rollouts(file(tmp_path / "c.jsonl", 0.015 * SIGNS), baseline=frozen)
    assert found.exit_code == 0
    told = drift_lines(found)[0]
    assert "k3_kl 1.33 × the baseline's, 2.25 × the first baseline's" in told  # (15 / 13)², (15 / 10)²


def test_an_altered_baseline_and_one_of_a_run_are_refused(tmp_path, frozen):
    assert frozen.read_bytes().count(b'"metric":"k3_kl","value":0.00005') == 2
    frozen.write_bytes(
        frozen.read_bytes().replace(b'"metric":"k3_kl","value":0.00005', b'"metric":"k3_kl","value":0.00009')
    )
    with pytest.raises(UserError, match="was altered"):
        read_rollout_baseline(frozen)
    (tmp_path / "r.jsonl").write_text('{"schema":1,"model":"m"}\n')
    with pytest.raises(UserError, match="not a baseline of rollouts"):
        read_rollout_baseline(tmp_path / "r.jsonl")
    with pytest.raises(UserError, match="no baseline at"):
        read_rollout_baseline(tmp_path / "nowhere.jsonl")


# What is no pass


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weights": "v" * 64}, "weights"),
        ({"prompts": "q"}, "the prompts are others"),
        ({"asked": {"seed": "1"}}, "seed 0, now 1"),
        ({"asked": {"seed": "0", "top_k": "5"}}, "top_k None, now 5"),
        ({"policies": {"a": {"scores": "float32"}}}, "policy a: scores bfloat16, now float32"),
        ({"trainer": {"name": "t"}}, "trainer: name None, now t"),
        ({"device": "TPU v5e"}, "--across-devices"),
        ({"schema": SCHEMA + 1}, "schema"),
    ],
)
def test_a_baseline_of_another_request_is_stale(tmp_path, frozen, change, told):
    now = file(tmp_path / "now.jsonl", origin=msgspec.structs.replace(ORIGIN, **change))
    found = gate_rollouts(now, baseline=frozen)
    assert found.exit_code == 3
    assert [v.status for v in found.verdicts] == ["stale"]
    assert told in found.verdicts[0].text
    assert found.counts == {"stale": 1}  # nothing is held to it
    if "device" in change:
        assert gate_rollouts(now, baseline=frozen, across_devices=True).exit_code == 0


def test_other_versions_are_told_and_hold(tmp_path, frozen):
    now = file(tmp_path / "now.jsonl", origin=msgspec.structs.replace(ORIGIN, versions={"jax": "2"}))
    found = gate_rollouts(now, baseline=frozen)
    assert found.exit_code == 0
    assert "jax 1 → 2" in found.notes[0]


def test_a_pair_or_policy_that_is_not_there_is_missing(tmp_path, frozen):
    lacking = gate_rollouts(file(tmp_path / "a.jsonl", sides=SIDES[:1]), baseline=frozen)
    assert [(v.status, v.point) for v in lacking.verdicts] == [("missing", "policy a, engine / fp64")]
    assert lacking.exit_code == 3
    alone = gate_rollouts(file(tmp_path / "b.jsonl", sides=SIDES[:1]))
    assert alone.exit_code == 3
    other = msgspec.structs.replace(ORIGIN, policies={"b": {}})
    renamed = gate_rollouts(file(tmp_path / "c.jsonl", origin=other), baseline=frozen)
    assert [v.status for v in renamed.verdicts] == ["missing"] * 2
    assert "the baseline knows nothing of policy b" in renamed.notes
    fewer = msgspec.structs.replace(ORIGIN, sides=SIDES[:1])
    assert gate_rollouts(file(tmp_path / "d.jsonl", origin=fewer, sides=SIDES[:1]), baseline=frozen).exit_code == 3


def test_nan_and_what_is_not_defined_never_pass(tmp_path, frozen):
    one = file(tmp_path / "a.jsonl", sides=())
    bad = np.array(0.01 * SIGNS)
    bad[1, 3] = np.nan
    records = [record(bad), record(0.01 * SIGNS, sides=SIDES[1])]
    one.write_bytes(b"".join(map(encode, [ORIGIN, *records])))
    found = gate_rollouts(one, baseline=frozen)
    assert found.exit_code == 1
    assert [(v.status, v.text) for v in found.verdicts] == [("nonfinite", "1 rollout: NaN: no log-probability")]
    with pytest.raises(UserError, match="no log-probability, or no token: no baseline"):
        freeze_rollouts(one, tmp_path / "n.jsonl")
    none = mismatch(np.zeros((1, 0)), np.zeros((1, 0)), np.zeros((1, 0), bool))
    records[0] = msgspec.structs.replace(records[0], mismatch=none)
    one.write_bytes(b"".join(map(encode, [ORIGIN, *records])))
    found = gate_rollouts(one, baseline=frozen)
    assert (found.exit_code, {v.status for v in found.verdicts}) == (3, {"unknown"})
    assert {v.metric for v in found.verdicts} == {*HELD}


def test_inf_is_beyond_any_limit(tmp_path):
    budgets = tmp_path / "b.toml"
    budgets.write_text('[[rollout]]\nmetric = "chi2_seq"\nlimit = 1e300\nwhy = "w"\n')
    now = file(tmp_path / "a.jsonl", np.full(SIGNS.shape, 1.9))
    with pytest.raises(UserError, match="is not finite: no baseline"):
        freeze_rollouts(file(tmp_path / "c.jsonl", np.full(SIGNS.shape, 1e3)), tmp_path / "n.jsonl")
    assert gate_rollouts(now, budgets).exit_code == 0  # exp(2 · 190) = 1e165
    assert gate_rollouts(file(tmp_path / "d.jsonl", np.full(SIGNS.shape, 4.0)), budgets).exit_code == 1


def test_policies_that_cannot_run_or_draw_otherwise_and_causes(tmp_path):
    def codes(**change):
        made = msgspec.structs.replace(ORIGIN, **change)
        found = gate_rollouts(file(tmp_path / "a.jsonl", origin=made))
        with pytest.raises(UserError, match="no baseline"):
            freeze_rollouts(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        return found.exit_code, found.verdicts[0].status

    assert codes(refused={"c": "no such unit"}) == (3, "unknown")
    assert codes(apart=("a",)) == (1, "fail")
    path = tmp_path / "c.jsonl"
    for verdict, code in (("rounding", 0), ("state", 1), ("unknown", 3)):
        file(path)
        cause = {"kind": "cause", "id": "x", "policy": "a", "index": 3, "verdict": verdict}
        path.write_text(path.read_text() + json.dumps(cause) + "\n" + '{"kind":"timing"}\n')
        assert gate_rollouts(path).exit_code == code


# Budgets


def budget(tmp_path, text, now):
    path = tmp_path / "budgets.toml"
    path.write_text(text)
    return read_rollout_budgets(path, read_written(now))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[rollout]]\nmetric = "k3"\nlimit = 1\nwhy = "w"', ":1: unknown metric 'k3'"),
        ('\n[[rollout]]\nmetric = "kl"\nlimit = 1\nwhy = " "', ":2: why is empty"),
        ('[[rollout]]\nmetric = "kl"\nwhy = "w"', "give one of limit, ratchet"),
        ('[[rollout]]\nmetric = "k3_kl"\nlimit = 1\nratchet = 2\nwhy = "w"', "give one of limit, ratchet"),
        ('[[rollout]]\nmetric = "kl"\nratchet = 2\nwhy = "w"', "a ratchet on kl, which is no size"),
        ('[[rollout]]\nmetric = "k3_kl"\nratchet = 0.5\nwhy = "w"', "a factor of 1 or more"),
        ('[[rollout]]\nmetric = "kl"\nlimit = nan\nwhy = "w"', "a finite number"),
        ('[[rollout]]\nmetric = "kl"\nlimit = 1\nwhy = "w"\npolicies = "b*"', "policies 'b*' names none of a"),
        ('[[rollout]]\nmetric = "kl"\nlimit = 1\nwhy = "w"\npolicies = []', "policies is empty"),
        (
            '[[rollout]]\nmetric = "kl"\nlimit = 1\nwhy = "w"\nagainst = "trainer"',
            "engine / trainer matches nothing of",
        ),
        ('[[rollout]]\nmetric = "kl"\nlimit = 1\nwhy = "w"\nside = 1', "unknown key 'side'"),
        ('[[rollout]]\nmetric = "answers_difference"\nlimit = -5\nwhy = "w"', "a share from -1 to 1"),
        ('[[rollout]]\nmetric = "answers_difference"\nlimit = 0\nwhy = "w"', "no questions were asked"),
        ('[rollout]\nmetric = "kl"', "write every entry as [[rollout]]"),
        ('[[budget]]\npoints = "q"', ":1: [[budget]] budgets alone; [[rollout]] are wanted here"),
        ("[[rolout]]", "unknown key 'rolout'"),
    ],
)
def test_a_wrong_budget_is_told_with_its_line(tmp_path, text, told):
    now = file(tmp_path / "now.jsonl")
    with pytest.raises(UserError) as error:
        budget(tmp_path, text, now)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_budgets_stand_in_for_the_default_margin(tmp_path, frozen):
    now = file(tmp_path / "now.jsonl", 0.014 * SIGNS)
    path = tmp_path / "budgets.toml"
    path.write_text('[[rollout]]\nmetric = "k3_kl"\nagainst = "fp64"\nratchet = 1.5\nwhy = "tight"\n')
    found = gate_rollouts(now, path, frozen)
    assert [(v.status, v.point, v.why) for v in found.verdicts] == [("fail", "policy a, engine / fp64", "tight")]
    assert value(found.verdicts[0].limit) == pytest.approx(1.5 * k3(0.01), rel=1e-9)
    path.write_text('[[rollout]]\nmetric = "k3_kl"\nratchet = 1.5\nwhy = "tight"\n')
    assert gate_rollouts(now, path).counts == {"missing": 2}  # no baseline to ratchet from
    stale = msgspec.structs.replace(ORIGIN, prompts="q")
    assert gate_rollouts(file(now, origin=stale), path, frozen).counts == {"stale": 3}
    path.write_text('[[rollout]]\nmetric = "k3_kl"\nlimit = 1.0\nwhy = "loose"\n')
    assert gate_rollouts(file(now, 0.1 * SIGNS), path, None).counts == {"pass": 2}


@pytest.mark.parametrize(("metric", "limit", "code"), [
    ("rollout_is_eff_sample_size", 0.999, 0), ("rollout_is_eff_sample_size", 0.99999, 1), ("kl", 1e-9, 0),
    ("rollout_actor_probs_pearson_corr", 0.5, 3),
])  # fmt: skip
def test_of_some_metrics_smaller_is_worse(tmp_path, metric, limit, code):
    """ρ = e^±0.01: (E w)² / E w² = cosh(0.01)² / cosh(0.02) = 0.9999; log p is one number, so no correlation."""
    path = tmp_path / "budgets.toml"
    path.write_text(f'[[rollout]]\nmetric = "{metric}"\nlimit = {limit}\nwhy = "w"\n')
    assert math.cosh(0.01) ** 2 / math.cosh(0.02) == pytest.approx(0.9999, abs=1e-6)
    assert gate_rollouts(file(tmp_path / "a.jsonl"), path).exit_code == code


# Answers


def asked(path, right, other=None, n=400):
    questions = [Question(prompt="x", answer="1", id=str(i)) for i in range(n)]
    texts = [["1" if i in right else "2"] for i in range(n)]
    more = [read_answers("a", questions, texts)]
    if other is not None:
        texts_ = [["1" if i in other else "2"] for i in range(n)]
        more += [read_answers("b", questions, texts_), changed_answers("b", "a", questions, texts_, texts)]
    return file(path, origin=msgspec.structs.replace(ORIGIN, questions=f"q{n}"), more=more)


@pytest.mark.parametrize(("lost", "code", "status"), [(0, 0, None), (25, 3, "unknown"), (60, 1, "fail")])
def test_answers_are_held_to_the_baseline_s_pair_by_pair(tmp_path, lost, code, status):
    """Of 400, 200 right: 60 lost are −15 points (−18.8 to −11.8 by Wald's σ = √60/400), 25 are −6.2 (−8.6 to −3.9)."""
    base = tmp_path / "b.jsonl"
    freeze_rollouts(asked(tmp_path / "a.jsonl", range(200)), base)
    found = gate_rollouts(asked(tmp_path / "c.jsonl", range(lost, 200)), baseline=base)
    assert (found.exit_code, [v.status for v in found.verdicts]) == (code, [] if status is None else [status])
    if status is not None:
        assert found.verdicts[0].point == "answers of a against the baseline's"
        assert f"{lost} lost, 0 gained" in found.verdicts[0].text


def test_other_questions_or_none_are_missing(tmp_path):
    base = tmp_path / "b.jsonl"
    freeze_rollouts(asked(tmp_path / "a.jsonl", range(200)), base)
    fewer = gate_rollouts(asked(tmp_path / "c.jsonl", range(200), n=399), baseline=base)
    assert fewer.counts["missing"] == 1
    none = gate_rollouts(file(tmp_path / "d.jsonl"), baseline=base)
    assert none.counts["missing"] == 1
    assert none.exit_code == 3


@pytest.mark.parametrize(("limit", "code"), [(-0.2, 0), (-0.15, 3), (-0.05, 1)])
def test_a_budget_holds_one_policy_to_the_first(tmp_path, limit, code):
    now = asked(tmp_path / "a.jsonl", range(200), range(60, 200))
    path = tmp_path / "budgets.toml"
    path.write_text(f'[[rollout]]\nmetric = "answers_difference"\nlimit = {limit}\nwhy = "w"\n')
    with pytest.raises(UserError, match="names none of a"):
        budget(tmp_path, path.read_text() + 'policies = "b"', now)
    found = json.loads(now.read_text().splitlines()[0])
    both = msgspec.convert(found | {"policies": {"a": {}, "b": {}}}, RolloutRun)
    now.write_bytes(encode(both) + b"\n".join(now.read_bytes().split(b"\n")[1:]))
    more = b"".join(encode(record(0.01 * SIGNS, "b", s)) for s in SIDES)
    now.write_bytes(now.read_bytes() + more)
    path.write_text(f'[[rollout]]\nmetric = "answers_difference"\nlimit = {limit}\nwhy = "w"\n')
    assert gate_rollouts(now, path).exit_code == code


# Files


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", ":2: "),
        (b'{"kind":"mismatch"}', ":2: "),
        (b'{"kind":"forward"}', ":2: kind 'forward' is none of a rollout's"),
        (encode(ORIGIN).strip(), ":2: a second first line"),
        (encode(record(0.0)).strip() + b"\n" + encode(record(0.0)).strip(), ":3: a second record of"),
        (b"\xff\xfe", ":2: "),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path, line, told):
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode(ORIGIN) + line)
    with pytest.raises(UserError) as error:
        gate_rollouts(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_records_without_a_first_line_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode(record(0.0)))
    assert is_rollouts(path)
    with pytest.raises(UserError, match="no first line of kind rollout"):
        gate_rollouts(path)
    path.write_bytes(b'{"kind":"local"}\n')
    assert not is_rollouts(path)
    assert not is_rollouts(tmp_path)


def test_gating_rollouts_imports_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import precaudit.checks.rollouts.gating, precaudit.checks.rollouts.frozen"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_junit_and_markdown_tell_the_pair_and_the_metric(tmp_path, frozen):
    found = gate_rollouts(file(tmp_path / "c.jsonl", 0.03 * SIGNS), baseline=frozen)
    assert 'name="policy a, engine / fp64"' in render_junit(found)
    assert "k3_kl 0.00045, limit 0.0002" in render_junit(found)
    assert "| fail | policy a, engine / policy |" in as_markdown(gate_report(found, "r.jsonl"))


@pytest.mark.turn  # 5 s
def test_from_the_command_line(tmp_path, capsys):
    """Tokens drawn here, written down by an engine that is off by 1 % of log p, then by 3 %: k3 grows nine times."""
    saved, source, first, second, base = (tmp_path / f"{name}.jsonl" for name in ("s", "r", "first", "second", "b"))
    draw = ["--new-tokens", "8", "--rounds", "1", "--policy", "fp32", "--no-fp64", "--end-tokens", "none"]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "tokens": [100, 101, 102]}\n{"id": "b", "tokens": [84, 104]}')
    assert run(["rollout", "tiny", "--prompts", str(prompts), *draw, "--save", str(saved)]) == 0
    drawn = [json.loads(line) for line in saved.read_text().splitlines()]

    def rollout(out, off):
        off = [{"logprobs": [x * (1 + off * (-1) ** i) for i, x in enumerate(r["logprobs"])]} for r in drawn]
        source.write_text("\n".join(json.dumps(r | x) for r, x in zip(drawn, off, strict=True)))
        assert run(["rollout", "tiny", "--from", str(source), "--policy", "fp32", "--no-fp64", "-o", str(out)]) == 0

    rollout(first, 0.01)
    assert run(["baseline", str(first), "-o", str(base)]) == 0
    assert "baseline of rollouts of tiny (cpu), SHA-256" in capsys.readouterr().out
    assert run(["gate", str(first), "--baseline", str(base)]) == 0
    assert "✓ all 5 values that were judged keep their limits." in capsys.readouterr().out
    rollout(second, 0.03)
    assert run(["gate", str(second), "--baseline", str(base), "--junit", str(tmp_path / "g.xml")]) == 1
    out = capsys.readouterr().out
    assert "✗ policy fp32, engine / policy: k3_kl " in out
    assert "k3_kl 9." in out[out.index("drift: ") :] or "k3_kl 8." in out[out.index("drift: ") :]
    assert run(["baseline", str(second), "-o", str(base)]) == 2
    assert "--accept --why" in capsys.readouterr().err
    assert run(["gate", str(tmp_path / "g.xml")]) == 2
    assert run(["gate", str(base), "--baseline", str(base)]) == 2

"""Rollouts drawn here: parity, where policies part, answers, and what the command says."""

import json
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from click.testing import CliRunner

from precaudit.checks.rollouts.answers import pair_answers
from precaudit.checks.rollouts.budgets import engine_budget, outcomes
from precaudit.checks.rollouts.divergence import first_divergences, judge_divergences
from precaudit.checks.rollouts.drawn import draw_all, open_subjects
from precaudit.checks.rollouts.parity import Checks, score_parity
from precaudit.checks.rollouts.program_loops import _whole, measure_program
from precaudit.checks.rollouts.questions import (
    Changed,
    HeldAnswers,
    Question,
    last_number,
    read_answers,
    read_questions,
    right,
)
from precaudit.checks.rollouts.reading import Rollout, format_rollouts, read_rollouts
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.checks.rollouts.scoring import by_fp64
from precaudit.checks.rollouts.timing import How, tasks
from precaudit.cli import cli
from precaudit.errors import UserError
from precaudit.models.numpy_decoder.model import Model
from precaudit.recording.programs.loading import load_program as load_program
from precaudit.recording.tracing.subject import load
from precaudit.reports.drawn import drawn_verdict
from precaudit.schema.records.base import value

PROMPTS = [("a", (100, 101, 102, 32)), ("b", (84, 104, 101))]
HOW = How(batch=4, new_tokens=24, sampling=Sampling(1.0, seed=1), rounds=1)


@pytest.fixture(scope="module")
def subjects():
    return [load("tiny", name, device="cpu") for name in ("bf16", "fp32")]


@pytest.fixture(scope="module")
def found(subjects):
    return draw_all(subjects, tasks(PROMPTS, 2), HOW, checks=Checks(trainer=subjects[1]))


@pytest.mark.turn  # 18 s
def test_every_policy_is_held_to_its_prefill_the_trainer_and_fp64(found):
    for p in found.parities:
        sides = [(r.rollout, r.trainer) for r in p.whole]
        assert sides == [
            ("engine", "policy"), ("engine", "trainer"), ("engine", "fp64"), ("policy", "fp64"), ("trainer", "fp64"),
        ]  # fmt: skip
        assert {r.policy for r in (*p.whole, *p.each)} == {p.policy}
    narrow, wide = ({(r.rollout, r.trainer): r.mismatch for r in p.whole} for p in found.parities)
    assert value(wide["engine", "fp64"].abs_diff_max) < 1e-4 < value(narrow["engine", "fp64"].abs_diff_max)
    assert value(narrow["engine", "trainer"].abs_diff_max) == pytest.approx(
        value(narrow["engine", "fp64"].abs_diff_max), abs=1e-4
    )


@pytest.mark.turn  # 13 s
def test_what_is_saved_is_read_again_to_the_last_bit(found, subjects, tmp_path):
    path = tmp_path / "saved.jsonl"
    path.write_text(format_rollouts(found.rollouts, 1.0))
    again = read_rollouts(path)
    assert [r for _, r in found.rollouts] == again
    assert [r.id for r in again[:2]] == ["bf16/a/0", "bf16/a/1"]
    mine = [r for r in again if r.id.startswith("bf16/")]
    one = score_parity(subjects[0], mine, Checks(exact=False)).whole[0].mismatch
    assert one == found.parities[0].whole[0].mismatch


def test_where_policies_part_fp64_says_how_near_the_tokens_were(subjects):
    """The gap is that of FP64 logits, made once more by the scoring of both tokens."""
    sequence = Rollout("a", PROMPTS[0][1], (10, 11, 12), ())
    other = Rollout("a", PROMPTS[0][1], (10, 11, 40, 7), ())
    parts = first_divergences("p", "q", [sequence], [other])
    assert [(d.id, d.index, d.tokens) for d in parts] == [("a", 2, (12, 40))]
    made = judge_divergences(parts, [(0, sequence)], (subjects[0], subjects[1]), Sampling(0))[0]
    model = Model(subjects[0].config, subjects[0].checkpoint.tensors.read_tensor)
    both = [Rollout(str(t), sequence.prompt, (10, 11, t), ()) for t in made.tokens]
    shares = [x[2] for x in by_fp64(model, both, 1.0, lambda *_: None)]
    assert value(made.gap) == pytest.approx(shares[0] - shares[1], abs=1e-12)
    assert 1e-4 < value(made.sigma) < 0.1
    assert made.near == (abs(value(made.gap)) <= 4 * value(made.sigma))
    assert judge_divergences(parts, [(0, sequence)], (subjects[0], subjects[1]), Sampling(1, top_k=2))[0].near is None
    assert first_divergences("p", "q", [sequence], [sequence]) == []
    assert judge_divergences([], [], (subjects[0], subjects[1]), Sampling(0)) == []


def test_what_policies_draw_otherwise_is_near_by_the_noise_both_drew_with(subjects):
    """FP64 logits plus the noise: where bf16 draws another token than float32, FP64 draws float32's."""
    how = How(batch=4, new_tokens=40, sampling=Sampling(1.5, seed=4), rounds=1)
    found = draw_all(subjects, tasks(PROMPTS, 4), how)
    assert len(found.divergences) > 1
    assert all(value(d.gap) > 0 for d in found.divergences)
    assert any(d.near for d in found.divergences)


def test_a_policy_that_cannot_run_is_told_and_the_others_run(subjects):
    def opens(policy):
        if policy.name == "fp32":
            raise UserError("not here")
        return subjects[0]

    some, refused = open_subjects(opens, [s.policy for s in subjects])
    assert [s.policy.name for s in some] == ["bf16"]
    assert [tuple(r) for r in refused] == [("fp32", "not here")]
    found = draw_all(some, tasks(PROMPTS[:1], 4), HOW, Checks(exact=False), refused)
    assert found.exit_code == 3
    with pytest.raises(UserError, match="not here"):
        open_subjects(opens, [subjects[1].policy])
    with pytest.raises(UserError, match="names bf16 twice"):
        open_subjects(opens, [subjects[0].policy] * 2)


# Questions


@pytest.mark.parametrize(
    ("text", "found"),
    [("it is 1,234.50.", "1234.50"), ("3 + 4 = −7", "-7"), ("none", None), ("12 apples", "12"), ("a-5", "-5")],
)
def test_the_last_number_of_a_text(text, found):
    assert last_number(text) == (None if found is None else Decimal(found))


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        (Question("x", "so 5 + 3 = 8\n#### 8"), "The answer is 8.0", True),
        (Question("x", "8"), "8 or 9", False),
        (Question("x", "8"), "eight", None),
        (Question("x", "Paris"), " Paris\n", True),
        (Question("x", "Paris"), "Paris.", False),
        (Question("x", r"\bParis\b", match="regex"), "It is Paris.", True),
        (Question("x", r"\bParis\b", match="regex"), "Parisian", False),
    ],
)
def test_a_text_is_held_to_the_answer(question, text, expected):
    assert right(question, text) is expected


def test_answers_are_counted_with_those_that_hold_no_number():
    questions = [Question("x", "1", id="a", group="g"), Question("x", "2", id="b", group="g"), Question("x", "3")]
    found = read_answers("p", questions, [["1", "2"], ["x", "y"], ["3", "3"]])
    assert (found.unparsed, found.n, found.groups) == (2, 2, {"g": (1, 4), "": (2, 2)})
    assert [(r.k, r.value) for r in found.rates] == [(1, pytest.approx(0.5)), (2, pytest.approx(2 / 3))]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no question in it"),
        ("{", ":1: "),
        ('{"prompt": "x"}', "missing required field `answer`"),
        ('{"prompt": "x", "answer": " "}', "the answer is empty"),
        ('{"prompt": " ", "answer": "1"}', "the prompt is empty"),
        ('{"prompt": "x", "answer": "y", "match": "number"}', "'y' is no number"),
        ('{"prompt": "x", "answer": "(", "match": "regex"}', "no regular expression"),
        ('{"id": "a", "prompt": "x", "answer": "1"}\n{"id": "a", "prompt": "x", "answer": "1"}', ":2: question id 'a'"),
    ],
)
def test_broken_questions_are_said_in_a_line(tmp_path, line, told):
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    with pytest.raises(UserError) as error:
        read_questions(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


# The command


def run(*args):
    done = CliRunner().invoke(cli, ["rollout", *map(str, args)], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": name, "tokens": ids}) + "\n" for name, ids in PROMPTS))
    return path


@pytest.mark.turn  # 6 s
def test_the_command_draws_times_and_writes(prompts, tmp_path):
    out, saved = tmp_path / "o.jsonl", tmp_path / "s.jsonl"
    options = ("--prompts", prompts, "--n", 2, "--batch", 4, "--new-tokens", 24, "--seed", 1, "--rounds", 2)
    done = run("tiny", *options, "--loops", "python,while", "--policy", "bf16,fp32", "-o", out, "--save", saved)
    assert done.return_value == 0
    assert done.output.startswith("? policy bf16: measured, not judged: engine against fp64: kl ")
    assert "sampling 4 sequences in batches of 4 on cpu, 96 tokens: median of 2 rounds" in done.output
    assert "fp32 samples" in done.output
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert [kinds.count(k) for k in ("timing", "mismatch")] == [4, 6 + 24]
    assert len(read_rollouts(saved)) == 8
    again = run("tiny", "--from", saved, "--no-fp64", "--fail-above", "abs_diff_max=1e-9")
    assert again.return_value == 1


@pytest.mark.turn  # 9 s
def test_the_command_asks_questions_and_where_none_parses_cannot_judge(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "def f(x):", "answer": "(?s).", "match": "regex", "plain": true}\n')
    done = run("tiny", "--answers", path, "--no-fp64", "--policy", "bf16,fp32", "--new-tokens", 24)
    assert done.return_value == 0
    assert "undecided: the difference is 0.0 points, 95 % " in done.output
    assert "100 % (20.7 to 100)" in done.output  # Wilson, 1 of 1: 1 / (1 + 1.96²) = 0.207
    path.write_text('{"prompt": "a", "answer": "3", "plain": true}\n')
    done = run("tiny", "--answers", path, "--no-fp64", "--new-tokens", 1)
    assert done.return_value == 3
    assert "1 answer without a number, counted as wrong" in done.output


@pytest.mark.parametrize(
    ("limit", "code", "mark", "words"),
    [(-1, 0, "✓", "−100 points: pass"), (-0.05, 3, "?", "−5.0 points: unknown"), (1, 1, "✗", "100 points: fail")],
)
def test_the_command_holds_answers_by_their_interval(tmp_path, limit, code, mark, words):
    """One question that both answer: the interval lies in (-1, 1), and has 0 inside."""
    path, page = tmp_path / "q.jsonl", tmp_path / "p.md"
    path.write_text('{"prompt": "def f(x):", "answer": "(?s).", "match": "regex", "plain": true}\n')
    options = ("--answers", path, "--no-fp64", "--policy", "bf16,fp32", "--new-tokens", 24, "--markdown", page)
    done = run("tiny", *options, "--fail-below", f"answers_difference={limit}")
    assert done.return_value == code
    assert done.output.startswith(f"{mark} answers of fp32 against bf16 ")
    assert f"answers of fp32 against bf16, limit of {words}" in done.output
    assert "95 % " in done.output.splitlines()[0]
    assert f"\n{mark} answers of fp32" in page.read_text()


def test_what_breaks_log_probabilities_is_told_before_answers(found):
    held = [HeldAnswers(Changed(policy="fp32", against="bf16", paired=pair_answers([True], [True])), 1.0, s)
            for s in ("pass", "unknown", "fail")]  # fmt: skip
    assert [replace(found, held=(h,)).exit_code for h in held] == [0, 3, 1]
    assert replace(found, held=tuple(held)).exit_code == 1
    kl = engine_budget("kl", -1.0)
    bad = [replace(p, held=tuple(h for r in p.whole for h in outcomes(r, [kl]))) for p in found.parities]
    spoilt = replace(found, parities=tuple(bad), held=tuple(held))
    assert drawn_verdict(spoilt).sentence.startswith("policy bf16: engine against policy: kl is")
    good = [
        replace(p, held=tuple(h for r in p.whole for h in outcomes(r, [engine_budget("kl", 9.0)])))
        for p in found.parities
    ]
    marks = [drawn_verdict(replace(found, parities=tuple(good), held=(h,))).mark for h in held]
    assert marks == ["✓", "?", "✗"]


# A program of the user's

PROGRAM = """
import jax.numpy as jnp
from precaudit import Program

def call(params, x, i):
    return jnp.tanh(x @ params), i

def advance(inputs, outputs):
    return outputs[0], inputs[1] + 1

def told(inputs, outputs):
    if float(outputs[0].sum()) > 0:
        return outputs[0], inputs[1] + 1
    return inputs

w = jnp.linspace(-1, 1, 64, dtype=jnp.float32).reshape(8, 8)
x = jnp.linspace(0, 1, 16, dtype=jnp.float32).reshape(2, 8)
program = Program(call, w, {"a": (x, jnp.int32(0)), "b": (x + 1, jnp.int32(0))}, 9, advance, ("y", "i"))
branching = Program(call, w, {"a": (x, jnp.int32(0))}, 9, told, ("y", "i"))
single = Program(call, w, {"a": (x, jnp.int32(0))}, outputs=("y", "i"))
"""


def test_a_program_s_loops_make_the_same_calls(tmp_path):
    """The last call is NumPy's tenth."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    program = load_program(f"{tmp_path}/mine.py:program")
    found = measure_program(program, "mine", ["python", "while"], 2)
    assert [(t.loop, t.calls, t.same, t.why) for t in found] == [("python", 20, True, ""), ("while", 20, True, "")]
    assert found[0].ratio.low == found[0].ratio.high == 1 < found[0].rounds
    x, w = (np.asarray(y, np.float64) for y in (program.cases["a"][0], program.params))
    for _ in range(10):
        x = np.tanh(x @ w)
    y, count = _whole(program, program.params, *program.cases["a"])
    np.testing.assert_allclose(y, x, atol=1e-5)
    assert int(count) == 9


def test_a_loop_that_a_program_does_not_take_is_told(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    done = run(f"{tmp_path}/mine.py:branching", "--loops", "python,while", "--rounds", 1)
    assert done.return_value == 3
    assert done.output.startswith("? the while loop cannot run: ")
    with pytest.raises(UserError, match="one call has no loop"):
        run(f"{tmp_path}/mine.py:single")
    with pytest.raises(UserError, match="leave out --seed"):
        run(f"{tmp_path}/mine.py:program", "--seed", 3)

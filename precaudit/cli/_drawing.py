"""The part of ``precaudit rollout`` that draws tokens."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from precaudit.cli._options import Delivery, deliver, policy_names, progress_bar, say, write

if TYPE_CHECKING:
    from precaudit.checks.rollouts.budgets import RolloutBudget
    from precaudit.checks.rollouts.generation import Loop
    from precaudit.checks.rollouts.parity import Checks
    from precaudit.checks.rollouts.questions import Question
    from precaudit.recording.tracing.subject import Subject


def draw_rollouts(model: str, given: dict[str, Any], limits: "tuple[RolloutBudget, ...]", to: Delivery) -> int:
    """Draw, time and check rollouts, and print what was found."""
    from precaudit.checks.rollouts.sampling import Sampling
    from precaudit.cli._explaining import exit_code_with_causes, explain_rollouts
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings
    from precaudit.schema.selection import Selection

    changes = parse_settings(given["settings"])
    names = policy_names(given["policy"])
    policies = [apply_settings(load_policy(name), changes) for name in names]
    questions = _questions(given)
    of_answers, limits = _split_limits(limits, bool(questions) and len(policies) > 1)
    given = _with_defaults(given, bool(questions))
    sampling = Sampling(given["temperature"], given["top_k"], given["top_p"], given["seed"])
    loops = loops_named(given["loops"])
    with progress_bar("loading JAX") as advance:
        from precaudit.checks.rollouts.drawn import draw_all, grade, open_subjects
        from precaudit.checks.rollouts.questions import question_prompts
        from precaudit.checks.rollouts.recording import of_drawn
        from precaudit.checks.rollouts.timing import How, tasks
        from precaudit.recording.tracing.subject import load
        from precaudit.recording.tracing.trace import encode_prompts

        subjects, refused = open_subjects(
            lambda p: load(model, p, device=given["device"], allow=given["allow_field"], mesh=given["mesh"]), policies
        )
        if questions:
            prompts = question_prompts(questions, subjects[0].tokenizer)
        else:
            prompts = encode_prompts(subjects[0], given["prompts"], Selection(), lambda line: say(line, err=True))
        ends = _ends(subjects[0], given)
        how = How(given["batch"], given["new_tokens"], sampling, ends, given["rounds"], tuple(loops))
        todo = tasks([(p.id, p.tokens) for p in prompts], given["n"])
        checks = _checks(model, given, limits)
        found = draw_all(subjects, todo, how, checks, refused, advance)
        if questions:
            decode = partial(subjects[0].tokenizer.decode, skip_special_tokens=True)
            found = grade(found, questions, decode, of_answers)
        scored = list(zip(subjects, found.parities, (m.rollouts for m in found.firsts), strict=True))
        why = explain_rollouts(scored, given, found.temperature, advance)
        origin = of_drawn(found, subjects, todo, how, checks, questions)
    if given["save"] is not None:
        from precaudit.checks.rollouts.reading import format_rollouts

        write(given["save"], format_rollouts(found.rollouts, found.temperature))
    from precaudit.reports.rollout_report import RolloutStory, rollout_report

    report = rollout_report(RolloutStory(origin, found.parities, tuple(why), found))
    deliver(report, to)
    return exit_code_with_causes(why, found.exit_code)


def _split_limits(
    limits: "tuple[RolloutBudget, ...]", two: bool
) -> "tuple[tuple[RolloutBudget, ...], tuple[RolloutBudget, ...]]":
    """Return limits on answers, and those on log-probabilities; ``two``: two policies are asked questions."""
    from precaudit.checks.rollouts.limits import ANSWERS
    from precaudit.errors import UserError

    of_answers = tuple(x for x in limits if x.entry.metric == ANSWERS)
    if of_answers and not two:
        raise UserError(
            f"--fail-below {ANSWERS}={of_answers[0].entry.limit:g} needs --answers FILE and two policies, --policy A,B"
        )
    return of_answers, tuple(x for x in limits if x.entry.metric != ANSWERS)


def _questions(given: dict[str, Any]) -> "list[Question]":
    """Return the questions to ask; none where prompts are drawn from."""
    from precaudit.checks.rollouts.questions import read_questions
    from precaudit.errors import UserError

    if given["answers"] is None:
        return []
    if given["prompts"] is not None:
        raise UserError("give --answers or --prompts, not both")
    return read_questions(given["answers"])


def _with_defaults(given: dict[str, Any], answers: bool) -> dict[str, Any]:
    """Return the options with what was not said: of answers greedy tokens, few of them, drawn once."""
    usual = {
        "new_tokens": 16 if answers else 64,
        "temperature": 0.0 if answers and given["n"] == 1 else 1.0,
        "rounds": 1 if answers else 3,
    }
    return given | {name: x for name, x in usual.items() if given[name] is None}


def draw_program(reference: str, given: dict[str, Any], to: Delivery, other: Sequence[str]) -> int:
    """Time the loops of a program of the user's, and say whether they compute the same."""
    from precaudit.errors import UserError
    from precaudit.recording.programs.loading import load_program, trust

    if other:
        raise UserError(f"a program says itself what it runs; leave out --{other[0].replace('_', '-')}")
    rounds = 3 if given["rounds"] is None else given["rounds"]
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: at least 1 is wanted")
    loops = loops_named(given["loops"])
    with progress_bar("loading the program") as advance:
        from precaudit.checks.rollouts.program_loops import measure_program

        found = measure_program(load_program(reference), reference, loops, rounds, advance)
    trust(reference)
    from precaudit.reports.rollout_report import loops_report

    deliver(loops_report(found), to)
    return 3 if any(t.why for t in found) else int(not all(t.same for t in found))


def loops_named(text: str) -> "list[Loop]":
    """Return the loops named in ``python,while``; raises UserError for another, or one that is there twice."""
    from precaudit.checks.rollouts.generation import LOOPS
    from precaudit.errors import UserError, nearest

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in LOOPS:
            raise UserError(f"--loops {text}: no loop {name!r}{nearest(name, LOOPS)}")
    if not names or len(set(names)) < len(names):
        raise UserError(f"--loops {text}: python, while or both are wanted")
    return [loop for name in names for loop in LOOPS if loop == name]


def _ends(subject: "Subject", given: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a sequence: those given, or the model's."""
    from precaudit.errors import UserError
    from precaudit.models.checkpoints.ends import check_token_ids, end_tokens

    text = given["end_tokens"]
    if text is None:
        return end_tokens(subject.checkpoint)
    if text.strip() == "none":
        return ()
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--end-tokens {text}: token ids are wanted, such as 0,2, or none") from None
    return check_token_ids(ids, subject.config.vocab, "--end-tokens")


def _checks(model: str, given: dict[str, Any], limits: "tuple[RolloutBudget, ...]") -> "Checks":
    """Return what the rollouts are held to; the trainer is another policy, another checkpoint or both."""
    from precaudit.checks.rollouts.parity import Checks
    from precaudit.recording.tracing.subject import load
    from precaudit.schema.policies import load_policy

    trainer = None
    if given["trainer_policy"] or given["trainer"]:
        policy = load_policy(given["trainer_policy"] or policy_names(given["policy"])[0])
        where = {"device": given["device"], "allow": given["allow_field"], "mesh": given["mesh"]}
        trainer = load(given["trainer"] or model, policy, **where)
    return Checks(trainer, not given["no_fp64"], limits)

"""The part of ``precaudit rollout`` that draws tokens."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precaudit.cli._options import announce, console, progress_bar, say

if TYPE_CHECKING:
    from precaudit.checks.rollouts.causes import Cause
    from precaudit.checks.rollouts.drawn import Checks, Drawn
    from precaudit.checks.rollouts.generation import Loop
    from precaudit.checks.rollouts.limits import Limit
    from precaudit.checks.rollouts.origin import RolloutRun
    from precaudit.checks.rollouts.questions import Question
    from precaudit.recording.tracing.subject import Subject


def draw(model: str, given: dict[str, Any], limits: "tuple[Limit, ...]") -> int:
    """Draw, time and check rollouts, and print what was found."""
    from precaudit.checks.rollouts.sampling import Sampling
    from precaudit.cli._explaining import explained
    from precaudit.cli._judged import write
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings
    from precaudit.schema.selection import Selection

    changes = parse_settings(given["settings"])
    names = policy_names(given["policies"] or given["policy"])
    policies = [apply_settings(load_policy(name), changes) for name in names]
    questions = _questions(given)
    of_answers, limits = _split(limits, bool(questions) and len(policies) > 1)
    given = _completed(given, bool(questions))
    sampling = Sampling(given["temperature"], given["top_k"], given["top_p"], given["seed"])
    loops = loops_of(given["loops"])
    with progress_bar("loading JAX") as advance:
        from precaudit.checks.rollouts.drawn import drawn, graded, opened
        from precaudit.checks.rollouts.questions import asked
        from precaudit.checks.rollouts.recording import of_drawn
        from precaudit.checks.rollouts.timing import How, tasks
        from precaudit.recording.tracing.subject import load
        from precaudit.recording.tracing.trace import encoded

        subjects, refused = opened(
            lambda p: load(model, p, device=given["device"], allow=given["allow_field"]), policies
        )
        if questions:
            prompts = asked(questions, subjects[0].tokenizer)
        else:
            prompts = encoded(subjects[0], given["prompts"], Selection(), lambda line: say(line, err=True))
        how = How(given["batch"], given["new_tokens"], sampling, _ends(subjects[0], given), given["rounds"])
        todo = tasks([(p.id, p.tokens) for p in prompts], given["n"])
        checks = _checks(model, given, limits)
        found = drawn(subjects, todo, how, loops, checks, refused, advance)
        if questions:
            decode = partial(subjects[0].tokenizer.decode, skip_special_tokens=True)
            found = graded(found, questions, decode, of_answers)
        scored = list(zip(subjects, found.parities, (m.rollouts for m in found.firsts), strict=True))
        why = explained(scored, given, found.temperature, advance)
        origin = of_drawn(found, subjects, todo, how, checks, questions)
    if given["save"] is not None:
        from precaudit.checks.rollouts.reading import written

        write(given["save"], written(found.rollouts, found.temperature))
    return _show(found, origin, why, given)


def _split(limits: "tuple[Limit, ...]", two: bool) -> "tuple[tuple[Limit, ...], tuple[Limit, ...]]":
    """Return limits on answers, and those on log-probabilities; ``two``: two policies are asked questions."""
    from precaudit.checks.rollouts.limits import ANSWERS
    from precaudit.errors import UserError

    of_answers = tuple(x for x in limits if x.metric == ANSWERS)
    if of_answers and not two:
        raise UserError(f"--fail-below {ANSWERS}={of_answers[0].value:g} needs --answers FILE and two --policies")
    return of_answers, tuple(x for x in limits if x.metric != ANSWERS)


def _questions(given: dict[str, Any]) -> "list[Question]":
    """Return the questions to ask; none where prompts are drawn from."""
    from precaudit.checks.rollouts.questions import read_questions
    from precaudit.errors import UserError

    if given["answers"] is None:
        return []
    if given["prompts"] is not None:
        raise UserError("give --answers or --prompts, not both")
    return read_questions(given["answers"])


def _completed(given: dict[str, Any], answers: bool) -> dict[str, Any]:
    """Return the options with what was not said: of answers greedy tokens, few of them, drawn once."""
    usual = {
        "new_tokens": 16 if answers else 64,
        "temperature": 0.0 if answers and given["n"] == 1 else 1.0,
        "rounds": 1 if answers else 3,
    }
    return given | {name: x for name, x in usual.items() if given[name] is None}


def program(reference: str, given: dict[str, Any], other: Sequence[str]) -> int:
    """Time the loops of a program of the user's, and say whether they compute the same."""
    from precaudit.cli.rollout import kept
    from precaudit.errors import UserError
    from precaudit.recording.programs.loading import load, trust
    from precaudit.reports import drawn as report
    from precaudit.reports import fitting

    if other:
        raise UserError(f"a program says itself what it runs; leave out --{other[0].replace('_', '-')}")
    rounds = 3 if given["rounds"] is None else given["rounds"]
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: at least 1 is wanted")
    loops = loops_of(given["loops"])
    with progress_bar("loading the program") as advance:
        from precaudit.checks.rollouts.program_loops import measure_program

        found = measure_program(load(reference), reference, loops, rounds, advance)
    trust(reference)
    code = 3 if any(t.why for t in found) else int(not all(t.same for t in found))
    if not kept(tuple(found), given):
        announce(report.program_headline(found))
        fitting.show(report.program(found), console())
    return code


def policy_names(text: str) -> list[str]:
    """Return the policies named in ``bf16,fp32``; a file's name may hold a comma."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [text] if Path(text).is_file() or not names else names


def loops_of(text: str) -> "list[Loop]":
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
    from precaudit.models.checkpoints.ends import checked, end_tokens

    text = given["end_tokens"]
    if text is None:
        return end_tokens(subject.checkpoint)
    if text.strip() == "none":
        return ()
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--end-tokens {text}: token ids are wanted, such as 0,2, or none") from None
    return checked(ids, subject.config.vocab, "--end-tokens")


def _checks(model: str, given: dict[str, Any], limits: "tuple[Limit, ...]") -> "Checks":
    """Return what the rollouts are held to; the trainer is another policy, another checkpoint or both."""
    from precaudit.checks.rollouts.drawn import Checks
    from precaudit.recording.tracing.subject import load
    from precaudit.schema.policies import load_policy

    trainer = None
    if given["trainer_policy"] or given["trainer"]:
        policy = load_policy(given["trainer_policy"] or given["policy"])
        trainer = load(given["trainer"] or model, policy, device=given["device"], allow=given["allow_field"])
    return Checks(trainer, not given["no_fp64"], limits)


def _show(found: "Drawn", origin: "RolloutRun", why: "Sequence[Cause]", given: dict[str, Any]) -> int:
    """Print what was found, and write its records."""
    from precaudit.cli._explaining import code_of, show
    from precaudit.cli.rollout import kept, pages
    from precaudit.reports import drawn as report
    from precaudit.reports import fitting, rollouts

    code = code_of(why, found.exit_code)
    pages(origin, found.parities, why, given, found)
    if kept((origin, *_records(found), *why), given):
        return code
    announce(report.headline(found))
    fitting.show(report.timing(found), console())
    fitting.show(report.parity(found), console())
    if found.answers:
        fitting.show(report.answers(found), console())
    if len(found.parities) == 1:
        fitting.show(rollouts.worst(found.parities[0]), console())
    for line in report.lines(found):
        say(line)
    show(why)
    return code


def _records(found: "Drawn") -> tuple[Any, ...]:
    parities: Sequence[Any] = found.parities
    whole = (*found.timings, *found.answers, *found.changed, *(r for p in parities for r in p.whole))
    return (*whole, *found.divergences, *(r for p in parities for r in p.each))

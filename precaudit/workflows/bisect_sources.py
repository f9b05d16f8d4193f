"""What a bisection is by: the changes between A and B of each kind, and how their trials are measured."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precaudit.errors import UserError
from precaudit.progress import Progress
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.policies import load_policy
from precaudit.schema.prompts import Prompt, read_prompts
from precaudit.schema.selection import Selection
from precaudit.workflows.bisect import BisectionRequest, Find, Source

if TYPE_CHECKING:
    from precaudit.diagnosis.bisection.limits import Criterion
    from precaudit.diagnosis.bisection.measuring import Measuring
    from precaudit.diagnosis.bisection.processes import Sides


@dataclass(frozen=True)
class Given:
    """The options of ``precaudit bisect``, as they were given."""

    subject: str
    folder: Path
    by: str
    good: str | None
    bad: str | None
    test: str | None
    test_command: str | None
    find: Find | None
    raised: str | None
    against: str | None
    most: int
    prompts: Path | None
    text: str | None
    prompt: str | None
    points: str | None
    decode_steps: int
    policy: str | None
    between: str | None
    force: bool
    device: str
    allow_field: tuple[str, ...]
    jobs: int = 1
    scheduler: str | None = None

    @property
    def how(self) -> str:
        """All that a trial depends on beside its changes and the test, as a text."""
        prompts = None if self.prompts is None else read_prompts(self.prompts)
        what = (self.text, self.prompt, self.points, self.decode_steps, self.device, self.allow_field, self.policy)
        return repr((prompts, *what))


def source_of(given: Given, progress: Progress, cache: Path, line: str) -> tuple[BisectionRequest, Source]:
    """Return what is asked and what lies between A and B; raises UserError for what does not go together."""
    from precaudit.diagnosis.bisection.commands import command_criterion
    from precaudit.diagnosis.bisection.limits import parse_criterion

    if given.text is not None and given.prompts is not None:
        raise UserError("give --text or --prompts, not both")
    for name, words in (("text", given.text), ("test-command", given.test_command)):
        if words is not None and not words.strip():
            raise UserError(f"--{name} is empty")
    criterion = command_criterion(given.test_command or "") if given.test is None else parse_criterion(given.test)
    _check_options(given)
    request, source = MAKERS[given.by](given, criterion, progress, cache, line)
    if given.jobs > 1 and source.kind is None:
        raise UserError(f"--by {given.by} makes its trials one after another, in this process; leave out --jobs")
    if given.scheduler is not None and source.kind != "processes":
        raise UserError(f"--by {given.by} makes its trials on this machine; leave out --scheduler")
    return request, source


def _by_policy(
    given: Given, criterion: "Criterion", progress: Progress, cache: Path, line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.commands import CommandTrials
    from precaudit.diagnosis.bisection.policies import PolicyTrials
    from precaudit.recording.tracing.subject import load

    names = _both(given)
    good, bad = (load_policy(name) for name in names)
    request = _request(given, criterion, BisectedSides(*names, repr((good.settings(), bad.settings()))), "cause")
    here = given.jobs < 2 and given.scheduler is None
    told = progress if here else Progress(_say_nothing)  # which other processes can be given
    how = _measuring(given, criterion, request.against, told, cache, line)
    trials = PolicyTrials(given.subject, good, bad, given.device, given.allow_field, how)
    if given.test_command is None:
        for policy in (good, bad):
            how.check(load(given.subject, policy, device=given.device, allow=given.allow_field))
        _check_weights(given, good.weights, bad.weights, request.against)
        return request, trials
    return request, CommandTrials(given.test_command, given.subject, trials.changes, trials.settings)


def _say_nothing(line: str) -> None:
    """Say nothing of a line."""


def _check_weights(given: Given, good: str, bad: str, against: str) -> None:
    """Refuse figures from FP64 where the policies hold other weights: each has an FP64 of its own."""
    if good != bad and against == "fp64":
        raise UserError(
            f"the weights of {given.good} are {good}, of {given.bad} {bad}, and FP64 has a policy's own weights; give "
            "--against good"
        )


def _by_layers(
    given: Given, criterion: "Criterion", progress: Progress, cache: Path, line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.policies import LayerTrials
    from precaudit.recording.tracing.subject import load

    if given.raised != "float32":
        raise UserError(f"--by layers: give --raise float32{'' if given.raised is None else f', not {given.raised}'}")
    _check_outside(criterion, given.points)
    bad = given.bad or "bf16"
    subject = load(given.subject, bad, device=given.device, allow=given.allow_field)
    good = f"{bad}, everything in float32"
    request = _request(given, criterion, BisectedSides(good, bad, repr(subject.policy.settings())), "cure")
    how = _measuring(given, criterion, request.against, progress, cache, line)
    how.check(subject)
    return request, LayerTrials(subject, how)


def _check_outside(criterion: "Criterion", points: str | None) -> None:
    """Refuse what trials by layers cannot show: of a layer with two arithmetics taps see neither."""
    if criterion.name in ("verdict", "differing"):
        raise UserError(f"--by layers: {criterion.text} is of one policy for all layers; give a limit, such as kl<1e-3")
    named = {criterion.point or LOGITS, *(points or LOGITS).split(",")}
    if inside := sorted(x for x in named if x in POINTS and POINTS[x].per_layer):
        raise UserError(f"--by layers: {inside[0]} lies inside layers, which show nothing there; test kl or logits")


def _by_lines(
    given: Given, criterion: "Criterion", progress: Progress, _cache: Path, _line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.rounded_lines import line_trials
    from precaudit.diagnosis.bisection.trials import RUNS
    from precaudit.recording.programs.loading import is_reference

    if not is_reference(given.subject):
        raise UserError(f"--by lines: {given.subject} is no program of yours; give FILE.py:NAME, or --by policy")
    trials = line_trials(given.subject, given.folder / RUNS / "program", criterion, progress.advance)
    good, bad = "every line in float32, emulated", "as it rounds, emulated"
    return _request(given, criterion, BisectedSides(good, bad, _source_hash(given.subject)), "cause"), trials


def _source_hash(reference: str) -> str:
    """Return the hash of a program's file; nothing where it is of a module."""
    from precaudit.recording.programs.loading import source_of

    own = source_of(reference)
    return "" if own is None or not own.is_file() else hashlib.sha256(own.read_bytes()).hexdigest()


def _by_processes(
    given: Given, criterion: "Criterion", progress: Progress, cache: Path, line: str
) -> tuple[BisectionRequest, Source]:
    """Return what is asked of trials that each run in a process of their own; against A where nothing else is said."""
    from precaudit.diagnosis.bisection.processes import ProcessTrials
    from precaudit.diagnosis.bisection.trials import GOOD, RUNS
    from precaudit.recording.programs.loading import is_reference, source_of
    from precaudit.recording.tracing.subject import load

    program = is_reference(given.subject)
    same_file = given.by != "commits"
    if given.by == "passes":
        good, bad = given.good or "on", given.bad or ("on" if given.good == "off" else "off")
    else:
        good, bad = _both(given)
    find: Find = "first" if given.by in ("commits", "versions") else "cure" if good == "off" else "cause"
    arguments = _trace_arguments(given, criterion, program)
    sides = None if given.by == "passes" and good in ONOFF and bad in ONOFF else sides_of(given, good, bad)
    code = _source_hash(given.subject) if program and same_file else ""
    request = _request(given, criterion, BisectedSides(good or "nothing", bad or "nothing", code), find, "good")
    if same_file and given.test_command is None:
        if not program:
            how = _measuring(given, criterion, request.against, progress, cache, line)
            how.check(load(given.subject, given.policy or "bf16", device=given.device, allow=given.allow_field))
        elif (file := source_of(given.subject)) is not None and not file.is_file():
            raise UserError(f"{given.subject}: no such file")
    sides = sides or sides_of(given, good, bad, arguments)
    return request, ProcessTrials(
        given.subject,
        sides,
        criterion,
        request.against,
        arguments,
        given.folder / RUNS / GOOD,
        given.test_command,
    )


def _trace_arguments(given: Given, criterion: "Criterion", program: bool) -> tuple[str, ...]:
    """Return the options of ``trace`` that every trial is recorded with."""
    from precaudit.diagnosis.bisection.measuring import points_for

    words: dict[str, str | None] = {"--prompt": given.prompt, "--policy": given.policy}
    words["--points"] = given.points if program else points_for(criterion, given.points)
    if not program:
        prompts = None if given.prompts is None else str(given.prompts.resolve())
        words |= {"--text": given.text, "--prompts": prompts, "--decode-steps": str(given.decode_steps)}
        words |= {"--device": given.device}
    arguments = [x for name, word in words.items() if word is not None for x in (name, word)]
    arguments += [x for name in given.allow_field for x in ("--allow-field", name)]
    return tuple(arguments)


def sides_of(given: Given, good: str, bad: str, arguments: Sequence[str] = ()) -> "Sides":
    """Return what lies between A and B of trials in processes; raises UserError for sides that are none.

    ``arguments``: of ``trace`` in every trial.
    """
    if given.by == "passes":
        from precaudit.diagnosis.bisection.passes import pass_sides

        return pass_sides(good, bad, ["trace", given.subject, *arguments], given.folder, given.force)
    if given.by == "flags":
        from precaudit.diagnosis.bisection.flags import flag_sides

        return flag_sides(good, bad)
    if given.by == "commits":
        from precaudit.diagnosis.bisection.commits import commits_between

        return commits_between(good, bad)
    from precaudit.diagnosis.bisection.environments import environment, versions_between

    found = versions_between(good, bad, given.between)
    for version in (good, bad):
        environment(version)
    return found


ONOFF = ("on", "off")  # the sides of a bisection by passes
PROCESSES = ("flags", "passes", "commits", "versions")
MAKERS = {"policy": _by_policy, "layers": _by_layers, "lines": _by_lines, **dict.fromkeys(PROCESSES, _by_processes)}
# The options that say nothing of a kind of bisection.
REFUSED = {
    "policy": ("raised", "between", "policy"),
    "layers": ("good", "test_command", "between", "policy"),
    "lines": ("good", "bad", "test_command", "raised", "between", "policy", "against", "prompt", "points"),
    "flags": ("raised", "between"),
    "passes": ("raised", "between"),
    "commits": ("raised", "between", "find"),
    "versions": ("raised", "find"),
}
OF_MODELS = ("text", "prompts", "allow_field")  # what a program says itself
BOTH = {
    "policy": "both policies, --good A --bad B",
    "flags": "what both sides set, --good '' --bad 'XLA_FLAGS=\"--flag\" jax_name=value'",
    "commits": "both, --good COMMIT --bad COMMIT",
    "versions": "both, --good jax==0.10.2 --bad jax==0.11.0",
}


def _check_options(given: Given) -> None:
    """Raise UserError for options that say nothing of this kind of bisection, or of a program."""
    from precaudit.recording.programs.loading import is_reference

    if other := given_among(given, REFUSED[given.by]):
        raise UserError(f"--by {given.by} takes no {other}")
    if is_reference(given.subject) and (other := given_among(given, OF_MODELS)):
        raise UserError(f"a program says itself what it runs on; leave out {other}")


def given_among(given: Given, names: tuple[str, ...]) -> str:
    """Return those options of some that were given, as a user writes them."""
    there = (name for name in names if getattr(given, name) not in (None, ()))
    return ", ".join(f"--{name.replace('_', '-').replace('raised', 'raise')}" for name in there)


def _both(given: Given) -> tuple[str, str]:
    """Return A and B as they were given; raises UserError where one is not."""
    if given.good is None or given.bad is None:
        raise UserError(f"--by {given.by}: give {BOTH[given.by]}")
    return given.good, given.bad


@dataclass(frozen=True)
class BisectedSides:
    """What is compared, by name, and what identifies the code of both."""

    good: str
    bad: str
    code: str


def _request(
    given: Given, criterion: "Criterion", sides: BisectedSides, find: Find, usual: str = "fp64"
) -> BisectionRequest:
    bits = criterion.name == "differing"
    from_fp64 = criterion.name == "verdict" or criterion.times
    against = given.against or ("good" if bits else "fp64" if from_fp64 else usual)
    if bits and against == "fp64":
        raise UserError(f"--test {criterion.text}: bits are compared with A's; leave out --against fp64")
    if criterion.times and against == "good":
        raise UserError(f"--test {criterion.text}: A has no error against itself; give --against fp64, or a number")
    return BisectionRequest(
        given.subject,
        given.by,
        sides.good,
        sides.bad,
        criterion,
        against,
        given.find or find,
        given.how,
        sides.code,
        given.most,
        given.force,
        given.jobs,
        given.scheduler,
    )


def _measuring(
    given: Given, criterion: "Criterion", against: str, progress: Progress, cache: Path, line: str
) -> "Measuring":
    from precaudit.diagnosis.bisection.measuring import Measuring, points_for
    from precaudit.diagnosis.bisection.trials import GOOD, RUNS
    from precaudit.recording.tracing.trace import TraceOptions
    from precaudit.references.comparison.compare import CompareOptions

    select = Selection.parse(None, points_for(criterion, given.points), None, None, given.prompt)
    prompts = [Prompt(id="text", prompt=given.text)] if given.text is not None else given.prompts
    traced = TraceOptions(given.decode_steps, 1, "right", None, True, f"precaudit {line}")
    compared = CompareOptions(accum=(), cache=cache)
    return Measuring(criterion, against, prompts, select, traced, compared, progress, given.folder / RUNS / GOOD)

"""What a bisection is by: the changes between A and B of each kind, and how their trials are measured."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precaudit.errors import UserError
from precaudit.progress import Progress
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.policies import load_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from precaudit.workflows.bisect import BisectionRequest, Find, Source

if TYPE_CHECKING:
    from precaudit.diagnosis.bisection.ddmin import Changes
    from precaudit.diagnosis.bisection.limits import Criterion
    from precaudit.diagnosis.bisection.measuring import Measuring
    from precaudit.diagnosis.bisection.processes import Site


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

    @property
    def how(self) -> str:
        """All that a trial depends on beside its changes and the test, as a text."""
        prompts = None if self.prompts is None else self.prompts.read_text()
        return repr(
            (
                prompts,
                self.text,
                self.prompt,
                self.points,
                self.decode_steps,
                self.device,
                self.allow_field,
                self.policy,
            )
        )


def source_of(given: Given, progress: Progress, cache: Path, line: str) -> tuple[BisectionRequest, Source]:
    """Return what is asked and what lies between A and B; raises UserError for what does not go together."""
    from precaudit.diagnosis.bisection.commands import command_criterion
    from precaudit.diagnosis.bisection.limits import parse_criterion

    if given.text is not None and given.prompts is not None:
        raise UserError("give --text or --prompts, not both")
    criterion = command_criterion(given.test_command or "") if given.test is None else parse_criterion(given.test)
    return MAKERS[given.by](given, criterion, progress, cache, line)


def _by_policy(
    given: Given, criterion: "Criterion", progress: Progress, cache: Path, line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.commands import CommandTrials
    from precaudit.diagnosis.bisection.policies import PolicyTrials
    from precaudit.recording.tracing.subject import load

    if given.good is None or given.bad is None:
        raise UserError("--by policy: give both policies, --good A --bad B")
    _refuse("policy", raised=given.raised, between=given.between, policy=given.policy)
    good, bad = load_policy(given.good), load_policy(given.bad)
    how = _measuring(given, criterion, progress, cache, line)
    trials = PolicyTrials(given.subject, good, bad, given.device, given.allow_field, how)
    code = repr((good.settings(), bad.settings()))
    request = _request(given, criterion, given.good, given.bad, "cause", code)
    if given.test_command is None:
        for policy in (good, bad):
            load(given.subject, policy, device=given.device, allow=given.allow_field)
        _check_weights(given, good.weights, bad.weights, how.against)
        return request, trials
    return request, CommandTrials(given.test_command, given.subject, trials.changes, trials.settings)


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
    _refuse("layers", good=given.good, test_command=given.test_command, between=given.between, policy=given.policy)
    _check_outside(criterion, given.points)
    bad = given.bad or "bf16"
    subject = load(given.subject, bad, device=given.device, allow=given.allow_field)
    how = _measuring(given, criterion, progress, cache, line)
    good = f"{bad}, every layer in float32"
    return _request(given, criterion, good, bad, "cure", repr(subject.policy.settings())), LayerTrials(subject, how)


def _check_outside(criterion: "Criterion", points: str | None) -> None:
    """Refuse what trials by layers cannot show: of a layer with two arithmetics taps see neither."""
    if criterion.name in ("verdict", "differing"):
        raise UserError(f"--by layers: {criterion.text} is of one policy for all layers; give a limit, such as kl<1e-3")
    named = {criterion.point or LOGITS, *(points or LOGITS).split(",")}
    if inside := sorted(x for x in named if x in POINTS and POINTS[x].per_layer):
        raise UserError(f"--by layers: {inside[0]} lies inside layers, which show nothing there; test kl or logits")


def _by_flags(
    given: Given, criterion: "Criterion", _progress: Progress, _cache: Path, _line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.flags import flag_sides

    if given.good is None or given.bad is None:
        raise UserError("--by flags: give what both sides set, --good '' --bad 'XLA_FLAGS=\"--flag\" jax_name=value'")
    sides = flag_sides(given.good, given.bad)
    return _in_processes(given, criterion, "cause", tuple(sides.names), sides.site)


def _by_commits(
    given: Given, criterion: "Criterion", _progress: Progress, _cache: Path, _line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.commits import commits_between

    if given.good is None or given.bad is None:
        raise UserError("--by commits: give both, --good COMMIT --bad COMMIT")
    found = commits_between(given.good, given.bad)
    return _in_processes(given, criterion, "first", found.changes, found.site)


def _by_versions(
    given: Given, criterion: "Criterion", _progress: Progress, _cache: Path, _line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.environments import environment, versions_between

    if given.good is None or given.bad is None:
        raise UserError("--by versions: give both, --good jax==0.10.2 --bad jax==0.11.0")
    found = versions_between(given.good, given.bad, given.between)
    for version in (found.good, found.changes[-1]):
        environment(version)
    return _in_processes(given, criterion, "first", found.changes, found.site)


def _by_lines(
    given: Given, criterion: "Criterion", progress: Progress, _cache: Path, _line: str
) -> tuple[BisectionRequest, Source]:
    from precaudit.diagnosis.bisection.rounded_lines import line_trials
    from precaudit.diagnosis.bisection.trials import RUNS
    from precaudit.recording.programs.loading import is_reference

    _refuse("lines", good=given.good, bad=given.bad, test_command=given.test_command, raised=given.raised)
    _refuse("lines", between=given.between, policy=given.policy, against=given.against, points=given.points)
    if not is_reference(given.subject):
        raise UserError(f"--by lines: {given.subject} is no program of yours; give FILE.py:NAME, or --by policy")
    trials = line_trials(given.subject, given.folder / RUNS / "program", criterion, progress.advance)
    good, bad = "every line in float32, emulated", "as it rounds, emulated"
    return _request(given, criterion, good, bad, "cause", _source_hash(given.subject)), trials


def _check_subject(given: Given, program: bool) -> None:
    """Raise UserError for a subject that is not there, before an end of the search cannot be told for that."""
    from precaudit.recording.programs.loading import source_of
    from precaudit.recording.tracing.subject import load

    if not program:
        load(given.subject, given.policy or "bf16", device=given.device, allow=given.allow_field)
    elif (own := source_of(given.subject)) is not None and not own.is_file():
        raise UserError(f"{given.subject}: no such file")


def _source_hash(reference: str) -> str:
    """Return the hash of a program's file; nothing where it is of a module."""
    from precaudit.recording.programs.loading import source_of

    own = source_of(reference)
    return "" if own is None or not own.is_file() else hashlib.sha256(own.read_bytes()).hexdigest()


def _in_processes(
    given: Given, criterion: "Criterion", find: Find, changes: "Changes",
    site: "Callable[[Changes], AbstractContextManager[Site]]",
) -> tuple[BisectionRequest, Source]:  # fmt: skip
    """Return what is asked of trials that each run in a process of their own; against A where nothing else is said."""
    from precaudit.diagnosis.bisection.measuring import points_for
    from precaudit.diagnosis.bisection.processes import ProcessTrials
    from precaudit.diagnosis.bisection.trials import GOOD, RUNS
    from precaudit.recording.programs.loading import is_reference

    _refuse(given.by, raised=given.raised)
    if find == "first":
        _refuse(given.by, find=given.find)
    program = is_reference(given.subject)
    if given.by != "commits" and given.test_command is None:
        _check_subject(given, program)
    words: dict[str, str | None] = {"--prompt": given.prompt, "--policy": given.policy}
    words["--points"] = given.points if program else points_for(criterion, given.points)
    if not program:
        prompts = None if given.prompts is None else str(given.prompts.resolve())
        words |= {"--text": given.text, "--prompts": prompts, "--decode-steps": str(given.decode_steps)}
        words |= {"--device": given.device}
    arguments = [x for name, word in words.items() if word is not None for x in (name, word)]
    arguments += [x for name in given.allow_field for x in ("--allow-field", name)]
    code = _source_hash(given.subject) if program and given.by != "commits" else ""
    request = _request(given, criterion, given.good or "nothing", given.bad or "nothing", find, code, "good")
    return request, ProcessTrials(
        given.subject, changes, criterion, request.against, tuple(arguments), given.folder / RUNS / GOOD, site,
        given.test_command,
    )  # fmt: skip


MAKERS = {
    "policy": _by_policy, "layers": _by_layers, "lines": _by_lines, "flags": _by_flags, "commits": _by_commits,
    "versions": _by_versions,
}  # fmt: skip


def _refuse(by: str, **options: object) -> None:
    """Raise UserError for options that say nothing of this kind of bisection."""
    other = [name.replace("_", "-").replace("raised", "raise") for name, x in options.items() if x is not None]
    if other:
        raise UserError(f"--by {by} takes no --{', --'.join(other)}")


def _request(
    given: Given, criterion: "Criterion", good: str, bad: str, find: Find, code: str, usual: str = "fp64"
) -> BisectionRequest:
    against = given.against or ("fp64" if criterion.name == "verdict" or criterion.times else usual)
    if criterion.times and against == "good":
        raise UserError(f"--test {criterion.text}: A has no error against itself; give --against fp64, or a number")
    return BisectionRequest(
        given.subject, given.by, good, bad, criterion, against, given.find or find, given.how, code, given.most,
        given.force,
    )  # fmt: skip


def _measuring(given: Given, criterion: "Criterion", progress: Progress, cache: Path, line: str) -> "Measuring":
    from precaudit.diagnosis.bisection.measuring import Measuring, points_for
    from precaudit.diagnosis.bisection.trials import GOOD, RUNS
    from precaudit.recording.tracing.trace import TraceOptions
    from precaudit.references.comparison.compare import CompareOptions

    select = Selection.parse(None, points_for(criterion, given.points), None, None, given.prompt)
    prompts = [Prompt(id="text", prompt=given.text)] if given.text is not None else given.prompts
    traced = TraceOptions(given.decode_steps, 1, "right", None, True, f"precaudit {line}")
    compared = CompareOptions(accum=(), cache=cache)
    against = given.against or "fp64"
    return Measuring(criterion, against, prompts, select, traced, compared, progress, given.folder / RUNS / GOOD)

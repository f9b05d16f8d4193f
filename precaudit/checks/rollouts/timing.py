"""What drawing tokens takes, loop by loop and policy by policy: the same batches under each, one after the other."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace

from precaudit.checks.rollouts.generation import DrawShape, Generated, Generator, Loop
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.checks.rollouts.scoring import check_scoring
from precaudit.errors import CannotJudge, UserError
from precaudit.models.jax_decoder.sharding import check_mesh
from precaudit.progress import Advance, silent
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.lengths import bucket
from precaudit.schema.prompts import check_tokens
from precaudit.schema.records.base import Record

ROUNDS = 3


class Spread(Record, frozen=True, omit_defaults=False):
    """The median of rounds, and the smallest and largest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the Spread of at least one value."""
        return cls(median=median(values), low=min(values), high=max(values))


class Timing(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="timing"):
    """What drawing ``sequences`` of ``tokens`` tokens took under a policy and a loop, in ``rounds`` rounds.

    ``compile``: seconds, of all programs, once. ``prefill``: seconds of a round. ``decode_ms``: milliseconds of a step,
    which is a token of every sequence of a batch; ``host``: the share of decoding in which Python did not wait for
    the device; ``tokens_per_second``: of prefill and decoding together. None: no step was run. ``decode_ratio``: the
    first's milliseconds of a step over these, ``ratio``: tokens a second over the first's, of the same round each.
    ``memory``: bytes of a program's arguments (weights, cache, state) and temporaries, of the largest.
    """

    policy: str
    loop: Loop
    device: str
    batch: int
    sequences: int
    prompt_tokens: int
    tokens: int
    rounds: int
    compile: float
    prefill: Spread
    decode_ms: Spread | None
    decode_ratio: Spread | None
    host: Spread | None
    tokens_per_second: Spread
    ratio: Spread
    memory: int = 0


@dataclass(frozen=True)
class Task:
    """A sequence to draw: its id, its number, which it draws by, and its prompt's token ids."""

    id: str
    number: int
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class How:
    """How tokens are drawn and timed, in each of ``loops``. ``ends``: tokens that end a sequence."""

    batch: int = 8
    new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    ends: tuple[int, ...] = ()
    rounds: int = ROUNDS
    loops: tuple[Loop, ...] = ("while",)


@dataclass(frozen=True)
class DrawVariant:
    """What is timed: a subject under a policy, drawing in a loop."""

    subject: Subject
    loop: Loop = "while"


@dataclass(frozen=True)
class TimedVariant:
    """A variant's timing, and the rollouts that it drew, the same in every round."""

    timing: Timing
    rollouts: tuple[Rollout, ...]


@dataclass
class _Round:
    """Seconds and tokens of one variant's round."""

    prefill: float = 0.0
    decode: float = 0.0
    host: float = 0.0
    steps: int = 0
    tokens: int = 0

    def add(self, g: Generated) -> None:
        self.prefill, self.decode, self.host = self.prefill + g.prefill, self.decode + g.decode, self.host + g.host
        self.steps, self.tokens = self.steps + g.steps, self.tokens + sum(map(len, g.tokens))

    @property
    def step(self) -> float:
        return self.decode / self.steps

    @property
    def speed(self) -> float:
        return self.tokens / (self.prefill + self.decode)


def tasks(prompts: Sequence[tuple[str, Sequence[int]]], n: int) -> list[Task]:
    """Return ``n`` sequences of every prompt (id, token ids), numbered through; ids are PROMPT or PROMPT/NUMBER."""
    if n < 1:
        raise UserError(f"--n {n}: at least 1 is wanted")
    names = [(name if n == 1 else f"{name}/{k}", tuple(ids)) for name, ids in prompts for k in range(n)]
    return [Task(name, number, ids) for number, (name, ids) in enumerate(names)]


def time_variants(
    variants: Sequence[DrawVariant], given: Sequence[Task], how: How, tell: Advance = silent
) -> list[TimedVariant]:
    """Draw every sequence under every variant, and return what that took and what was drawn.

    Programs are compiled first. Then, batch by batch, one variant follows the other, in every second round backwards:
    what else a machine does slows all of them. Raises UserError for prompts that do not fit the context, CannotJudge
    where a variant draws otherwise in another round.
    """
    check_room(variants[0].subject, given, how)
    groups, widths = list(draw_batches(given, how)), widths_of(given, how)
    made = _Made(how, widths, {})
    total, done = len(groups) * len(variants) * how.rounds, 0
    compiling = [0.0] * len(variants)
    for i, v in enumerate(variants):
        tell(0, total, f"compiling {v.subject.policy.name}, {v.loop}")
        compiling[i] = made.compile(v, groups)
    rounds = [[_Round() for _ in range(how.rounds)] for _ in variants]
    drawn: list[dict[int, Generated]] = [{} for _ in variants]
    for r in range(how.rounds):
        for g, group in enumerate(groups):
            order = range(len(variants)) if (r + g) % 2 == 0 else reversed(range(len(variants)))
            for i in order:
                v = variants[i]
                tell(done, total, f"sampling under {v.subject.policy.name}, {v.loop}, round {r + 1} of {how.rounds}")
                found = made.generate(v, group)
                if np.isnan(np.concatenate(found.logprobs)).any():
                    raise CannotJudge(
                        f"{v.subject.policy.name}, {v.loop}: log p of sampled tokens is NaN; look at the model first: "
                        "precaudit trace, compare and gate"
                    )
                rounds[i][r].add(found)
                before = drawn[i].setdefault(g, found)
                if (before.tokens, before.logprobs) != (found.tokens, found.logprobs):
                    raise CannotJudge(
                        f"{v.subject.policy.name}, {v.loop}: the same batch gave other samples the second time"
                    )
                done += 1
    tell(total, total, "drawn")
    return [
        TimedVariant(
            replace(_timing(v, given, groups, compiling[i], rounds[i], rounds[0]), memory=made.memory(v, groups)),
            _rollouts(given, groups, drawn[i]),
        )
        for i, v in enumerate(variants)
    ]


def check_room(subject: Subject, given: Sequence[Task], how: How) -> None:
    """Raise UserError for what cannot be drawn: nothing asked for, no room in the context, or no mesh that fits."""
    for name, x in (("batch", how.batch), ("new-tokens", how.new_tokens), ("rounds", how.rounds)):
        if x < 1:
            raise UserError(f"--{name} {x}: at least 1 is wanted")
    check_mesh(subject.mesh, subject.config, how.batch)
    check_scoring(subject)
    for task in given:
        check_tokens(task.id, task.prompt, how.new_tokens, subject.config.vocab, subject.config.context)


def draw_batches(given: Sequence[Task], how: How) -> Iterator[list[Task]]:
    """Yield sequences that are drawn together: of one bucket of prompts and one of slots, at most ``batch``."""
    groups: dict[tuple[int, int], list[Task]] = {}
    for task in given:
        groups.setdefault(buckets(task, how), []).append(task)
    for _, members in sorted(groups.items()):
        yield from (members[k : k + how.batch] for k in range(0, len(members), how.batch))


def buckets(task: Task, how: How) -> tuple[int, int]:
    """Return the lengths that a prompt, and it with what is drawn, are padded to."""
    n = len(task.prompt)
    return bucket(n), bucket(n + how.new_tokens)


def widths_of(given: Sequence[Task], how: How) -> dict[tuple[int, int], int]:
    """Return how many sequences a batch of each bucket has: the last one is filled up, and is no other program."""
    counts = Counter(buckets(task, how) for task in given)
    return {key: min(n, how.batch) for key, n in counts.items()}


def shapes(given: Sequence[Task], how: How) -> list[DrawShape]:
    """Return the shape of every batch."""
    widths = widths_of(given, how)
    return [compiled_shape(group, how, widths) for group in draw_batches(given, how)]


def compiled_shape(group: Sequence[Task], how: How, widths: dict[tuple[int, int], int]) -> DrawShape:
    """Return what programs are compiled for that draw a batch."""
    longest = max(len(t.prompt) for t in group)
    return DrawShape.of(widths[buckets(group[0], how)], longest, how.new_tokens)


@dataclass
class _Made:
    """The generators made so far, by policy and shape."""

    how: How
    widths: dict[tuple[int, int], int]
    generators: dict[Any, Generator]

    def compile(self, v: DrawVariant, groups: Sequence[Sequence[Task]]) -> float:
        """Compile what a variant needs; return the seconds of its programs, shared ones too."""
        found = {id(g): g for g in (self._of(v, group) for group in groups)}
        for g in found.values():
            g.compile([v.loop])
        return sum(g.programs[name].seconds for g in found.values() for name in ("start", v.loop))

    def memory(self, v: DrawVariant, groups: Sequence[Sequence[Task]]) -> int:
        """Return the bytes that the largest program of a variant holds."""
        programs = [self._of(v, group).programs[name] for group in groups for name in ("start", v.loop)]
        return max(p.memory for p in programs)

    def generate(self, v: DrawVariant, group: Sequence[Task]) -> Generated:
        """Draw a batch."""
        prompts, numbers = [t.prompt for t in group], [t.number for t in group]
        return self._of(v, group).generate(prompts, numbers, self.how.new_tokens, v.loop)

    def _of(self, v: DrawVariant, group: Sequence[Task]) -> Generator:
        shape = compiled_shape(group, self.how, self.widths)
        key = (id(v.subject), shape)
        if key not in self.generators:
            self.generators[key] = Generator(v.subject, shape, self.how.sampling, self.how.ends)
        return self.generators[key]


def _timing(
    v: DrawVariant,
    given: Sequence[Task],
    groups: Sequence[Sequence[Task]],
    compiling: float,
    rounds: Sequence[_Round],
    first: Sequence[_Round],
) -> Timing:
    stepped = all(r.steps for r in (*rounds, *first))
    pairs = list(zip(rounds, first, strict=True))
    return Timing(
        policy=v.subject.policy.name,
        loop=v.loop,
        device=v.subject.platform + (f", {v.subject.mesh}" if v.subject.mesh.devices > 1 else ""),
        batch=max(map(len, groups)),
        sequences=len(given),
        prompt_tokens=sum(len(t.prompt) for t in given),
        tokens=rounds[0].tokens,
        rounds=len(rounds),
        compile=compiling,
        prefill=Spread.of([r.prefill for r in rounds]),
        decode_ms=Spread.of([1e3 * r.step for r in rounds]) if stepped else None,
        decode_ratio=Spread.of([f.step / r.step for r, f in pairs]) if stepped else None,
        host=Spread.of([r.host / r.decode for r in rounds]) if stepped else None,
        tokens_per_second=Spread.of([r.speed for r in rounds]),
        ratio=Spread.of([r.speed / f.speed for r, f in pairs]),
    )


def _rollouts(
    given: Sequence[Task], groups: Sequence[Sequence[Task]], drawn: dict[int, Generated]
) -> tuple[Rollout, ...]:
    """Return what was drawn, in the order it was asked for."""
    found = {}
    for g, group in enumerate(groups):
        for t, tokens, logprobs in zip(group, drawn[g].tokens, drawn[g].logprobs, strict=True):
            found[t.number] = Rollout(t.id, t.prompt, tokens, logprobs)
    return tuple(found[t.number] for t in given)

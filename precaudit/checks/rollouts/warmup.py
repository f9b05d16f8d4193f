"""Compiling beforehand what a rollout or a trace of given shapes runs, into JAX's persistent cache."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from precaudit.checks.rollouts.generation import Generator, Loop
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.scoring import buckets_of, by_policy
from precaudit.checks.rollouts.timing import How, Task, shapes
from precaudit.progress import silent
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import Record

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"  # JAX's events


class Warmed(Record, frozen=True, omit_defaults=False):
    """What was made ready under a policy, the seconds that took, and how many programs were compiled or read.

    ``read``: from the cache on disk. Programs that compile in less than 0.1 s are not kept there.
    """

    policy: str
    what: str
    seconds: float
    compiled: int
    read: int


def for_rollouts(subject: Subject, given: Sequence[Task], how: How, loops: Sequence[Loop]) -> Iterator[Warmed]:
    """Yield what drawing ``given``, and scoring it by the policy's prefill, needs."""
    for shape in dict.fromkeys(shapes(given, how)):
        generator = Generator(subject, shape, how.sampling, how.ends)
        where = f"{shape.batch} sequences of {shape.prompt} tokens, {shape.slots} slots"
        yield _warm(subject, f"prefill and {', '.join(loops)} loop: {where}", partial(generator.compile, loops))
    for (slots, _), rollout in {buckets_of(r): r for r in _longest(given, how)}.items():
        work = partial(by_policy, subject, [rollout], how.sampling.scoring_temperature, silent)
        yield _warm(subject, f"scoring of {slots} tokens", work)


def for_traces(subject: Subject, given: Sequence[Task], steps: int, batch: int) -> Iterator[Warmed]:
    """Yield what tracing prompts of these lengths needs: a trace of each bucket, which is thrown away."""
    lengths = [len(t.prompt) for t in given]
    prompts = [Prompt(str(i), tokens=(0,) * n) for i, n in enumerate(lengths)]
    with TemporaryDirectory(prefix="precaudit-") as folder:
        yield _warm(
            subject,
            f"trace of {', '.join(map(str, sorted(set(lengths))))} tokens, {steps} decode steps",
            partial(trace, subject, Path(folder) / "run", prompts, None, TraceOptions(decode_steps=steps, batch=batch)),
        )


def _longest(given: Sequence[Task], how: How) -> Iterator[Rollout]:
    """Yield rollouts that are as long as those drawn after each prompt may be."""
    for t in given:
        yield Rollout(t.id, t.prompt, (0,) * how.new_tokens, ())


def _warm(subject: Subject, what: str, work: Callable[[], Any]) -> Warmed:
    with _count_events() as seen:
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
    return Warmed(policy=subject.policy.name, what=what, seconds=took, compiled=seen[MISS], read=seen[HIT])


@cache
def _events() -> Counter[str]:
    """Return the counter of JAX's events, which listens from the first call on."""
    seen: Counter[str] = Counter()

    def listen(event: str, **_: Any) -> None:
        seen[event] += 1

    jax.monitoring.register_event_listener(listen)
    return seen


@contextmanager
def _count_events() -> Iterator[Counter[str]]:
    """Yield a counter that holds, at the end, the events of the block."""
    before, found = Counter(_events()), Counter[str]()
    yield found
    found.update(_events() - before)

"""Measure what words of rows add to a default trace: wall time and CPU time of its calls and bytes, against the bound.

Needs the model smollm2. A prompt, 8 decode steps. Calls with and without words take turns; ratios are of the medians.
Both programs are compiled here: XLA:CPU runs a program that JAX's cache on disk held on fewer threads, decode 1.4 times
as long, so that one that was read beside one that was made tells nothing of words. JAX's profiler tells which share of
a program's own time words take: instructions named as no other operation is.
Run: python -m benchmarks.row_words [--policy P] [--tokens N] [--rounds N]
"""

import argparse
import glob
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from benchmarks.main_job import Line, show
from precaudit.recording.tracing import trace as tracing
from precaudit.recording.tracing.programs import Capture, compile_program, decode_program, prefill_program
from precaudit.recording.tracing.session import Batch
from precaudit.recording.tracing.subject import Subject, load
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.runs import Requested
from precaudit.schema.selection import Selection

STEPS, BOUND, RUNS = 8, 1.02, 5
WAYS = (True, False)  # with words and without
NAME = re.compile(r'op_name="([^"]*)"')
HOLDS = re.compile(r" (while|call|conditional|parameter|tuple|get-tuple-element|constant)\(")


class Took(NamedTuple):
    """Seconds of a call by the clock, and of all threads."""

    wall: float
    cpu: float


def trace_size(subject: Subject, prompts: list[Prompt], words: bool) -> int:
    """Return the bytes that a trace with or without words writes."""
    none = mock.patch.object(tracing, "points_with_sums", return_value=())
    with tempfile.TemporaryDirectory() as name, nullcontext() if words else none:
        tracing.trace(subject, Path(name) / "run", prompts, Selection(), tracing.TraceOptions(decode_steps=STEPS))
        return sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())


def price_lines(subject: Subject, prompts: list[Prompt], rounds: int) -> Iterator[Line]:
    """Yield the ratios of calls with words to calls without, in turns, and of what a trace writes."""
    batch, requested = first_batch(subject, prompts)
    for phase in ("prefill", "decode"):
        calls = {words: Timed(subject, batch, requested, phase, requested.row_sums if words else ()) for words in WAYS}
        took = [{w: calls[w].time() for w in (WAYS if i % 2 else WAYS[::-1])} for i in range(rounds + 1)][1:]
        for name in Took._fields:
            ratios = sorted(getattr(x[True], name) / getattr(x[False], name) for x in took)
            having, lacking = ([float(getattr(x[w], name)) for x in took] for w in WAYS)
            note = f"{1000 * median(lacking):.0f} ms; pairs {ratios[0]:.3f} to {ratios[-1]:.3f}"
            yield Line(f"{phase} with words / without, {name}", median(having) / median(lacking), "x", BOUND, note=note)
    sizes = [trace_size(subject, prompts, w) for w in WAYS]
    yield Line("trace with words / without, size", sizes[0] / sizes[1], "x", BOUND, note=f"{sizes[1]:.4g} B")


def first_batch(subject: Subject, prompts: list[Prompt]) -> tuple[Batch, Requested]:
    """Return the first batch of a default trace of the prompts, and what is asked of it."""
    found, _, requested = tracing._request(
        subject, prompts, Selection(), tracing.TraceOptions(decode_steps=STEPS), lambda _: None
    )
    return Batch.of(found[:1], requested), requested


class Timed:
    """A phase's program, compiled here, with what it is called with; every call takes the cache that the last left."""

    def __init__(self, subject: Subject, batch: Batch, requested: Requested, phase: str, sums: tuple[str, ...]) -> None:
        points = {*requested.points, *requested.support, *sums} - {"logits"}
        capture = Capture(frozenset(points), requested.layers, summed=frozenset(sums))
        prompt, n = batch.prompts[0].tokens, batch.length
        shapes = jax.eval_shape(lambda: subject.decoder.init_cache(1, n))
        self.cache = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        tokens, starts = batch.arrays([prompt])
        tables, at = subject.tables(n, batch.lengths(phase)), np.asarray([len(prompt)], np.int32)
        program = prefill_program if phase == "prefill" else decode_program
        given = (tokens, starts, at[None]) if phase == "prefill" else (tokens[:, 0], starts, at)
        self.given = (subject.parameters, tables, *given)
        self.made = compile_program(program(subject, capture), *self.given, self.cache, None)

    def call(self) -> Any:
        """Call it once; return the cache, made."""
        _, self.cache, _ = out = self.made(*self.given, self.cache, None)
        return jax.block_until_ready(out)

    def time(self) -> Took:
        """Return what one call takes."""
        began, used = time.perf_counter(), time.process_time()
        self.call()
        return Took(time.perf_counter() - began, time.process_time() - used)


def share_lines(subject: Subject, prompts: list[Prompt]) -> Iterator[Line]:
    """Yield the share of a program's time that words take, in prefill and in a decode step."""
    batch, requested = first_batch(subject, prompts)
    for phase in ("prefill", "decode"):
        words, plain = (profiled(Timed(subject, batch, requested, phase, sums)) for sums in (requested.row_sums, ()))
        added = {name: ms for name, ms in words.items() if name not in plain}
        rest = sum(words.values()) - sum(added.values())
        by = dict.fromkeys(requested.row_sums, 0.0)
        for name, ms in added.items():
            for point in by:
                by[point] += ms if f"/{point}/" in name else 0.0
        told = ", ".join(f"{point} {100 * ms / rest:.2f}" for point, ms in by.items())
        yield Line(
            f"words in {phase}, of the rest", 100 * sum(added.values()) / rest, "%", note=f"{rest:.0f} ms; {told}"
        )


def profiled(program: Timed) -> dict[str, float]:
    """Return the milliseconds of a call by the names of operations, those of one fusion under its result's."""
    found: dict[str, float] = {}
    for name, nanoseconds in _events(program):
        found[name] = found.get(name, 0.0) + nanoseconds / 1e6 / RUNS
    return found


def _events(program: Timed) -> Iterator[tuple[str, float]]:
    """Yield (name, nanoseconds) of every instruction that ran."""
    text = program.made.call.as_text()  # type: ignore[attr-defined]
    bodies = {m[1]: m[2] for m in re.finditer(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)}
    lines = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", text, re.MULTILINE))

    def name(instruction: str) -> str:
        line = lines[instruction]
        called = re.search(r"calls=%?([\w.-]+)", line)
        names = NAME.findall(line) or NAME.findall(bodies.get(called[1], "") if called else "")
        return str(names[0]) if names else re.sub(r"[.\d]+$", "", instruction)

    program.call()
    with tempfile.TemporaryDirectory() as folder:
        how = jax.profiler.ProfileOptions()
        how.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=how):
            for _ in range(RUNS):
                program.call()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name in lines and not HOLDS.search(lines[event.name]):
                        yield name(event.name), event.duration_ns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="bf16")
    parser.add_argument("--tokens", type=int, default=64, help="of the prompt [64]")
    parser.add_argument("--prompts", type=int, default=1, help="how many [1]: what is checked once a program is shared")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # XLA:CPU runs what it read from disk on fewer threads
    subject = load("smollm2", args.policy, None, "cpu")
    ids = np.random.default_rng(0).integers(0, subject.config.vocab, (args.prompts, args.tokens)).tolist()
    prompts = [Prompt(id=str(i), tokens=tuple(x)) for i, x in enumerate(ids)]
    show([*share_lines(subject, prompts), *price_lines(subject, prompts, args.rounds)])
    return 0


if __name__ == "__main__":
    sys.exit(main())

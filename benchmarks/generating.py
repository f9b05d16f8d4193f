"""Time generation against transformers + torch on the same CPU, and say what limits it; memory, and scoring rollouts.

Greedy, the same weights, prompts of 32 tokens of text. The jobs take turns. Decode: from the first token to the last.
Limit: the bytes of weights and cache that a step reads, over what as many threads read a second in the same run.
Needs the model smollm2; torch beside it ``pip install -e .[oracle]``. Run: python -m benchmarks.generating
--cores 1: both on one core. Where others use the machine, torch's threads wait for each other, and a step takes longer
on two cores than on one.
"""

import argparse
import glob
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.main_job import SETTLE, TEXT, TORCH, Line, llama, show
from precaudit.checks.rollouts.generation import DrawShape, Generated, Generator
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.checks.rollouts.scoring import by_policy
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs import model_tensors
from precaudit.numbers.threads import WORKERS, one_blas_thread
from precaudit.recording.tracing.subject import Subject, load

PROMPT, NEW, BATCHES = 32, 16, (1, 8)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
MOVED = re.compile(r"^(slice|dynamic-slice|convert|copy|bitcast|bitcast-convert|transpose|reshape|parameter|tuple)$")
CHILD = """
import sys
from benchmarks.generating import generator, prompts_of
from precaudit.recording.tracing.subject import load
new = int(sys.argv[1])
subject = load("smollm2", sys.argv[2], None, "cpu")
found = generator(subject, 1, new).generate(prompts_of(subject, 1), [0], new)
assert len(found.tokens[0]) == new
print(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024)
"""


@dataclass
class Took:
    """Tokens, and the seconds of decoding them, of every round."""

    rows: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def prompts_of(subject: Subject, batch: int) -> list[list[int]]:
    """Return prompts of PROMPT tokens: windows of one text, each a token further."""
    ids = subject.tokenizer.encode(TEXT)
    return [ids[i : i + PROMPT] for i in range(batch)]


def generator(subject: Subject, batch: int, new: int) -> Generator:
    """Return a greedy generator that no token ends."""
    return Generator(subject, DrawShape.of(batch, PROMPT, new), Sampling(0), ())


def ours(subject: Subject, batch: int, loop: Any) -> Callable[[], tuple[list[list[int]], float]]:
    """Return a job that draws NEW tokens a sequence; it returns them and the seconds of the decode steps."""
    made, prompts = generator(subject, batch, NEW), prompts_of(subject, batch)

    def run() -> tuple[list[list[int]], float]:
        found: Generated = made.generate(prompts, list(range(batch)), NEW, loop)
        return [list(row) for row in found.tokens], found.decode

    return run


def theirs(model: Any, prompts: list[list[int]]) -> Callable[[], tuple[list[list[int]], float]]:
    """Return the same by transformers' generate, its cache the usual one."""
    import torch
    from transformers import StoppingCriteriaList

    ids, at = torch.tensor(prompts), list[float]()

    def never(tokens: Any, _scores: Any, **_: Any) -> Any:
        at.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)

    stops = StoppingCriteriaList([never])

    def run() -> tuple[list[list[int]], float]:
        at.clear()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
                stopping_criteria=stops, pad_token_id=0,
            )  # fmt: skip
        return out[:, PROMPT:].tolist(), at[-1] - at[0]

    return run


def measured(jobs: dict[str, Callable[[], tuple[list[list[int]], float]]], rounds: int) -> dict[str, Took]:
    """Run every job once unmeasured, then in turn, in every second round backwards."""
    found = {name: Took() for name in jobs}
    for r in range(rounds + 1):
        for name in list(jobs)[:: 1 if r % 2 == 0 else -1]:
            time.sleep(SETTLE)
            found[name].rows, took = jobs[name]()
            if r:
                found[name].seconds.append(took)
    return found


def spread(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def bandwidth(cores: int) -> float:
    """Return bytes a second that as many threads read, each its part of 512 MiB, the best of five."""
    parts = np.ones((cores, (128 << 20) // cores), np.float32)
    best = 0.0
    with one_blas_thread(), ThreadPoolExecutor(cores) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(lambda x: float(x @ x), parts))
            best = max(best, parts.nbytes / (time.perf_counter() - began))
    return best


def step_bytes(subject: Subject, batch: int) -> int:
    """Return the bytes of weights and cache that a step has to read: every matrix once, and the whole cache."""
    cache = subject.decoder.init_cache(batch, DrawShape.of(batch, PROMPT, NEW).slots)
    return sum(x.nbytes for x in jax.tree.leaves((subject.parameters, cache)))


def profiled(subject: Subject, batch: int) -> tuple[Generator, Counter[str], dict[str, str]]:
    """Return the milliseconds that a step of the Python loop spends in each instruction, and of what kind it is.

    By JAX's profiler, of eight steps; instructions run on several threads, and their times are added up.
    """
    made = generator(subject, batch, NEW)
    made.compile()
    step, (*given, state) = made.programs["python"], made.arguments()["python"]
    kinds = kinds_of(step.call.as_text())  # type: ignore[attr-defined]
    state = step(*given, state)
    taken, steps = Counter[str](), 8
    with tempfile.TemporaryDirectory() as folder:
        how = jax.profiler.ProfileOptions()
        how.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=how):
            for _ in range(steps):
                state = step(*given, state)
            jax.block_until_ready(state.going)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name in kinds:
                        taken[event.name] += event.duration_ns / 1e6 / steps
    return made, taken, kinds


def shares(subject: Subject, batch: int) -> dict[str, float]:
    """Return which share of these milliseconds is products, moves (slices, conversions, copies) and others."""
    _, taken, kinds = profiled(subject, batch)
    found = dict.fromkeys(("products", "moves", "others"), 0.0)
    for name, x in taken.items():
        found[kinds[name]] += x / taken.total()
    return found


def loop_lines() -> Iterator[Line]:
    """Yield what both loops hold, and the move that takes longest in a step of the Python loop."""
    subject = load("smollm2", "bf16", None, "cpu")
    for batch in BATCHES:
        made, taken, kinds = profiled(subject, batch)
        for loop in ("python", "while"):
            memory = made.programs[loop].compiled.memory_analysis()
            note = f"{memory.alias_size_in_bytes / 1e6:.0f} MB of state and cache taken over"
            yield Line(f"bf16, batch {batch}, {loop}: temporaries", memory.temp_size_in_bytes / 1e6, "MB", note=note)
        name, ms = next((name, ms) for name, ms in taken.most_common() if kinds[name] == "moves")
        (shape,) = re.findall(rf"%{re.escape(name)} = (\S+?)\{{", made.programs["python"].call.as_text())  # type: ignore[attr-defined]
        yield Line("  the longest move of a Python step", ms, "ms", note=f"to {shape}, of {taken.total():.0f} ms")


def kinds_of(text: str) -> dict[str, str]:
    """Return of every instruction that runs by itself what it is: a product, a move, or another."""
    bodies = {m[1]: m[2] for m in re.finditer(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)}
    operations = {name: re.findall(r"= \S+ ([\w-]+)\(", body) for name, body in bodies.items()}
    found = {}
    for name, operation, called in re.findall(r"%([\w.-]+) = \S+ ([\w-]+)\((?:[^\n]*calls=%([\w.-]+))?", text):
        inside = operations.get(called, []) if operation == "fusion" else [operation]
        if operation in ("while", "call", "conditional", "parameter", "tuple", "get-tuple-element", "constant"):
            continue
        if {"dot", "custom-call"} & {*inside}:
            found[name] = "products"
        else:
            found[name] = "moves" if all(MOVED.match(x) or x == "constant" for x in inside) else "others"
    return found


def against_torch(rounds: int, cores: int) -> Iterator[Line]:
    """Yield our decoding against transformers', and each against the limit."""
    checkpoint = open_checkpoint("smollm2")
    weights = {name: checkpoint.tensors.read_tensor(name) for name in model_tensors(checkpoint.config)}
    rate = bandwidth(cores)
    yield Line(f"limit: reading, cores: {cores}, best", rate / 1e9, "GB/s")
    for policy, dtype in DTYPES.items():
        subject = load("smollm2", policy, None, "cpu")
        model = torch_model(checkpoint.config, weights, dtype, cores) if TORCH else None
        for batch in BATCHES:
            yield from pair(subject, model, batch, rounds, rate)


def torch_model(config: Any, weights: Any, dtype: str, cores: int) -> Any:
    import torch

    model = llama(config, weights, dtype)
    torch.set_num_threads(cores)
    return model


def pair(subject: Subject, model: Any, batch: int, rounds: int, rate: float) -> Iterator[Line]:
    """Yield a policy and batch: milliseconds of a step, the ratio, and what ours spends them on."""
    jobs = {"while loop": ours(subject, batch, "while")}
    if model is not None:
        jobs["torch"] = theirs(model, prompts_of(subject, batch))
    found, steps = measured(jobs, rounds), NEW - 1
    least = step_bytes(subject, batch) / rate
    what = f"{DTYPES[subject.policy.name]}, batch {batch}"
    for name, took in found.items():
        step = median(took.seconds) / steps
        note = f"{batch / step:.1f} tokens/s, {step / least:.1f} x reading weights and cache"
        yield Line(f"{what}, {name}: a decode step", 1e3 * step, "ms", note=note)
    if model is not None:
        mine, other = found.values()
        ratios = [b / a for a, b in zip(mine.seconds, other.seconds, strict=True)]
        same = sum(a == b for a, b in zip(mine.rows, other.rows, strict=True))
        note = f"{spread(ratios)}; the same tokens in {same} of {batch} sequences"
        yield Line("  tokens/s, ours / torch", median(ratios), "x", note=note)
    told = ", ".join(f"{name} {100 * x:.0f} %" for name, x in shares(subject, batch).items())
    yield Line("  least, and ours by instructions", 1e3 * least, "ms", note=told)


def memory_lines() -> Iterator[Line]:
    """Yield what a process that draws in bfloat16 holds at most beyond the cache, at 64 and at 1,024 new tokens."""
    subject, beyond = load("smollm2", "bf16", None, "cpu"), dict[int, float]()
    for new in (64, 1024):
        done = subprocess.run([sys.executable, "-c", CHILD, str(new), "bf16"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        slots = DrawShape.of(1, PROMPT, new).slots
        cache = sum(x.nbytes for x in jax.tree.leaves(subject.decoder.init_cache(1, slots)))
        beyond[new] = int(done.stdout.split()[-1]) - cache
        note = f"a cache of {slots} slots, {cache / 1e6:.0f} MB, apart"
        yield Line(f"bf16, peak memory, {new:,} new tokens", beyond[new] / 1e6, "MB", note=note)
    yield Line("  1,024 / 64", beyond[1024] / beyond[64], "x", 1.1)


def scoring_line(count: int) -> Line:
    """Return the seconds of scoring rollouts of 128 tokens under bf16, and what the process held at most."""
    subject = load("smollm2", "bf16", None, "cpu")
    ids = np.random.default_rng(0).integers(0, subject.config.vocab, (count, PROMPT + 128)).tolist()
    rollouts = [Rollout(str(i), tuple(x[:PROMPT]), tuple(x[PROMPT:]), ()) for i, x in enumerate(ids)]
    by_policy(subject, rollouts[:8], 1.0, lambda *_: None)
    began, used = time.perf_counter(), time.process_time()
    by_policy(subject, rollouts, 1.0, lambda *_: None)
    took, used = time.perf_counter() - began, time.process_time() - used
    with open("/proc/self/status", encoding="ascii") as status:
        peak = int(status.read().partition("VmHWM:")[2].split()[0]) / 1024**2
    whole = 8 * 256 * subject.config.vocab * 4 / 1e9
    note = f"{used:.0f} CPU seconds; peak memory {peak:.2f} GiB; logits [8, 256, V] alone would be {whole:.1f} GB"
    return Line(f"scoring {count:,} rollouts of 128 tokens, bf16", took, "s", note=note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 5, and 40 rollouts instead of 200")
    parser.add_argument("--part", choices=["torch", "loops", "memory", "scoring"], help="only this")
    parser.add_argument("--rollouts", type=int, help="to score [200]")
    parser.add_argument("--cores", type=int, default=WORKERS, help="of the comparison with torch")
    args = parser.parse_args()
    if args.part == "scoring":  # in a process of its own: what it held at most is told
        show([scoring_line(args.rollouts or (40 if args.quick else 200))])
        return 0
    if args.part in (None, "memory"):  # first, while this process is small: a child's peak begins at what it held
        show(list(memory_lines()))
    if args.part is None:
        more = ["--quick"] if args.quick else []
        subprocess.run([sys.executable, "-m", "benchmarks.generating", "--part", "scoring", *more], check=True)
    if args.part in (None, "loops"):
        show(list(loop_lines()))
    if args.part in (None, "torch"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # before JAX and torch make threads
        show(list(against_torch(2 if args.quick else 5, args.cores)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What auditing a program costs beside running it: SmolLM2's decoder as a program, over one prompt (``make bench``).

Capture of all its points, and of one layer's, against the bare program; the local check (FP64, honest emulations, drawn
realisations) against a forward; and the memory of the FP64 pass with four times the layers of a scan.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.emulate import exactly
from precaudit.interpreters.jaxpr.tag import TapChoice, Which
from precaudit.numbers.allocation import share_freed_memory
from precaudit.recording.programs.own import prefill_call
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.tracing.subject import load
from precaudit.references.traced.local import Emulations

CAPTURE, CHECK = 1.15, 10.0  # bounds: times the bare program


def seconds(run: Callable[[], Any], times: int) -> float:
    """Return the median of some runs after one that compiles."""
    jax.block_until_ready(run())
    took = []
    for _ in range(times):
        began = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - began)
    return median(took)


def line(what: str, value: float, bound: float | None, note: str) -> None:
    """Print a ratio and its bound."""
    verdict = "" if bound is None else f" (bound {bound:g}: {'ok' if value <= bound else 'over'})"
    print(f"{what:<44} {value:8.2f} x{verdict}  {note}")


def speeds(program: Program, times: int, which: Which) -> None:
    """Print what capture and the local check of some taps take against the bare program."""
    made = prepare_program(program, TapChoice(which))
    (inputs,) = program.cases.values()
    bare, captured = jax.jit(program.call), jax.jit(reap(made.call))
    plain = seconds(lambda: bare(program.params, *inputs), times)
    tapped = seconds(lambda: captured(program.params, *inputs), times)
    line("capture of all points / bare", tapped / plain, None, f"{tapped:.2f} s : {plain:.2f} s")
    one = prepare_program(program, TapChoice(which), layers=(0,))
    some = jax.jit(reap(one.call, layers=(0,)))
    held = seconds(lambda: some(program.params, *inputs), times)
    line("capture of one layer's points / bare", held / plain, CAPTURE, f"{held:.2f} s : {plain:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        opened = trace_program(program, Path(folder) / "run", ProgramSelection(taps=which))
        taps, segments = opened.tensors("a", 0, "taps"), Emulations(made)

        def checked() -> None:
            segments.records(opened, "a", 0, taps, (program.params, *inputs))

        first = clocks(checked)
        pairs = [(clocks(lambda: bare(program.params, *inputs)), clocks(checked)) for _ in range(times)]
    ratio, cpu = (median(made[i] / ran[i] for ran, made in pairs) for i in (0, 1))
    forward, check = ([median(x[i] for x in each) for i in (0, 1)] for each in zip(*pairs, strict=True))
    line("local check of all points / bare", ratio, CHECK, f"{check[0]:.1f} s : {forward[0]:.2f} s, interleaved")
    line("the same, in seconds of all cores", cpu, None, f"{check[1]:.1f} s : {forward[1]:.2f} s, {times} pairs")
    print(f"{first[0]:.1f} s with compiling, of all cores {first[1]:.1f} s")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB resident at most")


def clocks(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds that a run takes, by the clock and of all cores."""
    began = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - began[0], time.process_time() - began[1]


def scanned(layers: int) -> Program:
    """Return a program that scans over layers of two products."""
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((2, layers, 256, 256)).astype(np.float32) / 16

    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.silu(x @ w[0]) @ w[1], None

    def call(params: Any, x: Any) -> Any:
        return jax.lax.scan(layer, x, params)[0]

    return Program(call, (weights[0], weights[1]), {"a": (draw.standard_normal((512, 256)).astype(np.float32),)})


def memory(program: Program) -> float:
    """Return the bytes of temporaries of the FP64 pass of a program, as XLA plans them."""
    made = prepare_program(program)
    (inputs,) = program.cases.values()
    shapes = {s.name: jax.ShapeDtypeStruct((*s.stacked, *s.shape), s.dtype) for s in made.sites}
    with jax.enable_x64(True):
        compiled = jax.jit(exactly(made.call)).lower(shapes, program.params, *inputs).compile()
    return float(compiled.memory_analysis().temp_size_in_bytes)


def main() -> int:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--automatic", action="store_true", help="without the decoder's own taps")
    args = parser.parse_args()
    share_freed_memory()  # as every command does
    try:
        subject = load("smollm2", device="cpu")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    ids = np.random.default_rng(0).integers(0, subject.config.vocab, args.tokens)
    program = prefill_call(subject, {"a": ids})
    speeds(replace(program, outputs=None), args.times, "automatic" if args.automatic else "own")
    few, many = (memory(scanned(n)) for n in (8, 32))
    line("temporaries of FP64, 32 layers / 8", many / few, 1.1, f"{many / 1e6:.1f} MB : {few / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

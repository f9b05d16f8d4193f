"""Time a decode step in bfloat16 against float32 and against the physical limit: reading the weights once.

Needs the model smollm2. 256 cache slots; captured: q, k, v, attn_out of every layer. What is compared takes turns.
"As written": without precaudit/interpreters/jaxpr/narrow.py, one step only, since XLA:CPU takes seconds for it.
Run: python -m benchmarks.decoding
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.main_job import Line, alternated, compared, copy_line, show
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.recording.tracing.programs import Capture, _compile, decode_program
from precaudit.recording.tracing.subject import Subject, load

BATCHES, SLOTS = (1, 8), 256
POINTS = frozenset({"q", "k", "v", "attn_out"})


def steps(subject: Subject, program: Any, batch: int) -> Callable[[], object]:
    """Return a job that decodes one token of every sequence, always into the same slot of one cache."""
    held = [subject.decoder.init_cache(batch, SLOTS)]
    tokens, starts = np.arange(batch, dtype=np.int32) + 5, np.zeros(batch, np.int32)
    given = (subject.parameters, subject.tables(SLOTS), tokens, starts, np.full(batch, 100, np.int32))

    def step() -> object:
        logits, held[0], taps = program(*given, held[0], None)
        return jax.block_until_ready((logits, taps))

    return step


def lines(rounds: int) -> Iterator[Line]:
    """Yield the measured ratios."""
    copy = copy_line(3)
    subjects = {name: load("smollm2", name, None, "cpu") for name in ("bf16", "fp32")}
    layers = tuple(range(subjects["bf16"].config.layers))
    captures = {"": None, ", captured": Capture(POINTS, layers)}
    for batch in BATCHES:
        jobs = {
            name + how: steps(subject, decode_program(subject, capture), batch)
            for how, capture in captures.items()
            for name, subject in subjects.items()
        }
        found = alternated(jobs, rounds)
        for how in captures:
            yield compared(f"decode step, batch {batch}{how}, bf16 / float32", found, "bf16" + how, "fp32" + how, 2.0)
    options = tuple(compiler_options(subjects["bf16"].policy).items())
    plain = partial(_compile, subjects["bf16"].decoder, None, "decode", options)
    last = {"plain": steps(subjects["bf16"], plain(""), batch), "bits": jobs["bf16"]}
    once = alternated(last, 1)
    yield compared("  bf16 as written / moved as bits", once, "plain", "bits")
    size = sum(x.nbytes for x in jax.tree.leaves(subjects["bf16"].parameters))
    least = size / (copy.value * 1e9)
    yield Line("  limit: reading the weights once", min(found["bf16"]) / least, "x", note=f"{size / 1e6:.0f} MB")
    yield copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 pairs instead of 5")
    show(list(lines(2 if parser.parse_args().quick else 5)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

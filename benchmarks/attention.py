"""Time and error of the attention kernels: prefill of one prompt of 256 tokens.

    python -m benchmarks.attention tiny smollm2

Every kernel under bf16, and naive with float32 scores. Time: the median of calls that take turns, over that of naive.
Errors: relative, of attn_out over all layers against FP64 on the program's own q, k and v, and of all logits against
FP64 of the whole model; KL in nats, the mean over positions.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median

import numpy as np

from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model, attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.tracing.programs import Capture, prefill_program
from precaudit.recording.tracing.subject import Subject, load
from precaudit.schema.metrics.logits import kl
from precaudit.schema.metrics.sizes import norm
from precaudit.schema.prompts import encode_prompt, shipped_prompts

TOKENS, CALLS = 256, 5
SETTINGS = {
    "naive": {},
    "naive, scores=float32": {"scores": "float32"},
    "sdpa": {"attention": "sdpa"},
    "flash": {"attention": "flash"},
}


def prompt(subject: Subject) -> Array:
    """Return TOKENS token ids of the shipped prompt that is long enough."""
    found = (encode_prompt(p, subject.tokenizer)[1] for p in shipped_prompts() if p.id == "l1_source")
    return np.asarray(next(found)[:TOKENS], np.int32)


def arguments(subject: Subject, tokens: Array) -> tuple[object, ...]:
    """Return what prefill takes, logits wanted at every position."""
    rows = np.arange(len(tokens), dtype=np.int32)[None]
    return subject.parameters, subject.tables(len(tokens)), tokens[None], np.zeros(1, np.int32), rows, None, None


def own_error(subject: Subject, tokens: Array) -> float:
    """Return attn_out's relative error on the program's own q, k and v, over all layers."""
    layers = tuple(range(subject.config.layers))
    taps = prefill_program(subject, Capture(frozenset(("q", "k", "v", "attn_out")), layers))(
        *arguments(subject, tokens)
    )[2]
    q, k, v, out = (widen(np.asarray(taps[name])[:, 0]) for name in ("q", "k", "v", "attn_out"))
    positions = np.arange(len(tokens))
    exact = np.stack(
        [attention(q[i], k[i], v[i], positions, AttentionRule.of(subject.config, i), FP64) for i in layers]
    )  # fmt: skip
    return norm(out - exact) / norm(exact)


def measured(name: str) -> Iterator[str]:
    """Yield a line for each kernel."""
    subjects = {label: load(name, "bf16", settings, "cpu") for label, settings in SETTINGS.items()}
    first = subjects["naive"]
    tokens = prompt(first)
    exact: list[Array] = []
    wanted = Wanted({"logits"}, None, [np.arange(len(tokens))])
    book = Model(first.config, first.checkpoint.tensors.read_tensor)
    forward(book, Sequences([tokens]), [FP64], wanted, lambda _i, _at, _point, x: exact.append(np.array(x)))
    calls = {label: (prefill_program(s, None), arguments(s, tokens)) for label, s in subjects.items()}
    logits = {label: np.asarray(program(*given)[0], np.float64)[0] for label, (program, given) in calls.items()}
    seconds: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(CALLS):
        for label, (program, given) in calls.items():
            began = time.perf_counter()
            program(*given)[0].block_until_ready()
            seconds[label].append(time.perf_counter() - began)
    for label, subject in subjects.items():
        ratios = [a / b for a, b in zip(seconds[label], seconds["naive"], strict=True)]
        apart = norm(logits[label] - exact[0]) / norm(exact[0])
        mean = float(np.mean([kl(p, q) for p, q in zip(exact[0], logits[label], strict=True)]))
        yield (
            f"{name:8} {label:22} {1e3 * median(seconds[label]):8.1f} ms {median(ratios):5.2f} × "
            f"{own_error(subject, tokens):9.2e} {apart:9.2e} {mean:9.2e}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=("tiny", "smollm2"))
    given = parser.parse_args()
    print(f"{'model':8} {'attention':22} {'time':>11} {'':7} {'attn_out':>9} {'logits':>9} {'KL':>9}")
    for model in given.models:
        for line in measured(model):
            print(line, flush=True)

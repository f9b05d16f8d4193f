"""How far correct engines are from FP64, in units of the noise that they are judged by, as a table."""

import argparse
from dataclasses import replace

import numpy as np

from precaudit.checks.rollouts.parity import score_parity
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.scoring import by_policy
from precaudit.progress import silent
from precaudit.recording.tracing.subject import load
from precaudit.schema.records.base import value

HALF = dict.fromkeys(("activations", "residual", "scores", "probs", "attn_out", "mlp", "kv_cache"), "float16")
WAYS = {
    "bf16": {}, "float16": HALF, "bfloat16 logits": {"logits": "bfloat16"}, "sdpa": {"attention": "sdpa"},
    "flash": {"attention": "flash"}, "no excess precision": {"excess_precision": "off"},
}  # fmt: skip
SIZES = ((2, 4), (6, 20), (80, 100))  # sequences, tokens of each


def random_rollouts(vocab: int, sequences: int, tokens: int, seed: int) -> list[Rollout]:
    """Return rollouts of random token ids, without log-probabilities."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(sequences):
        prompt, drawn = (tuple(rng.integers(0, vocab, n).tolist()) for n in (5 + i % 7, tokens))
        found.append(Rollout(f"r{i}", prompt, drawn, ()))
    return found


def main() -> None:
    """Print the root mean square and the largest difference of every engine, for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    subject = load(given.model, "bf16", device="cpu")
    for sequences, tokens in SIZES:
        worst = (0.0, 0.0)
        for seed in range(given.seeds if sequences * tokens < 1000 else 1):
            asked = random_rollouts(subject.config.vocab, sequences, tokens, seed)
            for way, settings in WAYS.items():
                made = by_policy(load(given.model, "bf16", settings, device="cpu"), asked, 1.0, silent)
                engine = [replace(r, logprobs=tuple(map(float, x))) for r, x in zip(asked, made, strict=True)]
                found = score_parity(subject, engine, engine=subject).rounding
                rms, largest = value(found.rms), value(found.largest)
                print(f"{sequences * tokens:6} tokens  {way:20} rms {rms:.2f}  largest {largest:.1f}  {found.status}")
                worst = max(worst[0], rms), max(worst[1], largest)
        print(f"{sequences * tokens:6} tokens  at most: rms {worst[0]:.2f}, largest {worst[1]:.1f}")


if __name__ == "__main__":
    main()

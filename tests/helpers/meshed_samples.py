"""Tokens sampled from tiny on eight devices of a CPU, beside those of one, as a line of JSON; and a sweep on a mesh.

Run: python -m tests.helpers.meshed_samples FOLDER
"""

import json
import sys
from pathlib import Path

from precaudit.checks.rollouts.generation import DrawShape, Generator
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.cli import run
from precaudit.recording.tracing.subject import load

PROMPTS = [tuple(range(3 + i, 9 + 3 * i)) for i in range(4)]
WAYS = {  # mesh, sequences sampled together
    "one": (None, 4),
    "alone": (None, 1),
    "pairs": ("data=2", 4),
    "each": ("data=4", 4),
    "both": ("data=2,model=2", 4),
    "filled": ("data=2,model=2", 3),
}


def sample(policy: str, mesh: str | None, together: int) -> list[list[object]]:
    """Return (tokens, log-probabilities) of each prompt."""
    subject = load("tiny", policy, device="cpu", mesh=mesh)
    made = Generator(subject, DrawShape.of(together, 18, 6), Sampling(0.7, seed=3), ())
    found: list[list[object]] = []
    for first in range(0, len(PROMPTS), together):
        some = PROMPTS[first : first + together]
        given = made.generate(some, list(range(first, first + len(some))), 6)
        found += [list(x) for x in zip(given.tokens, given.logprobs, strict=True)]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    found = {f"bf16 {name}": sample("bf16", *way) for name, way in WAYS.items()}
    found |= {f"fp32-highest {name}": sample("fp32-highest", *WAYS[name]) for name in ("one", "pairs", "both")}
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"id": "a", "tokens": [5, 6, 7]}\n{"id": "b", "tokens": [9, 8]}\n')
    how = ("--layers", "0", "--decode-steps", "1", "--new-tokens", "3", "--rounds", "1", "--mesh", "data=2,model=2")
    code = run(["sweep", "tiny", "--policy", "bf16,fp32", "--prompts", str(prompts), *how, "-o", str(folder / "sweep")])
    print(json.dumps({"code": code, "samples": found}))


if __name__ == "__main__":
    main()

"""Runs of tiny on eight devices of a CPU, written to a folder: what tests of meshes read on one device.

Run: python -m tests.helpers.meshed_runs FOLDER [NAMES]
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.scoring import by_policy
from precaudit.models.jax_decoder.arithmetic import dot
from precaudit.models.jax_decoder.parts import project
from precaudit.progress import silent
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection

PROMPTS = [Prompt(id=name, prompt=text) for name, text in (("a", "def f(x):"), ("b", "The sky is"), ("c", "One, two"))]
MESHES = {"one": "data=1", "data": "data=2", "both": "data=2,model=2", "replicated": "model=4"}


def shard_left_out(x, weight, bias, a):
    """Project without the last quarter of the terms, where these are the MLP's width: one of four devices."""
    if weight.shape[-1] != 3 * weight.shape[-2]:
        return project(x, weight, bias, a)
    kept = 3 * weight.shape[-1] // 4
    return dot(x[..., :kept], weight[:, :kept], (x.ndim - 1, 1), a.activations, a)


def record(folder: Path, name: str, mesh: str, **changed) -> None:
    subject = load("tiny", "bf16", device="cpu", mesh=mesh)
    subject = replace(subject, parts=replace(subject.parts, **changed)) if changed else subject
    trace(subject, folder / name, PROMPTS, Selection.parse(points="all"), TraceOptions(decode_steps=2))


def score(folder: Path) -> None:
    """Write what rollouts' log-probabilities are off one device's on meshes, by policy and mesh."""
    given = [Rollout("a", tuple(range(5, 13)), (20, 30, 40, 50), ()), Rollout("b", (15, 16, 17), (21, 31), ())]
    off: dict[str, float] = {}
    for policy in ("bf16", "fp32-highest"):
        one, *others = (
            by_policy(load("tiny", policy, device="cpu", mesh=mesh), given, 1.0, silent)
            for mesh in (None, "data=4", "data=2,model=2")
        )
        for mesh, made in zip(("data", "both"), others, strict=True):
            off[f"{policy} {mesh}"] = max(float(abs(x - y).max()) for x, y in zip(one, made, strict=True))
    (folder / "scored.json").write_text(json.dumps(off))


def main() -> None:
    folder = Path(sys.argv[1])
    if not sys.argv[2:]:
        score(folder)
    for name in sys.argv[2:] or (*MESHES, "faulty"):
        if name == "faulty":
            record(folder, name, "model=4", project=shard_left_out)
        else:
            record(folder, name, MESHES[name])


if __name__ == "__main__":
    main()

"""Runs of the small models of refs/fixtures."""

import numpy as np

from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.prompts import Prompt
from tests.helpers.paths import FIXTURES
from tests.helpers.runs import everything

SMALL = sorted(p.name for p in FIXTURES.iterdir() if (p / "config.json").is_file())

FAMILIES_ONCE = (
    "llama-gqa", "llama-yarn", "qwen2-gqa", "qwen3-window-yarn", "qwen3-moe-gqa", "mistral-window", "gemma2-caps",
    "gemma3-gqa", "phi3-partial", "olmo2-gqa", "granite-gqa",
)  # fmt: skip

TOKENS = tuple(int(t) for t in np.random.default_rng(5).integers(0, 96, 37))


def fixture_run(folder, name, policy="fp32-highest", select=None, tokens=(TOKENS,), **options):
    prompts = [Prompt(id=f"p{i}", tokens=t) for i, t in enumerate(tokens)]
    subject = load(str(FIXTURES / name), policy, device="cpu")
    return trace(subject, folder, prompts, select or everything(), TraceOptions(decode_steps=3, force=True, **options))

"""Every family end to end on random models: trace, compare, judge; and NumPy FP64 against transformers in float64.

    python -m exams.families            one configuration a family
    python -m exams.families --all      every fixture

Columns: records judged and those that fail the default rule in bf16; points; the worst local error no emulation
explains, in unit roundoffs (bfloat16 and float32 outputs); the largest relative distance of logits and hidden states
from transformers' (refs/fixtures).
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from precaudit.judging.rules import judge
from precaudit.models.checkpoints import open_checkpoint
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.limits import default_limits
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.selection import Selection
from tests.helpers.fixture_runs import FAMILIES_ONCE, SMALL, TOKENS
from tests.helpers.paths import FIXTURES
from tests.helpers.textbook_values import expected, reference, relative


class Row(NamedTuple):
    """A line of the table; ``left``: what no emulation explains, in u, by format of the output."""

    name: str
    family: str
    points: int
    judged: int
    failed: list[str]
    left: dict[str, float]
    oracle: float


def row(folder: Path, name: str, policy: str, device: str) -> Row:
    """Run one fixture end to end."""
    subject = load(str(FIXTURES / name), policy, device=device)
    prompts = [Prompt(id=f"p{i}", tokens=t) for i, t in enumerate((TOKENS, TOKENS[:9]))]
    options = TraceOptions(decode_steps=3, force=True)
    run = trace(subject, folder / "run", prompts, Selection.parse(points="all"), options)
    found = compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
    verdicts = [(e, v) for e in found.errors if (v := judge(e, default_limits())) is not None]
    failed = [
        f"{v.status} {e.kind} {e.phase} {e.layer} {e.point} {v.metric} {v.value} of {v.limit} {v.text}"
        for e, v in verdicts
        if v.status != "pass"
    ]
    left: dict[str, float] = {}
    for e in found.errors:
        if e.kind == "local" and e.unexplained is not None and e.dtype is not None:
            left[e.dtype] = max(left.get(e.dtype, 0.0), value(e.unexplained.u))
    want = expected(name)
    hidden, logits = reference(open_checkpoint(str(FIXTURES / name)), want["tokens"])
    pairs = [(logits, want["logits"]), *zip(hidden, want["hidden"], strict=True)]
    oracle = max(float(relative(np.asarray(a), b)) for a, b in pairs)
    return Row(name, subject.config.family, len({e.point for e in found.errors}), len(verdicts), failed, left, oracle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="every fixture")
    parser.add_argument("--policy", default="bf16")
    parser.add_argument("--device", default="cpu", choices=("cpu", "gpu", "tpu"))
    given = parser.parse_args()
    print(f"{'model':22} {'family':12} points judged failed  bf16 left, u  f32 left, u  from float64")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in SMALL if given.all else FAMILIES_ONCE:
            r = row(Path(folder), name, given.policy, given.device)
            bf16, f32 = (f"{r.left.get(kind, float('nan')):12.2g}" for kind in ("bfloat16", "float32"))
            print(
                f"{r.name:22} {r.family:12} {r.points:6} {r.judged:6} {len(r.failed):6}  {bf16} {f32}  {r.oracle:.1e}"
            )
            for line in r.failed[:3]:
                print(f"    {line}")
            wrong += bool(r.failed) or not r.oracle <= 1e-12
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

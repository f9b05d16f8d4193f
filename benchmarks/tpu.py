"""What a TPU that is not here would make of models, beside this CPU (``make tpu``).

A row a model, policy and phase: relative error of logits from FP64, pooled over all recorded rows (one alone is
uncertain by a factor of 2), on this CPU and as predicted; their ratio; the gate's verdicts on the predicted run.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from precaudit.comparison.compare import Options, compare
from precaudit.graphs.decoder import LOGITS
from precaudit.judging.gate import gate
from precaudit.prompts import shipped_prompts
from precaudit.records import value
from precaudit.runs.written import Comparison
from precaudit.selection import Selection
from precaudit.tracing.subject import load
from precaudit.tracing.trace import Options as TraceOptions
from precaudit.tracing.trace import trace

POLICIES = ("fp32", "fp32-highest", "bf16")
PROMPTS = ("s1_fact", "s2_code", "p5_ba")
STEPS = 4
# What the predicted error over this CPU's has to be: float32 in one pass errs a thousand times more, the rest as much.
BOUNDS = {"fp32": (1000.0, np.inf), "fp32-highest": (0.5, 2.0), "bf16": (1 / 3, 3.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--targets", default="v5e")
    given = parser.parse_args()
    sizes = f"{'CPU':>8} {'TPU':>8} {'TPU/CPU':>8}"
    print(f"{'model':8} {'policy':13} {'target':7} {'phase':8} {sizes}  verdicts of the TPU")
    outside = 0
    for model in given.models.split(","):
        for policy in POLICIES:
            with tempfile.TemporaryDirectory() as folder:
                cpu = recorded(Path(folder), model, policy, "cpu")
                for target in given.targets.split(","):
                    tpu = recorded(Path(folder), model, policy, f"tpu-predicted:{target}")
                    verdicts = ", ".join(f"{n} {status}" for status, n in gate(tpu).counts.items())
                    for phase in ("prefill", "decode"):
                        a, b = error(cpu, phase), error(tpu, phase)
                        low, high = BOUNDS[policy]
                        outside += not low <= b / a <= high
                        told = "" if low <= b / a <= high else f"  outside {low:.2g} to {high:.2g}"
                        sizes = f"{a:8.1e} {b:8.1e} {b / a:8.2g}"
                        print(f"{model:8} {policy:13} {target:7} {phase:8} {sizes}  {verdicts}{told}", flush=True)
    print(f"{outside} outside their bounds; files from real TPUs: none")


def recorded(folder: Path, model: str, policy: str, device: str) -> Comparison:
    """Trace the default points of three prompts and compare them."""
    prompts = [p for p in shipped_prompts() if p.id in PROMPTS]
    run = trace(
        load(model, policy, device=device), folder / device.replace(":", "-"), prompts,
        Selection.parse(points="q,k,v,attn_out,logits:all", phases="prefill,decode"), TraceOptions(STEPS),
    )  # fmt: skip
    return compare(run, options=Options(accum=(), cache=folder / "references"))


def error(found: Comparison, phase: str) -> float:
    """Return the relative error of a phase's logits, pooled over records by their rows."""
    local = [e for e in found.errors if (e.kind, e.point, e.phase) == ("forward", LOGITS, phase)]
    return float(np.sqrt(np.average([value(e.rel_l2) ** 2 for e in local], weights=[e.n for e in local])))


if __name__ == "__main__":
    main()

"""What a TPU that is not here would make of models, beside this CPU (``make tpu``).

A row a model, policy and phase: relative error of logits from FP64, pooled over all recorded rows (one alone is
uncertain by a factor of 2), on this CPU and as predicted; their ratio; the gate's verdicts on the predicted run. Then
the same of a training step's gradient, what the shipped policies compile to on one chip, and what four exchange.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from exams.tpu_compiled import CHIPS, collectives, policies
from exams.tpu_gradient import measured
from precaudit.interpreters.tpu.target import parse_target
from precaudit.judging.gate import gate
from precaudit.recording.runs.written import Comparison
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.prompts import shipped_prompts
from precaudit.schema.records.base import value
from precaudit.schema.selection import Selection

PARTS = ("models", "gradient", "policies", "chips")
POLICIES = ("fp32", "fp32-highest", "bf16")
PROMPTS = ("s1_fact", "s2_code", "p5_ba")
STEPS = 4
# What the predicted error over this CPU's has to be: float32 in one pass errs a thousand times more, the rest as much.
BOUNDS = {"fp32": (1000.0, np.inf), "fp32-highest": (0.5, 2.0), "bf16": (1 / 3, 3.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--targets", default="v5e")
    parser.add_argument("--compiled-for", default="v5e,v6e", help="targets that every shipped policy is compiled for")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to make: " + ", ".join(PARTS))
    given = parser.parse_args()
    targets, parts = given.targets.split(","), given.parts.split(",")
    outside = 0
    if {"models", "gradient"} & set(parts):
        sizes = f"{'CPU':>8} {'TPU':>8} {'TPU/CPU':>8}"
        print(f"{'model':8} {'policy':13} {'target':7} {'phase':8} {sizes}  verdicts of the TPU")
    if "models" in parts:
        outside += sum(of_model(model, policy, targets) for model in given.models.split(",") for policy in POLICIES)
    if "gradient" in parts:
        outside += sum(of_gradient(target) for target in targets)
    if {"models", "gradient"} & set(parts):
        print(f"{outside} outside their bounds; files from real TPUs: none")
    if "policies" in parts:
        print("\nproducts of tiny under every shipped policy, on one chip")
        for name, told in policies("tiny", [parse_target(x) for x in given.compiled_for.split(",")]):
            print(f"{name}  {told}", flush=True)
    if "chips" in parts:
        print(f"\nwhat {CHIPS} chips of {targets[0]} exchange: tiny, heads and MLP cut over them")
        for policy in ("fp32", "bf16"):
            for phase, says, n in collectives("tiny", policy, parse_target(targets[0])):
                print(f"{policy:5} {phase:8} {n} × {says}", flush=True)


def of_model(model: str, policy: str, targets: Sequence[str]) -> int:
    """Print a model's rows under a policy; return how many are outside their bounds."""
    outside = 0
    with tempfile.TemporaryDirectory() as folder:
        cpu = recorded(Path(folder), model, policy, "cpu")
        for target in targets:
            tpu = recorded(Path(folder), model, policy, f"tpu-predicted:{target}")
            verdicts = ", ".join(f"{n} {status}" for status, n in gate(tpu).counts.items())
            for phase in ("prefill", "decode"):
                outside += row(model, policy, target, phase, error(cpu, phase), error(tpu, phase), verdicts)
    return outside


def of_gradient(target: str) -> int:
    """Print the rows of the training step's gradient; return how many are outside their bounds."""
    found = [row("step", e.way, target, "gradient", e.cpu, e.tpu, "") for e in measured(parse_target(target))]
    return sum(found)


def row(model: str, policy: str, target: str, phase: str, cpu: float, tpu: float, verdicts: str) -> bool:
    """Print one row; return whether it is outside its bounds."""
    low, high = BOUNDS[policy]
    outside = not low <= tpu / cpu <= high
    told = f"{verdicts}  outside {low:.2g} to {high:.2g}" if outside else verdicts
    sizes = f"{cpu:8.1e} {tpu:8.1e} {tpu / cpu:8.2g}"
    print(f"{model:8} {policy:13} {target:7} {phase:8} {sizes}  {told}".rstrip(), flush=True)
    return outside


def recorded(folder: Path, model: str, policy: str, device: str) -> Comparison:
    """Trace the default points of three prompts and compare them."""
    prompts = [p for p in shipped_prompts() if p.id in PROMPTS]
    run = trace(
        load(model, policy, device=device), folder / device.replace(":", "-"), prompts,
        Selection.parse(points="q,k,v,attn_out,logits:all", phases="prefill,decode"), TraceOptions(STEPS),
    )  # fmt: skip
    return compare(run, options=CompareOptions(accum=(), cache=folder / "references"))


def error(found: Comparison, phase: str) -> float:
    """Return the relative error of a phase's logits, pooled over records by their rows."""
    local = [e for e in found.errors if (e.kind, e.point, e.phase) == ("forward", LOGITS, phase)]
    return float(np.sqrt(np.average([value(e.rel_l2) ** 2 for e in local], weights=[e.n for e in local])))


if __name__ == "__main__":
    main()

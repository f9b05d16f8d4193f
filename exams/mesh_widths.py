"""What cutting a model over chips that are not here costs: errors from FP64, predicted for model = 1, 2, 4 chips.

A row a width and phase. Local: of the two sums that are made in parts, each on its recorded inputs; forward: of logits.
Pooled over all recorded rows; × those of one chip. Run: python -m exams.mesh_widths [--models tiny,smollm2]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from precaudit.judging.gate import gate
from precaudit.recording.runs.written import Comparison
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.prompts import shipped_prompts
from precaudit.schema.records.base import value
from precaudit.schema.selection import Selection

WIDTHS = {"tiny": (1, 2, 4), "smollm2": (1, 3)}  # that divide the heads and the MLP's width
MODELS = ("tiny",)  # of the exam
SUMS = tuple(name for name, point in POINTS.items() if point.shares_terms)
PROMPTS = ("s1_fact", "s2_code", "p5_ba")
STEPS = 4
Sizes = dict[tuple[str, str], float]


def main() -> int:
    """Print rows; return 1 where a verdict is no pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(WIDTHS))
    parser.add_argument("--target", default="v5e:2x2", help="which TPU, and its chips")
    parser.add_argument("--policy", default="bf16")
    parser.add_argument("--prompts", default=",".join(PROMPTS), help="ids of shipped prompts")
    given = parser.parse_args()
    wrong, columns = 0, " ".join(f"{name:>17}" for name in (*SUMS, LOGITS))
    print(f"{'model':8} {'chips':5} {'added in':9} {'phase':8} {columns}   verdicts")
    for model in given.models.split(","):
        for what, right, text in width_rows(model, given.target, given.policy, given.prompts.split(",")):
            print(what, text, flush=True)
            wrong += not right
    print(f"{wrong} with a verdict that is no pass")
    return 1 if wrong else 0


def width_rows(
    model: str, target: str = "v5e:2x2", policy: str = "bf16", prompts: Sequence[str] = PROMPTS
) -> Iterator[tuple[str, bool, str]]:
    """Yield a model's widths and phases, whether all verdicts pass, and errors beside those of one chip, the first."""
    one: Sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS[model]:
            found = recorded(Path(folder), model, policy, target, width, prompts)
            counts = gate(found).counts
            splits = [s for n in found.run.record.neutrality for ways in (n.split or {}).values() for s in ways]
            added = ", ".join(sorted({s.summed for s in splits}))
            verdicts = ", ".join(f"{n} {status}" for status, n in counts.items())
            for phase in ("prefill", "decode"):
                sizes = {(phase, name): error(found, phase, name) for name in (*SUMS, LOGITS)}
                one.update({key: size for key, size in sizes.items() if key not in one})
                told = (f"{size:8.1e} ({size / one[key]:4.2f} ×)" for key, size in sizes.items())
                what = f"{model:8} {width:5} {added or '-':9} {phase:8}"
                yield what, set(counts) == {"pass"}, f"{' '.join(told)}   {verdicts}"


def recorded(folder: Path, model: str, policy: str, target: str, width: int, prompts: Sequence[str]) -> Comparison:
    """Trace some prompts as so many chips would, and compare."""
    chosen = [p for p in shipped_prompts() if p.id in prompts]
    points = ",".join(("q", "k", "v", "attn_out", *SUMS, f"{LOGITS}:all"))
    run = trace(
        load(model, policy, device=f"tpu-predicted:{target}", mesh=f"model={width}"), folder / f"run-{width}", chosen,
        Selection.parse(points=points, phases="prefill,decode"), TraceOptions(STEPS),
    )  # fmt: skip
    return compare(run, options=CompareOptions(accum=(), cache=folder / "references"))


def error(found: Comparison, phase: str, point: str) -> float:
    """Return the relative error of a point, pooled over its records by their elements."""
    kind = "forward" if point == LOGITS else "local"
    some = [e for e in found.errors if (e.kind, e.point, e.phase) == (kind, point, phase)]
    return float(np.sqrt(np.average([value(e.rel_l2) ** 2 for e in some], weights=[e.n for e in some])))


if __name__ == "__main__":
    sys.exit(main())

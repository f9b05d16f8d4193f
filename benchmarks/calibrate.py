"""Derive the default limits: run honest programs, print what they leave and 1.5 × the largest (``make calibrate``).

Policies, models, prompt lengths, batches and padding vary. Prompts here are none of the exam's nor of the shipped ones.
Limits are printed as limits.toml holds them, with the smallest counted fault of the last exam beside them.
"""

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from precaudit.comparison.compare import Options as CompareOptions
from precaudit.comparison.compare import compare
from precaudit.judging.limits import Limits, Local, default_limits
from precaudit.judging.rules import forward_checks, local_checks
from precaudit.prompts import Prompt
from precaudit.records import ErrorRecord
from precaudit.selection import Selection
from precaudit.tracing.subject import load
from precaudit.tracing.trace import Options, trace

MARGIN = 1.5
ONE = Local(**dict.fromkeys(Local.__dataclass_fields__, 1.0))
UNIT = Limits(ONE, ONE, 1.0, 1.0)
SUBJECTS = {
    "tiny": (("bf16", "bf16-fp32-scores", "fp32-cast-decode", "fp32-highest"), "all", "0,-1", 8),
    "smollm2": (("bf16", "fp32-highest"), "q,k,v,attn_out,mlp_norm,mlp_out,logits", "0,15,-1", 4),
}
TEXT = "The committee met on Thursday to consider 17 proposals; of these, nine were adopted, and the rest deferred. "


def honest(folder: Path, quick: bool) -> Iterator[tuple[str, list[ErrorRecord]]]:
    """Yield the errors of honest runs: two batches and paddings of every policy."""
    draw = np.random.default_rng(7)
    for subject, (policies, points, layers, count) in SUBJECTS.items():
        if quick and subject != "tiny":
            continue
        for policy in policies:
            for batch, pad in ((1, "right"), (4, "left")):
                lengths = [int(n) for n in np.exp(draw.uniform(np.log(8), np.log(420), count))]
                prompts = [Prompt(id=f"c{i}", prompt=(TEXT[i:] * 5)[:n]) for i, n in enumerate(lengths)]
                select = Selection.parse(layers=layers, points=points, phases="prefill,decode")
                options = Options(force=True, decode_steps=2, batch=batch, pad=pad)
                run = trace(load(subject, policy, None, "cpu"), folder / "run", prompts, select, options)
                found = compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
                yield f"{subject} {policy} batch {batch} {pad}", found.errors


def name_of(e: ErrorRecord, metric: str, scope: str) -> tuple[str, str]:
    """Return (table, key) of a check in limits.toml."""
    if e.kind == "forward":
        return "forward", metric
    table = "float32" if e.dtype == "float32" else "narrow"
    if metric in ("gain", "mean"):
        return table, metric if scope == "tensor" else f"head_{metric}"
    return table, "componentwise" if scope == "element" else scope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny alone")
    quick = parser.parse_args().quick
    values: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        for variant, errors in honest(Path(name), quick):
            for e in errors:
                checks = local_checks(e, ONE) if e.kind == "local" and e.unknown is None else ()
                for metric, scope, found, _, _ in (*checks, *(forward_checks(e, UNIT) if e.kind == "forward" else ())):
                    values[name_of(e, metric, scope)].append((found, f"{e.point}, {variant}"))
            print(f"{variant}: {len(errors)} records", flush=True)
    shipped = default_limits()
    print(f"{'limit':24} {'n':>7} {'median':>8} {'99 %':>8} {'largest':>8} {'× 1.5':>8} {'shipped':>8}  largest at")
    for (table, key), rows in sorted(values.items()):
        sizes = np.array([x for x, _ in rows])
        top, where = max(rows)
        held = getattr(shipped if table == "forward" else getattr(shipped, table), key)
        derived = math.ceil(MARGIN * top * 10) / 10
        print(
            f"{table + '.' + key:24} {len(rows):7} {np.median(sizes):8.2g} {np.quantile(sizes, 0.99):8.2g} {top:8.2g} "
            f"{derived:8.2g} {held:8.2g}  {where}"
        )
    margin()


def margin() -> None:
    """Print the smallest counted faults of the last exam: what the limits must stay below."""
    path = Path(__file__).parent / "results" / "exam.jsonl"
    if not path.is_file():
        print("no exam was run here: make exam prints the margin to the smallest fault")
        return
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    flagged = sorted((float(c["size"]), c["fault"], c["point"], c["policy"]) for c in cells if c["status"] == "fail")
    missed = sorted((float(c["size"]), c["fault"], c["point"], c["policy"]) for c in cells if c["status"] == "pass")
    print("smallest faults flagged (× honest error):", *flagged[:3], sep="\n  ")
    print("largest faults not flagged:", *missed[::-1][:3], sep="\n  ")


if __name__ == "__main__":
    main()

"""Derive the default limits: run honest programs, print what they leave and 1.5 × the largest (``make calibrate``).

Policies, models, prompt lengths, batches and padding vary. Prompts here are none of the exam's nor of the shipped ones.
Held out: prompts are halved, and the largest value of either half is given over 1.5 × the other half's largest: at most
1 where the margin is enough. The smallest faults of the last exam are printed below.
"""

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.rewrites import REWRITES, rewritten
from precaudit.comparison.compare import Options as CompareOptions
from precaudit.comparison.compare import compare
from precaudit.limits import Limit, Limits, Local, default_limits
from precaudit.limits.checks import forward_checks, local_checks
from precaudit.prompts import Prompt
from precaudit.records import ErrorRecord
from precaudit.selection import Selection
from precaudit.tracing.subject import Subject, load
from precaudit.tracing.trace import Options, trace

MARGIN = 1.5
ONE = Local(**dict.fromkeys(Local.__dataclass_fields__, Limit(1.0)))
UNIT = Limits(ONE, ONE, *[Limit(1.0)] * 4)
SUBJECTS = {
    "tiny": (("bf16", "bf16-fp32-scores", "fp32-cast-decode", "fp32-highest"), "all", "0,-1", 8),
    "smollm2": (("bf16", "fp32-highest"), "q,k,v,attn_out,mlp_norm,mlp_out,logits", "0,15,-1", 4),
}
LOGITS = {"tiny": 120, "smollm2": 16}  # prompts of random tokens of which logits alone are judged
TEXT = "The committee met on Thursday to consider 17 proposals; of these, nine were adopted, and the rest deferred. "


def honest(folder: Path, quick: bool) -> Iterator[tuple[str, list[ErrorRecord]]]:
    """Yield the errors of honest runs: two batches and paddings of every policy, and other ways to write the parts."""
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
                yield (
                    f"{subject} {policy} batch {batch} {pad}",
                    run(folder, load(subject, policy, None, "cpu"), prompts, select, options),
                )
            prompts = [Prompt(id=f"r{i}", tokens=random_tokens(draw)) for i in range(LOGITS[subject])]
            select = Selection.parse(points="logits", phases="prefill,decode")
            options = Options(force=True, decode_steps=1, batch=4)
            yield (
                f"{subject} {policy} random tokens",
                run(folder, load(subject, policy, None, "cpu"), prompts, select, options),
            )
    prompts = [Prompt(id=f"c{i}", prompt=(TEXT[i:] * 5)[: 30 + 60 * i]) for i in range(2)]
    select = Selection.parse(points="all", phases="prefill,decode")
    for policy in ("bf16", "fp32-highest"):
        for name in REWRITES:
            yield f"tiny {policy} {name}", run(folder, rewritten(name, policy), prompts, select, Options(force=True))


def random_tokens(draw: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(t) for t in draw.integers(1, 250, int(draw.integers(3, 90))))


def run(
    folder: Path, subject: Subject, prompts: list[Prompt], select: Selection, options: Options
) -> list[ErrorRecord]:
    traced = trace(subject, folder / "run", prompts, select, options)
    return compare(traced, options=CompareOptions(accum=(), cache=folder / "refs")).errors


def name_of(e: ErrorRecord, metric: str, scope: str) -> tuple[str, str]:
    """Return (table, key) of a check in limits.toml."""
    if e.kind == "forward":
        return "forward", "kl" if metric == "kl" else "ratio" if scope == "tensor" else scope
    table = "float32" if e.dtype == "float32" else "narrow"
    if metric in ("gain", "mean"):
        return table, metric if scope == "tensor" else f"head_{metric}"
    return table, "componentwise" if scope == "element" else scope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny alone")
    quick = parser.parse_args().quick
    values: dict[tuple[str, str], list[tuple[float, int, str]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        for variant, errors in honest(Path(name), quick):
            for e in errors:
                checks = local_checks(e, ONE) if e.kind == "local" and e.unknown is None else ()
                for metric, scope, found, _, _ in (*checks, *(forward_checks(e, UNIT) if e.kind == "forward" else ())):
                    half = int(e.prompt[1:]) % 2
                    values[name_of(e, metric, scope)].append((found, half, f"{e.point}, {variant}"))
            print(f"{variant}: {len(errors)} records", flush=True)
    shipped = default_limits()
    print(
        f"{'limit':22} {'n':>6} {'median':>7} {'99 %':>7} {'largest':>7} {'× 1.5':>7} {'held out':>8} {'shipped':>7}"
        "  largest at"
    )
    for (table, key), rows in sorted(values.items()):
        sizes = np.array([x for x, _, _ in rows])
        top, _, where = max(rows)
        halves = [max(x for x, half, _ in rows if half == side) for side in (0, 1)]
        held_out = max(halves) / (MARGIN * min(halves))  # the limit of the half with the smaller errors, on the other
        kept = getattr(shipped if table == "forward" else getattr(shipped, table), key).value
        print(
            f"{table + '.' + key:22} {len(rows):6} {np.median(sizes):7.2g} {np.quantile(sizes, 0.99):7.2g} {top:7.2g} "
            f"{math.ceil(MARGIN * top * 10) / 10:7.2g} {held_out:8.2f} {kept:7.2g}  {where}"
        )
    margin()


def margin() -> None:
    """Print the smallest counted faults of the last exam: what the limits must stay below."""
    path = Path(__file__).parent / "results" / "exam.jsonl"
    if not path.is_file():
        print("no exam was run here: make exam prints the margin to the smallest fault")
        return
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    cells = [c for c in cells if "size" in c]
    flagged = sorted((float(c["size"]), c["fault"], c["point"], c["policy"]) for c in cells if c["status"] == "fail")
    missed = sorted((float(c["size"]), c["fault"], c["point"], c["policy"]) for c in cells if c["status"] == "pass")
    print("smallest faults flagged (× honest error):", *flagged[:3], sep="\n  ")
    print("largest faults not flagged:", *missed[::-1][:3], sep="\n  ")


if __name__ == "__main__":
    main()

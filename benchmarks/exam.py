"""The exam: faults that must be flagged at their place, honest programs that must pass (``make exam``).

A cell counts from 8 × the honest error at the fault's scope on; below 2 × it does not, between it is reported. Every
cell is a line of benchmarks/results/exam.jsonl. Faults are put into the program through ``Parts``, and into files.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.absences import ABSENCES, PROMPTS, against_baseline, between_runs, judged
from benchmarks.injection import MADE_BY, NEAR, Cell, into_files, into_program, random_tensors, record
from benchmarks.rewrites import REWRITES, points, rewritten
from precaudit.comparison.compare import Options as CompareOptions
from precaudit.comparison.compare import compare
from precaudit.judging.gate import gate
from precaudit.prompts import Prompt
from precaudit.selection import Selection
from precaudit.tracing.subject import Subject, load
from precaudit.tracing.trace import Options, trace

# What other tools said of 32 tensors of 256 × 512 float32 with one fault in one of them, at their default rules, when
# they were measured (P: wrongly passed, A: false alarm). They are not installed here, and not measured again.
OTHERS = {
    "bf16 rounding only": "sglang-jax A",
    "all NaN": "Firefly P",
    "one NaN": "Firefly P",
    "token zeroed": "SGLang P from 500 tokens, Polygraphy cos+snr P, Bhattacharyya P",
    "token × 0.5": "SGLang P, Polygraphy cos+snr P, msprobe P",
    "element × 1000": "Bhattacharyya P",
    "scale 1.02": "SGLang P, Polygraphy cos+snr P, msprobe P",
    "scale 1.04": "SGLang P, Polygraphy cos+snr P",
    "tokens swapped": "sglang-jax P",
    "tensor missing": "SGLang P, Polygraphy P, all with exit 0",
}


def honest_programs(folder: Path, policies: tuple[str, ...], seeds: int) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Yield (variant, exit code, counts) of honest programs: policies, batch, padding, lengths, other ways to write."""
    draw = np.random.default_rng(1)
    for policy in policies:
        for batch, pad in ((1, "right"), (4, "left"), (4, "right")):
            prompts = [Prompt(id=f"s{i}", tokens=_tokens(draw)) for i in range(seeds)]
            subject = load("tiny", policy, None, "cpu")
            yield f"{policy}, batch {batch}, {pad}", *_judged(folder, subject, prompts, batch, pad)
        for name in REWRITES:
            prompts = [Prompt(id=f"s{i}", tokens=_tokens(draw)) for i in range(2)]
            yield f"{policy}, {name}", *_judged(folder, rewritten(name, policy), prompts, 1, "right", points(name))


def _judged(
    folder: Path, subject: Subject, prompts: list[Prompt], batch: int, pad: str, seen: str = "all"
) -> tuple[int, dict[str, int]]:
    run = trace(
        subject, folder / "honest", prompts, Selection.parse(points=seen, phases="prefill,decode"),
        Options(force=True, decode_steps=1, batch=batch, pad=pad),
    )  # fmt: skip
    j = gate(compare(run, options=CompareOptions(accum=(), cache=folder / "refs")))
    for v in [v for v in j.verdicts if v.status != "pass"][:3]:
        print("   ", v.status, v.kind, v.place, v.metric, v.scope, v.value, v.limit)
    return j.exit_code, dict(j.counts)


def absent(folder: Path, policy: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (what was taken away or bent, what the gate says, whether that is right)."""
    home = folder / f"absent-{policy}"
    prompts = [Prompt(id=i, prompt=t) for i, t in zip(PROMPTS, ("def f(x):\n", "import os"), strict=True)]
    select = Selection.parse(points="all", phases="prefill,decode")
    trace(load("tiny", policy, None, "cpu"), home / "run", prompts, select, Options(decode_steps=2))
    found = compare(home / "run", options=CompareOptions(accum=(), cache=home / "refs"))
    for absence in ABSENCES:
        yield absence.name, *judged(home / "run", absence, home / "altered")
    yield "decode missing, in baseline", *against_baseline(found, home)
    yield "tensor missing, either run", *between_runs(home / "run", home / "altered")


def _tokens(draw: Any) -> tuple[int, ...]:
    return tuple(int(t) for t in draw.integers(1, 250, int(draw.integers(3, 90))))


def table(cells: list[Cell]) -> int:
    """Print one line a fault and subject; return the number of counted cells that were not flagged."""
    wrong = [c for c in cells if c.kind == "counts" and not c.flagged]
    print(f"{'fault':20} {'where':8} {'subject':8} {'policy':14} {'counted':>9} {'near':>9} {'not counted':>12}")
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for c in cells:
        groups.setdefault((c.fault, c.where, c.subject, c.policy), []).append(c)
    for key, rows in groups.items():
        parts = [_part(rows, kind) for kind in ("counts", "near", "small")]
        print(f"{key[0]:20} {key[1]:8} {key[2]:8} {key[3]:14} {parts[0]:>9} {parts[1]:>9} {parts[2]:>12}")
    small = sum(c.kind == "small" for c in cells)
    share = f"{small} below {NEAR:g} × ({100 * small / len(cells):.0f} %)"
    print(f"{len(cells)} cells, {len(wrong)} counted and not flagged, {share}")
    for c in wrong:
        print(f"MISSED {c.fault} in {c.subject} {c.policy} {c.point} ({c.where}): {c.size:.1f} × its honest error")
    return len(wrong)


def _part(rows: list[Cell], kind: str) -> str:
    here = [c for c in rows if c.kind == kind]
    return f"{sum(c.flagged for c in here)}/{len(here)}" if here else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny in bf16, three points in the program")
    parser.add_argument("--seeds", type=int, default=34, help="prompts of each of the honest variants")
    options = parser.parse_args()
    policies = ("bf16",) if options.quick else ("bf16", "fp32-highest")
    layers = {"tiny": 2} if options.quick else {"tiny": 2, "smollm2": 15}
    points = ("q", "attn_out", "mlp_out") if options.quick else tuple(MADE_BY)
    cells: list[Cell] = []
    gone: list[tuple[str, str, str, bool]] = []
    honest_ones = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for policy in policies:
            for row in absent(folder, policy):
                gone.append((policy, *row))
                print(f"{row[0]:30} {policy:14} {row[1]:24} {'right' if row[2] else 'WRONG'}", flush=True)
        for variant, code, counts in honest_programs(folder, policies, options.seeds):
            honest_ones.append(code)
            print(f"honest: {variant:34} exit {code} {counts}", flush=True)
        for subject, layer in layers.items():
            for policy in policies:
                every = Selection.parse(points="all,logits:all", phases="prefill")
                honest = record(folder / f"{subject}-{policy}", subject, policy, every)
                cells += into_files(subject, honest, layer)
                cells += into_program(folder, subject, policy, honest, layer, points)
                keep(cells, gone)
                print(f"{subject} {policy}: {len(cells)} cells so far", flush=True)
        cells += random_tensors()
    keep(cells, gone)
    missed = table(cells)
    compared_with_others(cells, gone)
    wrong, failed = sum(not row[3] for row in gone), sum(map(bool, honest_ones))
    print(f"{len(gone)} absences, {wrong} wrong; {len(honest_ones)} honest variants, {failed} wrong")
    return 1 if missed or wrong or failed else 0


def keep(cells: list[Cell], gone: list[tuple[str, str, str, bool]]) -> None:
    """Write one line a cell to benchmarks/results/exam.jsonl."""
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    rows = [{**c.__dict__, "size": str(c.size), "class": c.kind} for c in cells]
    rows += [
        {"policy": p, "fault": f, "where": "run", "status": s, "right": r, "class": "counts"} for p, f, s, r in gone
    ]
    (results / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def compared_with_others(cells: list[Cell], gone: list[tuple[str, str, str, bool]]) -> None:
    """Print our answers on the faults others were measured on, beside theirs."""
    print(f"\n{'fault':20} {'ours, counted cells flagged':>28}   others that get it wrong")
    for fault, others in OTHERS.items():
        rows = [c for c in cells if c.fault == fault and c.kind == "counts"]
        right = [r for _, name, _, r in gone if name == fault]
        said = f"{sum(c.flagged for c in rows)} of {len(rows)}" if rows else f"{sum(right)} of {len(right)}"
        print(f"{fault:20} {'see honest' if fault.startswith('bf16') else said:>28}   {others}")
    print()


if __name__ == "__main__":
    sys.exit(main())

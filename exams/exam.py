"""The exam: faults that must be flagged at their place, honest programs that must pass (``make exam``).

A cell counts from 8 × the honest error at the fault's scope on; below 2 × it does not, between it is reported. Every
cell is a line of exams/results/exam.jsonl. Faults are put into the program through ``Parts``, and into files.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from exams.absences import ABSENCES, PROMPTS, against_baseline, between_runs, judged
from exams.cut import Cut, add_part
from exams.faults import FAULTS, Fault
from exams.injection import MADE_BY, NEAR, OPERATIONS, Cell, into_files, into_program, random_tensors, record
from exams.rewrites import REWRITES, points, rewritten
from precaudit.judging.gate import gate
from precaudit.recording.runs.written import Comparison
from precaudit.recording.tracing.subject import Subject, load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection

POLICIES = ("bf16", "fp32-highest")
LAYERS = {"tiny": 2, "smollm2": 15}  # the layer that faults are put into
RESULTS = Path(__file__).parent / "results"
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


TAKEN: dict[str, Callable[[Comparison, Path], tuple[str, bool]]] = {
    **{a.name: lambda found, scratch, a=a: judged(found.folder, a, scratch) for a in ABSENCES},
    "decode missing, in baseline": lambda found, _scratch: against_baseline(found, found.folder.parent),
    "tensor missing, either run": lambda found, scratch: between_runs(found.folder, scratch),
}


@dataclass(frozen=True)
class Variant:
    """An honest program, and how it is run."""

    name: str
    make: Callable[[], Subject]
    prompts: list[Prompt]
    batch: int = 1
    pad: str = "right"
    seen: str = "all"


def variants(seeds: int) -> list[Variant]:
    """Return the honest programs: policies, batches, padding, lengths, other ways to write the operations."""
    draw, found = np.random.default_rng(1), []
    for policy in POLICIES:
        make = partial(load, "tiny", policy, None, "cpu")
        for batch, pad in ((1, "right"), (4, "left"), (4, "right")):
            found.append(Variant(f"{policy}, batch {batch}, {pad}", make, _prompts(draw, seeds), batch, pad))
        for name in REWRITES:
            make = partial(rewritten, name, policy)
            found.append(Variant(f"{policy}, {name}", make, _prompts(draw, 2), seen=points(name)))
    return found


def passes(folder: Path, variant: Variant) -> bool:
    """Run an honest program, print what the gate says of it, and return whether that is right."""
    select = Selection.parse(points=variant.seen, phases="prefill,decode")
    options = TraceOptions(force=True, decode_steps=1, batch=variant.batch, pad=variant.pad)
    run = trace(variant.make(), folder / "honest", variant.prompts, select, options)
    j = gate(compare(run, options=CompareOptions(accum=(), cache=folder / "refs")))
    for v in [v for v in j.verdicts if v.status != "pass"][:3]:
        print("   ", v.status, v.kind, v.place, v.metric, v.scope, v.value, v.limit)
    print(f"honest: {variant.name:34} exit {j.exit_code} {dict(j.counts)}", flush=True)
    return j.exit_code == 0


@dataclass(frozen=True)
class Injection:
    """Faults that are put into one point of a subject under a policy."""

    subject: str
    policy: str
    point: str
    faults: tuple[Fault, ...]


def absences() -> list[tuple[str, str]]:
    """Return (policy, what is taken away or bent)."""
    return list(product(POLICIES, TAKEN))


def absent(folder: Path, asked: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (policy, what was taken away or bent, what the gate says, whether that is right)."""
    prompts = [Prompt(id=i, prompt=t) for i, t in zip(PROMPTS, ("def f(x):\n", "import os"), strict=True)]
    select = Selection.parse(points="all", phases="prefill,decode")
    for policy, names in groupby(asked, lambda x: x[0]):
        home = folder / f"absent-{policy}"
        trace(load("tiny", policy, None, "cpu"), home / "run", prompts, select, TraceOptions(decode_steps=2))
        found = compare(home / "run", options=CompareOptions(accum=(), cache=home / "refs"))
        for _, name in names:
            said, right = TAKEN[name](found, home / "altered")
            print(f"{name:30} {policy:14} {said:24} {'right' if right else 'WRONG'}", flush=True)
            yield policy, name, said, right


def in_files() -> list[Injection]:
    """Return the faults that are put into recorded tensors, one by one."""
    return [Injection(*where, (fault,)) for *where, fault in product(LAYERS, POLICIES, OPERATIONS, FAULTS)]


def in_programs() -> list[Injection]:
    """Return the faults that are put into operations, a third of them at a time."""
    return [Injection(*x) for x in product(LAYERS, POLICIES, MADE_BY, (FAULTS[i::3] for i in range(3)))]


def injected(folder: Path, files: Sequence[Injection], programs: Sequence[Injection]) -> Iterator[Cell]:
    """Put faults into tensors (``files``) and operations (``programs``), where they apply."""
    every = Selection.parse(points="all,logits:all", phases="prefill")
    for subject, policy in product(LAYERS, POLICIES):
        tensors, operations = (
            [(x.point, f) for x in asked if (x.subject, x.policy) == (subject, policy) for f in x.faults]
            for asked in (files, programs)
        )
        if tensors or operations:
            honest = record(folder / f"{subject}-{policy}", subject, policy, every)
            yield from into_files(subject, honest, LAYERS[subject], tensors)
            yield from into_program(folder, subject, policy, honest, LAYERS[subject], operations)
            print(f"{subject} {policy}: {len(tensors)} in tensors, {len(operations)} in operations", flush=True)


def _prompts(draw: Any, count: int) -> list[Prompt]:
    return [Prompt(id=f"s{i}", tokens=_tokens(draw)) for i in range(count)]


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
    """Ask; return 1 where a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_part(parser)
    parser.add_argument("--seeds", type=int, default=34, help="prompts of each of the honest variants")
    options = parser.parse_args()
    part: Cut = options.part
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gone = list(absent(folder, part.of(absences())))
        honest = [passes(folder, v) for v in part.of(variants(options.seeds))]
        cells = [*injected(folder, part.of(in_files()), part.of(in_programs())), *random_tensors()]
    keep(cells, gone, RESULTS / ("exam.jsonl" if part.parts == 1 else "exam-part.jsonl"))
    missed = table(cells)
    compared_with_others(cells, gone)
    wrong, failed = sum(not row[3] for row in gone), sum(not right for right in honest)
    print(f"part {part}: {len(gone)} absences, {wrong} wrong; {len(honest)} honest variants, {failed} wrong")
    return 1 if missed or wrong or failed else 0


def keep(cells: list[Cell], gone: list[tuple[str, str, str, bool]], path: Path) -> None:
    """Write one line a cell."""
    path.parent.mkdir(exist_ok=True)
    rows = [{**c.__dict__, "size": str(c.size), "class": c.kind} for c in cells]
    rows += [
        {"policy": p, "fault": f, "where": "run", "status": s, "right": r, "class": "counts"} for p, f, s, r in gone
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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

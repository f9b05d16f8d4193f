"""Time commands on long files of error records, whole as they are called: CPU seconds, and peak memory of the process.

Records are those of a traced and compared tiny model, under new prompt names, as they are and made to fail.
Run: python -m benchmarks.judging [--most 100000]
"""

import argparse
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchmarks.copies import copy, failing, peak
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection

MEMORY = 300.0  # MB of a command, Python and libraries included
BOUNDS = {100_000: 1.0, 1_000_000: 10.0}  # records: CPU seconds of the gate of a file, beyond those of a short one
FAILING = 2.0  # times the bound of records that pass


def made(folder: Path) -> Path:
    """Return a small compared run of the tiny model."""
    run = trace(
        load("tiny", "bf16", None, "cpu"), folder / "run", [Prompt(id="p", prompt="def f(x):\n    return x")],
        Selection.parse(points="all"), TraceOptions(decode_steps=2),
    )  # fmt: skip
    compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
    return folder / "run"


def commands(run: Path, folder: Path) -> dict[str, tuple[str, ...]]:
    """Return what is measured of a run, by name; a baseline is written before a gate reads it."""
    baseline = str(folder / "baseline.jsonl")
    return {
        "gate, file": ("gate", str(run / "errors.jsonl")), "gate, run": ("gate", str(run)),
        "report": ("report", str(run)), "Markdown": ("report", str(run), "--markdown", "-"),
        "HTML": ("report", str(run), "--html", str(folder / "page.html")),
        "CSV": ("export", str(run), "--csv", str(folder / "errors.csv")),
        "baseline": ("baseline", str(run), "-o", baseline, "--accept", "--why", "measured"),
        "gate, lines": ("gate", str(run), "--baseline", baseline),
    }  # fmt: skip


def main() -> int:
    """Print CPU times and memory; return 1 where a command failed or took more memory than its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=max(BOUNDS), help="records of the longest run")
    most, wrong = parser.parse_args().most, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        short = made(folder)
        failing(short, folder / "failing")
        _, start, _, _ = peak("gate", str(short / "errors.jsonl"))
        for count, which in product((n for n in BOUNDS if n <= most), ("pass", "fail")):
            long = folder / f"{which}{count}"
            records = copy(short if which == "pass" else folder / "failing", long, count)
            print(f"{records:,} records that {which}, {(long / 'errors.jsonl').stat().st_size / 1e6:,.0f} MB")
            for what, command in commands(long, folder).items():
                megabytes, seconds, code, _ = peak(*command)
                wrong |= code > 1 or megabytes > MEMORY  # copies of one prompt may fail pooled
                bound = BOUNDS[count] * (1 if which == "pass" else FAILING)
                timed = f" ({seconds - start:.1f} s of {bound:g} beyond the start)" if what == "gate, file" else ""
                print(f"  {what:12} {megabytes:5.0f} MB of {MEMORY:g}, {seconds:6.1f} CPU s{timed}")
            shutil.rmtree(long)
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""Time commands on long files of error records, whole as they are called: seconds, and peak memory of the process.

Records are those of a traced and compared tiny model, under new prompt names. Run: python -m benchmarks.judging
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.copies import copy, peak
from precaudit.comparison.compare import Options as CompareOptions
from precaudit.comparison.compare import compare
from precaudit.prompts import Prompt
from precaudit.selection import Selection
from precaudit.tracing.subject import load
from precaudit.tracing.trace import Options, trace

MEMORY = 300.0  # MB of a command, Python and libraries included
BOUNDS = {100_000: 1.0, 1_000_000: 10.0}  # records: seconds of the gate of a file, beyond those of a short one


def made(folder: Path) -> Path:
    """Return a small compared run of the tiny model."""
    run = trace(
        load("tiny", "bf16", None, "cpu"), folder / "run", [Prompt(id="p", prompt="def f(x):\n    return x")],
        Selection.parse(points="all"), Options(decode_steps=2),
    )  # fmt: skip
    compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
    return folder / "run"


def main() -> int:
    """Print times and memory; return 1 where a command failed or took more memory than its bound."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        short = made(folder)
        _, start, _, _ = peak("gate", str(short / "errors.jsonl"))
        for count, bound in BOUNDS.items():
            long = folder / str(count)
            records = copy(short, long, count)
            print(f"{records:,} records, {(long / 'errors.jsonl').stat().st_size / 1e6:,.0f} MB")
            commands = {
                "gate, file": ("gate", str(long / "errors.jsonl")), "gate, run": ("gate", str(long)),
                "report": ("report", str(long)), "CSV": ("export", str(long), "--csv", str(folder / "errors.csv")),
            }  # fmt: skip
            for what, command in commands.items():
                megabytes, seconds, code, _ = peak(*command)
                wrong |= code > 1 or megabytes > MEMORY  # copies of one prompt may fail pooled
                timed = f" ({seconds - start:.1f} s of {bound:g} beyond the start)" if what == "gate, file" else ""
                print(f"  {what:12} {megabytes:5.0f} MB of {MEMORY:g}, {seconds:6.1f} s{timed}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())

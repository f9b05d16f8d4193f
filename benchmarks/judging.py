"""Time the gate on long files of error records against its bounds, beside the physical limit: reading the file.

Records are those of a traced and compared tiny model, under new prompt names. Run: python -m benchmarks.judging
"""

import argparse
import subprocess
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

import msgspec

from precaudit.comparison.compare import Options as CompareOptions
from precaudit.comparison.compare import compare
from precaudit.prompts import Prompt
from precaudit.records import ErrorRecord, encode
from precaudit.selection import Selection
from precaudit.tracing.subject import load
from precaudit.tracing.trace import Options, trace

BOUNDS = {100_000: (1.0, 300.0), 1_000_000: (10.0, 300.0)}  # records: seconds, MB of the process beyond its start
CHILD = """
import sys, time
from pathlib import Path
from precaudit.judging.gate import gate
path = Path(sys.argv[1])
with path.open("rb", buffering=0) as f:
    start = time.perf_counter()
    while f.read(1 << 22):
        pass
    read = time.perf_counter() - start
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
before = peak()
start = time.perf_counter()
found = gate(path)
seconds = time.perf_counter() - start
print(read, seconds, peak() - before, sum(found.counts.values()))
"""


def records(folder: Path) -> list[ErrorRecord]:
    """Return the judged records of one small run."""
    run = trace(
        load("tiny", "bf16", None, "cpu"), folder / "run", [Prompt(id="p", prompt="def f(x):\n    return x")],
        Selection.parse(points="all"), Options(decode_steps=2),
    )  # fmt: skip
    found = compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
    return [e for e in found.errors if e.kind in ("local", "forward", "state")]


def main() -> int:
    """Print the times; return 1 where a record was not judged."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        some = records(folder)
        for count, (bound, memory) in BOUNDS.items():
            path = folder / f"{count}.jsonl"
            with path.open("wb") as f:
                for i, e in enumerate(islice(cycle(some), count)):
                    f.write(encode(msgspec.structs.replace(e, prompt=f"{e.prompt}{i // len(some)}")))
            done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
            read, seconds, megabytes, judged = map(float, done.stdout.split())
            wrong |= judged != count
            size, mark = path.stat().st_size / 1e6, "ok" if seconds <= bound and megabytes <= memory else "over"
            print(f"{count:9,} records, {size:6.0f} MB: {seconds:5.2f} s of {bound:g}, {seconds / read:4.0f} × read")
            print(f"{'':9}  memory +{megabytes:.0f} MB (bound {memory:g}); {mark}")
            path.unlink()
    return wrong


if __name__ == "__main__":
    sys.exit(main())

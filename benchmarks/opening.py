"""Time ``precaudit open`` from the command line, at 80 x 24: to the first screen, to its cells, to the verdict.

Records are those of a traced and compared tiny model under new prompt names. Beside it the time to read the records
alone, in a process that has all of the imports. Run: python -m benchmarks.opening [--records 100000] [--times 3]
"""

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
from pathlib import Path
from statistics import median
from subprocess import Popen
from time import perf_counter, process_time

from benchmarks.copies import copy
from benchmarks.judging import made
from precaudit.schema.filed import Filed, without_collector
from precaudit.schema.records.errors import ERROR_KINDS

START = 1.0  # CPU seconds to the first screen: by the clock, where nobody else computes
LONGEST = 60.0  # seconds that anything is waited for
MARKS = {
    "first screen": rb"Quit",
    "first cells": rb"[1-9][0-9,]* pass",
    "all cells, judged": "(✓ rounding|✗ (?!layer))".encode(),
}


def opening(run: Path) -> dict[str, tuple[float, float]]:
    """Return (seconds, CPU seconds) from the start of a process until the terminal shows each of ``MARKS``."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    start = perf_counter()
    child = Popen(
        [sys.executable, "-m", "precaudit", "open", str(run)], stdin=inside, stdout=inside, stderr=inside,
        env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    found: dict[str, tuple[float, float]] = {}
    seen = b""
    while len(found) < len(MARKS) and perf_counter() - start < LONGEST:
        if select.select([terminal], [], [], 0.02)[0]:
            seen += os.read(terminal, 1 << 16)
        now = perf_counter() - start, _cpu(child.pid)
        found |= {name: now for name, mark in MARKS.items() if re.search(mark, seen) and name not in found}
    os.write(terminal, b"q")
    try:
        while select.select([terminal], [], [], 5)[0] and os.read(terminal, 1 << 16):
            pass
    except OSError:  # it has ended
        pass
    child.wait()
    os.close(terminal)
    return found


def _cpu(pid: int) -> float:
    """Return the CPU seconds that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reading(run: Path) -> float:
    """Return the CPU seconds that reading all records takes."""
    start = process_time()
    with without_collector():
        for _ in Filed(run / "errors.jsonl", ERROR_KINDS):
            pass
    return process_time() - start


def main() -> int:
    """Print medians; return 1 where the first screen takes more than ``START``, or something never comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000, help="records of the run")
    parser.add_argument("--times", type=int, default=3, help="how often it is opened")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "long"
        count = copy(made(Path(name)), run, given.records)
        every = [(opening(run), reading(run)) for _ in range(given.times)]
    alone = median(seconds for _, seconds in every)
    print(f"{count:,} records; reading them alone {alone:.2f} CPU s")
    if any(found.keys() != MARKS.keys() for found, _ in every):
        print("the terminal never showed all of it")
        return 1
    for mark in MARKS:
        seconds, cpu = (median(found[mark][i] for found, _ in every) for i in (0, 1))
        print(f"  {mark:18} {seconds:5.2f} s, {cpu:5.2f} CPU s, {cpu / alone:4.1f} × reading")
    return int(median(found["first screen"][1] for found, _ in every) > START)


if __name__ == "__main__":
    sys.exit(main())

"""Measure one pass over two tensors on disk, each read from the page cache, beside copying the same bytes in memory.

    python -m benchmarks.moments [--quick] [--folder DIR]

Writes two files of 512 MiB of float32 and what is made from them to DIR (a temporary folder there), and deletes them.
What is compared alternates in one run; times are medians of warm runs, ratios medians of the pairs' ratios.
The 1.25 s published of Firefly are printed beside, not measured.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.main_job import COPY, Jobs, Line, alternated, compared
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.schema.metrics.moments import moments

SHAPE = (16384, 64, 128)  # 512 MiB of float32
PAIRS = (("float32", "float32"), ("float32", "float64"), ("bfloat16", "float64"), ("float64", "float64"))
ROWS = 512  # written at a time
FIREFLY = 1.25  # seconds
LIMIT, PRIVATE = 0.2, 256.0  # seconds; MiB


def write(folder: Path, shape: tuple[int, int, int]) -> None:
    """Write the reference and a candidate near it in every format of PAIRS."""
    rng = np.random.default_rng(0)
    wanted = {f"{side}-{pair[i]}" for i, side in enumerate("cr") for pair in PAIRS}
    files = {name: (folder / name).open("wb") for name in wanted}
    for _ in range(0, shape[0], ROWS):
        r = rng.standard_normal((min(ROWS, shape[0]), *shape[1:]), np.float32)
        c = r * np.float32(1.001)
        for name, file in files.items():
            x = c if name[0] == "c" else r
            file.write(x.astype(FORMATS[name[2:]].dtype).tobytes())
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())  # or writing to the disk would go on under what is timed
        file.close()


def mapped(folder: Path, side: str, name: str, shape: tuple[int, int, int]) -> Array:
    dtype = np.dtype(np.uint16) if name == "bfloat16" else FORMATS[name].dtype
    return np.memmap(folder / f"{side}-{name}", dtype, "r", shape=shape).view(FORMATS[name].dtype)


def private_mib() -> float:
    """Return the memory that is this process's alone: anonymous pages, and not those of mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith("RssAnon")) / 1024


def memory_line(folder: Path) -> Line:
    """Return by how much private memory grows at most while a pass runs and its result is held."""
    c, r = (mapped(folder, s, "float32", SHAPE) for s in "cr")
    before, peak, done = private_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], private_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = moments(c, r)
    done.set()
    watcher.join()
    held = private_mib()
    note = f"result held {held - before:.0f} MiB of {kept.n} elements"
    return Line("private memory grown", max(held, peak[0]) - before, "MiB", PRIVATE, note=note)


def first_call_lines(folder: Path) -> Iterator[Line]:
    """Yield the seconds a first call of each pair takes: importing numba, then compiling or reading the cache."""
    began = time.perf_counter()
    import precaudit.schema.metrics._moments_kernel  # noqa: F401

    yield Line("numba imported", time.perf_counter() - began, "s")
    for c, r in PAIRS:
        small = (mapped(folder, "c", c, (1, 64, 128)), mapped(folder, "r", r, (1, 64, 128)))
        began = time.perf_counter()
        moments(*small)
        yield Line(f"first call, {c} against {r}", time.perf_counter() - began, "s", note="compiled or cached")


def lines(folder: Path, rounds: int) -> Iterator[Line]:
    yield from first_call_lines(folder)
    yield memory_line(folder)  # while this process is small: what was freed would be used again
    maps = {pair: tuple(mapped(folder, s, n, SHAPE) for s, n in zip("cr", pair, strict=True)) for pair in PAIRS}
    source, target = np.ones(COPY, np.uint8), np.zeros(COPY, np.uint8)
    jobs: Jobs = {" against ".join(pair): partial(moments, *both) for pair, both in maps.items()}
    single = " against ".join(PAIRS[0])
    jobs |= {"one thread": partial(moments, *maps[PAIRS[0]], threads=1)}
    jobs |= {"new maps": lambda: moments(*(mapped(folder, s, "float32", SHAPE) for s in "cr"))}
    jobs |= {"copy": partial(np.copyto, target, source)}
    found = alternated(jobs, rounds)
    for name in jobs:
        yield Line(name, median(found[name]), "s", LIMIT if name == single else None)
    yield compared(f"{single} / copy of {COPY >> 20} MiB", found, single, "copy")
    yield compared(f"{single} / one thread", found, single, "one thread")
    rate = sum(x.nbytes for x in maps[PAIRS[0]]) / median(found[single]) / 1e9
    yield Line("read by " + single, rate, "GB/s")
    yield Line("published of Firefly, not measured here", FIREFLY, "s")
    yield Line("  of it, measured here", median(found[single]) / FIREFLY, "x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 runs instead of 5")
    parser.add_argument("--folder", type=Path, help="where the files are written (3.5 GiB); default: the system's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write(folder, SHAPE)
        for line in lines(folder, 2 if args.quick else 5):
            bound = "" if line.bound is None else f"<= {line.bound:g}"
            print(line.what, f"{line.value:.4g}", line.unit, bound, line.verdict(), line.note, sep="\t", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

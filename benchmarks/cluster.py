"""How comparing scales with processes of this machine: one, two and four, each with a core's worth of threads.

SmolLM2's FP64 reference, its members and all records, of random tokens; nothing is reused. More processes than cores
show what they cost beside each other. Each process is started before the clock is. --scheduler ADDRESS measures a
cluster of dask beside them. Run: python -m benchmarks.cluster
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.main_job import Line, show
from precaudit.numbers.executors import Executor, executor
from precaudit.numbers.processes import Processes
from precaudit.numbers.threads import WORKERS, one_blas_thread
from precaudit.progress import Advance
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.selected import resolve_selection
from precaudit.references.comparison.shares import layer_errors, open_weights
from precaudit.references.textbook.pieces import Execution
from precaudit.references.textbook.reference import Textbook
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.lines import encode
from precaudit.schema.selection import Selection

POINTS = "q,k,v,attn_out,logits"


def started(_shared: None, _piece: int, _tell: Advance) -> int:
    """Return which process this is, once it has imported what it needs and had time to be one of several."""
    time.sleep(0.5)
    return os.getpid()


def measure(made: Executor, folder: Path, model: str, root: Path) -> tuple[float, bytes]:
    """Return the seconds of a comparison by an executor that is warm, and its records as bytes."""
    if not made.here:
        from benchmarks.cluster import started as begun  # by a name that another process knows, too

        made.map(begun, None, range(4 * made.slots))
    began = time.perf_counter()
    execution, recorded = Execution(made), Recorded.of(open_run(folder))
    selected = resolve_selection(recorded, None, ("float16",))
    with one_blas_thread(), np.errstate(all="ignore"):
        book = Textbook.of(recorded, selected, open_weights(recorded.run, model), root, execution)
        errors = layer_errors(book, selected, execution)
    return time.perf_counter() - began, b"".join(map(encode, errors))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--scheduler", metavar="ADDRESS", help="a cluster of dask to measure, too")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(f"p{i}", tokens=tuple(map(int, rng.integers(0, 250, given.tokens)))) for i in range(given.prompts)
    ]
    with tempfile.TemporaryDirectory() as place:
        folder, root = Path(place) / "run", Path(place)
        trace(
            given.model, folder, prompts, Selection.parse(None, POINTS, "prefill,decode"), TraceOptions(decode_steps=1)
        )
        with executor() as threads:
            here, records = measure(threads, folder, given.model, root / "threads")
        note = f"{given.model}, {given.prompts} x {given.tokens} tokens, load average {os.getloadavg()[0]:.0f}"
        lines, first, same = [Line(f"compare: threads of {WORKERS} cores", here, "s", note=note)], 0.0, True
        for n in given.workers:
            processes = Processes(n)
            took, its = measure(processes, folder, given.model, root / str(n))
            processes.close()
            first, same = first or took, same and its == records
            note = f"{first / took:.2f} x the speed of {given.workers[0]}"
            lines.append(Line(f"  {n} processes", took, "s", note=note))
        if given.scheduler is not None:
            with executor(scheduler=given.scheduler) as cluster:
                took, its = measure(cluster, folder, given.model, root / "cluster")
            same = same and its == records
            lines.append(Line(f"  a cluster of {cluster.slots} workers", took, "s"))
    lines.append(Line("  the records are the same bytes", float(same), "", 1.0, least=True))
    show(lines)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""Programs on several devices: correct ones in every form of sharding pass, mistakes are named, chips are priced.

One table. Correct: each form × mesh × format is traced, compared and gated. Mistake: ``same`` compares a sharded
program with one device's. Chips: forms on four chips that are not here. Width: what such chips cost (``mesh_widths``).
Processes: tests of one run of two processes. Eight devices of one host's CPU.
Run: python -m exams.mesh [--only NAME] [--kinds correct,mistake]
"""

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from exams.cut import add_part
from exams.mesh_mistakes import MISTAKES, gradient_of_rows
from exams.mesh_processes import run_tests
from exams.mesh_programs import CORRECT, MESHES, down_gradient, forward, mapped, program, to_train, weights
from exams.mesh_widths import MODELS, SUMS, width_rows
from precaudit.judging.gate import gate
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.workflows.same import same
from precaudit.workflows.verbs import compare, trace

FORMATS = ("bfloat16", "float16", "float32")
NARROW, FIRST, FOUR, EIGHT, LAST = "bfloat16", "2", "4", "8", "2 × 4"
CHIPS = {FOUR: "tpu-predicted:v5e:2x2", LAST: "tpu-predicted:v5e:2x4"}
FEW = ("constraints", "explicit", "sequence", "experts")  # forms that are tried on chips
LIKE_OTHERS = ("no sum", "own part once more", "mean for sum", "bias on each shard")  # mistakes that are like others
WAYS = 2  # processes at a time
Row = tuple[str, bool, str]  # what was tried, whether the answer is right, the answer


@dataclass(frozen=True)
class Cell:
    """What is tried: a program or mistake by its name, on a mesh, in a format; whether its layers attend.

    Where they do not, they are MLPs: how products are cut, rounded and added is the same, and less is compiled.
    """

    kind: str
    name: str
    mesh: str = ""
    dtype: str = ""
    attends: bool = False

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name, self.dtype, self.mesh)))


def cells(every: bool = False) -> list[Cell]:
    """Return all cells, by kind.

    On the last mesh layers attend, in bfloat16, but not a gradient's. ``every``: in float16 too, that gradient's in
    bfloat16, mistakes on the first mesh, those like others on every mesh, and every form on chips.
    """

    def attends(name: str, mesh: str, dtype: str) -> bool:
        often, seldom = (NARROW, "float16") if name != "gradient" else ("", NARROW)
        return mesh == LAST and (dtype == often or (every and dtype == seldom))

    correct = [Cell("correct", n, m, d, attends(n, m, d)) for n in CORRECT for d in FORMATS for m in MESHES]
    names = [*MISTAKES, "gradient not averaged"]
    meshes = [m for m in MESHES if every or m != FIRST]
    seldom = {("a ring too short", FIRST), *(() if every else ((n, m) for n in LIKE_OTHERS for m in (EIGHT, LAST)))}
    mistakes = [Cell("mistake", n, m) for m in meshes for n in names if (n, m) not in seldom]
    forms = CORRECT if every else FEW
    chips = [Cell("chips", n, m, NARROW, attends(n, m, NARROW)) for m in CHIPS if every or m == FOUR for n in forms]
    return [*correct, *mistakes, *chips, *(Cell("width", n) for n in MODELS), Cell("processes", "two processes")]


def judge_correct(cell: Cell) -> Iterator[Row]:
    """Yield whether the gate passes a correct program."""
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"device": CHIPS[cell.mesh]} if cell.kind == "chips" else {}
        made = CORRECT[cell.name](cell.mesh, cell.dtype, cell.attends)
        run = trace(made, Path(folder) / "run", **how)
        compare(run, made, accum=())  # other sums are not judged
        judged = gate(run.folder)
    first = next((f"{v.point} of {v.layer}: {v.text}" for v in judged.verdicts), "")
    counts = ", ".join(f"{n} {status}" for status, n in judged.counts.items())
    yield str(cell), judged.exit_code == 0, f"{counts} {first if judged.exit_code else ''}"


def judge_mistake(cell: Cell) -> Iterator[Row]:
    """Yield whether ``same`` names a mistake, and that alone; and that it is the same without it, of a gradient."""
    if cell.name in MISTAKES:
        mistake = MISTAKES[cell.name]
        meant = program(partial(forward, body=mistake.meant), *weights(NARROW))
        yield str(cell), *named(same(meant, mapped(cell.mesh, NARROW, body=mistake.body)), mistake.name)
        return
    meant = program(down_gradient, *to_train(NARROW, attends=False))
    if same(meant, gradient_of_rows(cell.mesh, averaged=True)).exit_code != 0:
        yield str(cell), False, "the averaged one is not the same either"
    yield str(cell), *named(same(meant, gradient_of_rows(cell.mesh, averaged=False)), "not averaged")


def judge_width(cell: Cell) -> Iterator[Row]:
    """Yield errors of a model on chips that are not here, from FP64 and beside one chip's: of two sums, and logits."""
    names = ", ".join((*SUMS, LOGITS))
    for what, right, text in width_rows(cell.name):
        yield " ".join(what.split()), right, f"{names}: {' '.join(text.split())}"


def named(found: Any, name: str) -> tuple[bool, str]:
    """Return whether ``same`` gives a mistake this name and no other, and what it says."""
    (case,) = found.cases
    said = "; ".join(f"{m.name} ({Path(m.source).name})" for m in case.causes) or f"no cause: {case.says}"
    return found.exit_code == 1 and {m.name for m in case.causes} == {name}, said


KINDS: dict[str, Callable[[Cell], Iterator[Row]]] = {
    "correct": judge_correct, "mistake": judge_mistake, "chips": judge_correct, "width": judge_width,
    "processes": lambda _: run_tests(),
}  # fmt: skip


def ask(cell: Cell) -> tuple[list[Row], float]:
    """Return a cell's rows, and the CPU seconds that it took."""
    began, rows = cpu_seconds(), list[Row]()
    try:
        rows += KINDS[cell.kind](cell)
    except Exception as error:
        rows.append((str(cell), False, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    return rows, cpu_seconds() - began


def cpu_seconds() -> float:
    """Return what this process and those that it waited for took of a CPU: user and system."""
    own, of_children = (resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + of_children.ru_utime + of_children.ru_stime


def prepare_process(cache: str) -> None:
    """Let a process use what others compiled: a mistake's correct twin is compiled once, and FP64 of its operations."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def answers(asked: list[Cell], jobs: int) -> Iterator[tuple[Cell, list[Row], float]]:
    """Yield every cell with its rows and seconds, in order; the longest, which are last, begin first."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(jobs, spawn, prepare_process, (cache,)) as pool:
        long = {c: pool.submit(ask, c) for c in asked if c.kind in ("width", "processes")}
        found = long | {c: pool.submit(ask, c) for c in asked if c not in long}
        for cell in asked:
            yield cell, *found[cell].result()


def main() -> int:
    """Ask; return 1 where a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of " + ", ".join(KINDS))
    parser.add_argument("--all", action="store_true", help="all mistakes on 2 and 8 devices, and every form on chips")
    parser.add_argument("--jobs", type=int, default=WAYS, help="processes at a time")
    add_part(parser)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    every = {kind: [c for c in cells(args.all) if c.kind == kind and args.only in str(c)] for kind in kinds}
    asked = [cell for some in every.values() for cell in args.part.of(some)]
    began, rows = time.monotonic(), dict.fromkeys(kinds, 0)
    wrong = dict(rows)
    print(f"{'':5} {'kind':9} {'what':58} {'CPU s':>5}  said")
    for cell, told, seconds in answers(asked, args.jobs):
        for i, (what, right, text) in enumerate(told):
            took = f"{seconds:5.1f}" if i == 0 else ""
            print("right" if right else "WRONG", f"{cell.kind:9} {what:58} {took:5} ", text[:170].strip(), flush=True)
            rows[cell.kind] += 1
            wrong[cell.kind] += not right
    for kind, count in rows.items():
        print(f"{count} rows of {kind}, {wrong[kind]} wrong")
    print(f"part {args.part}: {time.monotonic() - began:,.0f} s, of CPUs {cpu_seconds():,.0f} s")
    return 1 if any(wrong.values()) or not asked else 0


if __name__ == "__main__":
    sys.exit(main())

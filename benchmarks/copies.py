"""Long runs made of a short one: its prompts, or its cases, many times under other names. No tensors are copied."""

import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from subprocess import run as execute
from typing import Any

import msgspec

from precaudit.recording.runs.compared_programs import Compared
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import PAIRS, ProgramRun, is_program_run
from precaudit.schema.records.comparisons import CompareRecord, PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS
from precaudit.schema.records.lines import encode, read_lines, read_record
from precaudit.schema.records.runs import PointRecord, PromptRecord, RunRecord, StepRecord

COPIED = {"prompts.jsonl": PromptRecord, "steps.jsonl": StepRecord, "points.jsonl": PointRecord,
          "prefill_decode.jsonl": PrefillDecodeRecord}  # fmt: skip
# peak resident memory of a command in MB, from a process that is small (a child's begins at its parent's); CPU seconds
LAUNCHER = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime, done.returncode)
print(done.stdout[-2000:])
"""


def peak(*arguments: str) -> tuple[float, float, int, str]:
    """Run ``precaudit`` with arguments; return peak memory in MB, CPU seconds, exit code, the end of its output."""
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-m", "precaudit", *arguments]
    head, _, said = execute(command, capture_output=True, text=True, check=True).stdout.partition("\n")
    megabytes, seconds, code = head.split()
    return float(megabytes), float(seconds), int(code), said


def failing(source: Path, target: Path) -> None:
    """Write a short compared run whose records all fail, for ``copy``: its hashes are not those of its records."""
    shutil.copytree(source, target)
    errors = [msgspec.json.decode(line) for line in (source / "errors.jsonl").read_bytes().splitlines()]
    for e in errors:
        if e["kind"] == "local" and e.get("unexplained"):
            e["unexplained"]["excess"] = 1e3
        e |= {"forward": {"ratio": 1e3}, "state": {"mismatched": 5}}.get(e["kind"], {})
    (target / "errors.jsonl").write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in errors))


def copy(source: Path, target: Path, count: int) -> int:
    """Write a compared run, of a model or of a program, with at least ``count`` error records; return how many."""
    some = read_lines(source / "errors.jsonl", ERROR_KINDS)
    times = -(-count // len(some))
    target.mkdir(parents=True)
    _write(target / "errors.jsonl", some, "prompt", times)
    if is_program_run(source):
        _program(source, target, times)
    else:
        _model(source, target, times)
    return times * len(some)


def _write(path: Path, some: list[Any], name: str, times: int) -> None:
    with path.open("wb") as f:
        for i, x in product(range(times), some):
            f.write(encode(msgspec.structs.replace(x, **{name: f"{getattr(x, name)}{i}"})))


def _ids(names: tuple[str, ...], times: int) -> Iterator[str]:
    return (f"{name}{i}" for i, name in product(range(times), names))


def _model(source: Path, target: Path, times: int) -> None:
    for name, kind in COPIED.items():
        _write(target / name, read_lines(source / name, kind), "id" if kind is PromptRecord else "prompt", times)
    run = read_record(source / "run.json", RunRecord, "a run")
    ids = tuple(_ids(run.requested.prompts, times))
    run = msgspec.structs.replace(
        run, requested=msgspec.structs.replace(run.requested, prompts=ids),
        neutrality=tuple(
            msgspec.structs.replace(n, prompts=tuple(_ids(n.prompts, times)), apart=n.apart * times)
            for n in run.neutrality
        ),
        hashes={name: file_hash(target / name) for name in run.hashes},
    )  # fmt: skip
    (target / "run.json").write_bytes(encode(run))
    found = read_record(source / "compare.json", CompareRecord, "a comparison")
    found = msgspec.structs.replace(
        found, run=file_hash(target / "run.json"), hashes={name: file_hash(target / name) for name in found.hashes},
        selections=tuple(msgspec.structs.replace(s, prompts=tuple(_ids(s.prompts, times))) for s in found.selections),
    )  # fmt: skip
    (target / "compare.json").write_bytes(encode(found))


def _program(source: Path, target: Path, times: int) -> None:
    run = read_record(source / "run.json", ProgramRun, "a program's run")
    cases = tuple(_ids(run.cases, times))
    checked = tuple(msgspec.structs.replace(n, case=f"{n.case}{i}") for i, n in product(range(times), run.neutrality))
    (target / "run.json").write_bytes(encode(msgspec.structs.replace(run, cases=cases, neutrality=checked, hashes={})))
    found = read_record(source / "compared.json", Compared, "a comparison")
    if found.pairs:
        _write(target / PAIRS, read_lines(source / PAIRS, PrefillDecodeRecord), "prompt", times)
    found = msgspec.structs.replace(
        found, run=file_hash(target / "run.json"), errors=file_hash(target / "errors.jsonl"),
        pairs=file_hash(target / PAIRS) if found.pairs else "",
    )  # fmt: skip
    (target / "compared.json").write_bytes(encode(found))

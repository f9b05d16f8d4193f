"""A program's run that was cut off: the cases that it holds whole, and whether it is the one that is asked for."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec

from precaudit.errors import UserError
from precaudit.recording.runs.arrays import arrays_hash, is_file, read_arrays
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import FORMER, manifest_of
from precaudit.recording.runs.programs import EntryRun, Opened, ProgramRun, file_name
from precaudit.recording.runs.unfinished import manifest_to_go_on, refuse
from precaudit.schema.records.lines import read_record

STRICTLY = "compiled without excess precision"  # how the note of a run so begins
# What the numbers of two runs depend on, as a reader knows it.
ASKED = {
    "code": "the program's operations",
    "weights": "the parameters",
    "cases": "the cases",
    "calls": "the calls",
    "began": "the calls",
    "points": "the points",
    "outputs": "the outputs",
    "layers": "the layers",
    "taps": "--taps",
    "asked": "--points",
    "renamed": "the names of points",
    "loops": "the iterations of loops",
    "policy": "the policy",
    "origin": "the checkpoint of the weights",
    "device": "the device",
    "xla_flags": "XLA_FLAGS",
    "versions": "the versions of libraries",
    "entry": "the entry points",
    "tokens": "the input of tokens",
    "start": "the input of positions",
    "processes": "the processes",
    "sketch": "--sketch",
}


def manifest_to_resume(folder: Path, now: ProgramRun, strict: bool) -> ProgramRun:
    """Return the manifest of a run to go on with, with the hashes and notes of the cases that it holds whole.

    ``strict``: it is compiled without excess precision. Raises UserError where there is none, or it is not what ``now``
    asks for.
    """
    path = manifest_to_go_on(folder, "program")
    held = read_record(path, ProgramRun, "a program's run")
    if path.name in FORMER:  # which said less of what its numbers depend on
        versions = {name: x for name, x in now.versions.items() if name not in held.versions} | held.versions
        held = msgspec.structs.replace(held, versions=versions, xla_flags=now.xla_flags)
    now = msgspec.json.decode(msgspec.json.encode(now), type=ProgramRun)  # as it is once it was written
    cases = whole_cases(folder, held)
    differs = list(_differing(held, now))
    if cases and strict != any(w.startswith(STRICTLY) for w in held.warnings):
        differs.append("--strict")
    refuse(folder, list(dict.fromkeys(differs)))
    files = {name for case in cases for name in _files(folder, held, case)}
    return msgspec.structs.replace(
        held,
        hashes={name: x for name, x in held.hashes.items() if name in files},
        bytes=sum(_bytes(folder, name) for name in files),
        neutrality=tuple(n for n in held.neutrality if n.case in cases),
        then=tuple(
            msgspec.structs.replace(x, neutrality=tuple(n for n in x.neutrality if n.case in cases)) for x in held.then
        ),
    )


def whole_cases(folder: Path, held: ProgramRun) -> tuple[str, ...]:
    """Return the cases of which every file is there as it was written."""
    return tuple(
        case for case in held.cases if all(_is_whole(folder, held, name) for name in _files(folder, held, case))
    )


def _is_whole(folder: Path, held: ProgramRun, name: str) -> bool:
    """Whether a file, or what several processes wrote, is there as it was written."""
    if name not in held.hashes:
        return False
    if is_file(name):
        return (folder / name).is_file() and file_hash(folder / name) == held.hashes[name]
    with suppress(UserError):
        return arrays_hash(read_arrays(folder, name)) == held.hashes[name]
    return False


def _bytes(folder: Path, name: str) -> int:
    if is_file(name):
        return (folder / name).stat().st_size
    return sum(x.nbytes for x in read_arrays(folder, name).values())


def cut_off(folder: Path) -> tuple[int, int] | None:
    """Return how many cases a run that was cut off holds whole, and how many it has; None where none is."""
    try:
        held = read_record(manifest_of(folder), ProgramRun, "a program's run")
    except (OSError, UserError):
        return None
    return None if held.finished is not None else (len(whole_cases(folder, held)), len(held.cases))


def _files(folder: Path, held: ProgramRun, case: str) -> Iterator[str]:
    """Yield the files that a case's calls are in."""
    for one in Opened(folder, held).entries:
        kinds = ("taps", "inputs", "outputs") if held.sketch is None else ("taps",)
        for call, kind in product(range(one.record.calls), kinds):
            yield file_name(one.record, case, call, kind)


def _differing(held: ProgramRun, now: ProgramRun) -> Iterator[str]:
    """Yield what two runs differ in, in words."""
    pairs: list[tuple[ProgramRun | EntryRun, ProgramRun | EntryRun]] = [
        (held, now),
        *zip(held.then, now.then, strict=False),
    ]
    if len(held.then) != len(now.then):
        yield ASKED["entry"]
    for a, b in pairs:
        yield from (what for name, what in ASKED.items() if getattr(a, name, None) != getattr(b, name, None))

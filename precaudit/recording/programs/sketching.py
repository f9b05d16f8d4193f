"""A shipped model as programs, one for each length of prompts, of which no tensors are kept (JAX)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from precaudit.errors import UserError
from precaudit.progress import Advance, silent
from precaudit.recording.programs.own import served_of
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.folders import LENGTH, prepare_folder
from precaudit.recording.runs.programs import Opened
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import CACHES
from precaudit.schema.records.runs import PromptRecord
from precaudit.schema.selection import Selection


def programs_by_length(subject: Subject, prompts: Sequence[PromptRecord], steps: int) -> dict[int, Program]:
    """Return a model as a program for each length of prompts; raises UserError for one of several devices."""
    if subject.mesh.devices > 1 or subject.predicted is not None:
        raise UserError("--sketch and --stats-only of a model are of one device: a program of your own says its mesh")
    if steps < 0:
        raise UserError(f"--decode-steps {steps}: at least 0")
    cases: defaultdict[int, dict[str, Sequence[int]]] = defaultdict(dict)
    for p in prompts:
        cases[len(p.tokens)][p.id] = p.tokens
    return {length: served_of(subject, cases[length], steps) for length in sorted(cases)}


def sketch_programs(
    programs: Mapping[int, Program],
    folder: Path,
    select: Selection,
    options: ProgramTraceOptions,
    tell: Advance = silent,
) -> list[Opened]:
    """Run a model's programs and keep sketches, in a folder with a run for each length of prompts."""
    prepare_folder(folder, options.force)
    some = ProgramSelection(points=_asked(select.points, select.phases), phases=select.phases, taps="own")
    options = replace(options, force=False)
    return [trace_program(p, folder / f"{LENGTH}{length}", some, options, tell) for length, p in programs.items()]


def _asked(points: Sequence[str], phases: Sequence[str]) -> list[str]:
    """Return the names of points, with the caches where decode reads them: whether these are as they were written."""
    return list(dict.fromkeys([*points, *(CACHES.values() if "decode" in phases else ())]))

"""The exam's mistakes in a ``Program`` of tiny, prefill or decode from an empty cache, with its names map and policy.

What a model's run is told of a mistake, a program's has to be told, at the same point and layer.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from exams.mistakes import Mistake, placed
from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.programs import diagnose_program
from precaudit.judging.gate import gate
from precaudit.recording.programs.own import decode_of, prefill_call
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.programs import Opened
from precaudit.recording.tracing.subject import Subject
from precaudit.references.comparison.programs import compare_program
from precaudit.references.names_map import Names
from precaudit.schema.prompts import Prompt, encode_prompt

MAP = Path(__file__).parent / "maps" / "tiny.toml"
CACHES = 'k_cache = "k_cache"\nv_cache = "v_cache"\n'  # what decode shows beside


@dataclass(frozen=True)
class AsProgram:
    """The findings of a mistake's program, and what its gate exits with."""

    findings: tuple[Finding, ...]
    gate: int


def diagnosed(folder: Path, mistake: Mistake, layer: int | None) -> AsProgram:
    """Trace a mistake in one layer, or all, as a program of each phase it is in, until one has a finding."""
    found = AsProgram((), 0)
    for phase in mistake.phases:
        with placed():
            found = _of_phase(folder, mistake, layer, phase)
        if found.findings or found.gate:
            break
    return found


def _of_phase(folder: Path, mistake: Mistake, layer: int | None, phase: str) -> AsProgram:
    """Trace a mistake's program of a phase, compare it with its map, gate and diagnose it."""
    subject = mistake.subject(layer)
    program = program_of(subject, mistake, phase)
    opened = trace_program(program, folder / "program", options=ProgramTraceOptions(force=True))
    map = folder / "tiny.toml"
    map.write_text(map_text(opened, phase))
    compare_program(opened, program, Names(map, Path(subject.checkpoint.path) / "config.json"))
    code = gate(opened.folder).exit_code
    findings = diagnose_program(opened, program).findings
    return AsProgram(tuple(msgspec.structs.replace(f, cause=_of_prompt(f.cause)) for f in findings), code)


def map_text(opened: Opened, phase: str) -> str:
    """Return the names map without points that a mistake in every layer leaves without a tap."""
    shown = {p.name for p in opened.record.points}
    lines = MAP.read_text().splitlines() + (CACHES.splitlines() if phase == "decode" else [])
    first = lines.index("[points]")
    kept = [x for x in lines[first + 1 :] if (found := re.search(r'"(\w+)"', x)) is None or found[1] in shown]
    return "\n".join([*lines[: first + 1], *kept]) + "\n"


def _of_prompt(cause: str) -> str:
    """Return a cause that names a row of the batch by its prompt, as in a model's run."""
    return cause.replace("a, row 0", "a").replace("a, row 1", "b")


def program_of(subject: Subject, mistake: Mistake, phase: str) -> Program:
    """Return a subject as a program of prefill, or of decode from an empty cache, over a mistake's prompts."""
    every = [list(encode_prompt(Prompt(id="a", prompt=t), subject.tokenizer)[1]) for t in mistake.prompts]
    n = min(map(len, every))
    ids = np.asarray([x[:n] for x in every]) if len(every) > 1 else np.asarray(every[0])
    if phase == "prefill":
        return prefill_call(subject, {"a": ids})
    return decode_of(subject, {"a": np.concatenate([ids, ids[..., : mistake.steps]], axis=-1)})

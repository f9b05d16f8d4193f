"""The exam's mistakes in a ``Program`` of tiny, prefill or decode from an empty cache, with its names map and policy.

What a model's run is told of a mistake, a program's has to be told, at the same point and layer.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from exams.mistakes import Mistake, placed
from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.programs import diagnose
from precaudit.judging.gate import gate
from precaudit.recording.programs.own import decode_of, prefill_of
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace
from precaudit.recording.tracing.subject import Subject
from precaudit.references.comparison.programs import compare
from precaudit.references.mapped import Names
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
    opened = trace(program, folder / "program", force=True)
    map = folder / "tiny.toml"
    map.write_text(MAP.read_text() + (CACHES if phase == "decode" else ""))
    compare(opened, program, Names(map, Path(subject.checkpoint.path) / "config.json"))
    code = gate(opened.folder).exit_code
    findings = diagnose(opened, program).findings
    return AsProgram(tuple(msgspec.structs.replace(f, cause=_of_prompt(f.cause)) for f in findings), code)


def _of_prompt(cause: str) -> str:
    """Return a cause that names a row of the batch by its prompt, as in a model's run."""
    return cause.replace("a, row 0", "a").replace("a, row 1", "b")


def program_of(subject: Subject, mistake: Mistake, phase: str) -> Program:
    """Return a subject as a program of prefill, or of decode from an empty cache, over a mistake's prompts."""
    every = [list(encode_prompt(Prompt(id="a", prompt=t), subject.tokenizer)[1]) for t in mistake.prompts]
    n = min(map(len, every))
    ids = np.asarray([x[:n] for x in every]) if len(every) > 1 else np.asarray(every[0])
    if phase == "prefill":
        return prefill_of(subject, {"a": ids})
    return decode_of(subject, {"a": np.concatenate([ids, ids[..., : mistake.steps]], axis=-1)})

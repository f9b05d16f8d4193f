"""The exam's mistakes in a ``Program`` of tiny, prefill or decode from an empty cache, with its names map and policy.

What a model's run is told of a mistake, a program's has to be told, at the same point and layer.
"""

from dataclasses import dataclass
from pathlib import Path

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
MORE = 6  # tokens after the prompt's, as the longest run of the exam decodes


@dataclass(frozen=True)
class AsProgram:
    """The findings of a mistake's program, and what its gate exits with."""

    findings: tuple[Finding, ...]
    gate: int


def diagnosed(folder: Path, mistake: Mistake, layer: int | None) -> AsProgram:
    """Trace a mistake in one layer, or all, as a program; compare, gate and diagnose it."""
    with placed():
        subject = mistake.subject(layer)
        program, caches = program_of(subject, mistake)
        opened = trace(program, folder / "program", force=True)
        names = Names(written(folder, caches), Path(subject.checkpoint.path) / "config.json")
        compare(opened, program, names)
        code = gate(opened.folder).exit_code
        return AsProgram(diagnose(opened, program).findings, code)


def written(folder: Path, caches: bool) -> Path:
    """Write the map of tiny's parameters and points, those of decode's caches too, and return its file."""
    path = folder / "tiny.toml"
    path.write_text(MAP.read_text() + (CACHES if caches else ""))
    return path


def program_of(subject: Subject, mistake: Mistake) -> tuple[Program, bool]:
    """Return a subject as a program of the mistake's phase, and whether it decodes."""
    every = [list(encode_prompt(Prompt(id="a", prompt=t), subject.tokenizer)[1]) for t in mistake.prompts]
    n = min(map(len, every))
    ids = np.asarray([x[:n] for x in every]) if len(every) > 1 else np.asarray(every[0])
    if "prefill" in mistake.phases:
        return prefill_of(subject, {"a": ids}), False
    more = np.concatenate([ids, ids[..., :MORE]], axis=-1)
    return decode_of(subject, {"a": more}), True

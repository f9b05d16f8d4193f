"""A shipped model as programs, one for each length of prompts, of which no tensors are kept (JAX)."""

from collections.abc import Sequence
from pathlib import Path

from precaudit.errors import UserError
from precaudit.progress import Advance, silent
from precaudit.recording.programs.own import served_of
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.folders import LENGTH, prepare_folder
from precaudit.recording.runs.programs import Opened
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import CACHES
from precaudit.schema.records.runs import PromptRecord


def sketch_model(
    subject: Subject,
    prompts: Sequence[PromptRecord],
    folder: Path,
    n: int,
    steps: int,
    points: Sequence[str],
    phases: Sequence[str],
    force: bool = False,
    command: str = "precaudit.trace(...)",
    tell: Advance = silent,
) -> list[Opened]:
    """Run a model over prompts and keep sketches, in a folder with a run for each length of prompts."""
    if subject.mesh.devices > 1 or subject.predicted is not None:
        raise UserError("--sketch and --stats-only of a model are of one device: a program of your own says its mesh")
    if steps < 0:
        raise UserError(f"--decode-steps {steps}: at least 0")
    prepare_folder(folder, force)
    made = []
    for length in sorted({len(p.tokens) for p in prompts}):
        cases = {p.id: p.tokens for p in prompts if len(p.tokens) == length}
        run, asked = folder / f"{LENGTH}{length}", _asked(points, phases)
        program, own = served_of(subject, cases, steps), tuple(phases)
        made.append(
            trace_program(program, run, command=command, tell=tell, taps="own", asked=asked, phases=own, sketch=n)
        )
    return made


def _asked(points: Sequence[str], phases: Sequence[str]) -> list[str]:
    """Return the names of points, with the caches where decode reads them: whether these are as they were written."""
    return list(dict.fromkeys([*points, *(CACHES.values() if "decode" in phases else ())]))

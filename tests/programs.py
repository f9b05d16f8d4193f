"""Small pieces the tests build runs from."""

from pathlib import Path

from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import Options, trace
from precaudit.references.comparison.compare import Options as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection

TEXT = "import os\n\n\ndef read(path):\n"


def record(
    folder: Path, subject="tiny", policy="bf16", prompts=None, select=None, parts=None, settings=None, **options
):
    """Trace one short prompt (or ``prompts``) and return the run."""
    given = [Prompt(id=f"p{i}", prompt=t) for i, t in enumerate(prompts or [TEXT])]
    options.setdefault("decode_steps", 2)
    return trace(
        load(subject, policy, settings, "cpu", parts),
        folder,
        given,
        select or Selection(),
        Options(force=True, **options),
    )


def errors(folder: Path, kind=None, **options):
    """Compare a run and return its records, of one kind if given."""
    found = compare(folder, options=CompareOptions(**options)).errors
    return [e for e in found if kind is None or e.kind == kind]


def everything(**filters):
    """Select every point."""
    return Selection.parse(points="all,logits:all", **filters)

"""Short runs of models and programs, compared, or altered as a fault would."""

import shutil
from pathlib import Path

import msgspec
from safetensors.numpy import load_file, save_file

from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
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
        TraceOptions(force=True, **options),
    )


def errors(folder: Path, kind=None, **options):
    """Compare a run and return its records, of one kind if given."""
    found = compare(folder, options=CompareOptions(**options)).errors
    return [e for e in found if kind is None or e.kind == kind]


def everything(**filters):
    """Select every point."""
    return Selection.parse(points="all,logits:all", **filters)


def altered(opened, folder, point, change, kind="taps"):
    """Return a copy of a run with a tap (or an output) of the first call changed, as a fault in making it would."""
    shutil.copytree(opened.folder, folder)
    name = file_name(opened.record, "a", 0, kind)
    tensors = load_file(folder / name)
    tensors[point] = change(tensors[point].copy())
    save_file(tensors, folder / name)
    record = msgspec.structs.replace(opened.record, hashes={**opened.record.hashes, name: file_hash(folder / name)})
    (folder / "run.json").write_bytes(msgspec.json.encode(record))
    return open_program_run(folder)

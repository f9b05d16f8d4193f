"""The manifest of a run: model, policy, what was requested, where and with which versions."""

import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib import metadata

import msgspec

import precaudit
from precaudit.mirrors import by_url
from precaudit.models.jax_decoder.family import family_parts as family_parts
from precaudit.recording.tracing.devices import devices_of_processes
from precaudit.recording.tracing.predicting import device_name
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.records.base import SCHEMA
from precaudit.schema.records.runs import ModelRecord, Requested, RunRecord


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def number_versions() -> dict[str, str]:
    """Return the versions that can change numbers."""
    found = {"python": platform.python_version(), "precaudit": precaudit.__version__}
    for name in ("jax", "jaxlib", "libtpu", "numpy", "transformers", "ml_dtypes"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the working folder, with ``+`` when tracked files differ from it; None outside git."""
    try:
        run = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=True)
        head = run(["git", "rev-parse", "HEAD"]).stdout.strip()
        return head + ("+" if run(["git", "status", "--porcelain", "-uno"]).stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_of(subject: Subject) -> str:
    """Return the device a subject runs on, or is predicted for, as its maker names it."""
    if subject.predicted is not None:
        return device_name(subject.predicted)
    return str(getattr(subject.device, "device_kind", subject.platform))


def mesh_processes(subject: Subject) -> tuple[tuple[int, ...], ...]:
    """Return which devices of the mesh each of several processes holds; nothing of one process."""
    return () if subject.layout is None else devices_of_processes(list(subject.layout.mesh.devices.flat))


def begin(subject: Subject, requested: Requested, name: str, command: str) -> RunRecord:
    """Return the manifest of a run that starts now."""
    checkpoint = subject.checkpoint
    model = ModelRecord(
        id=checkpoint.name,
        reference=by_url(subject.reference),
        sha256=checkpoint.hashes.sha256(),
        config=msgspec.to_builtins(subject.config),
        allowed=checkpoint.allowed,
    )
    return RunRecord(
        schema=SCHEMA,
        id=name,
        model=model,
        policy=asdict(subject.policy),
        requested=requested,
        device=device_of(subject),
        device_count=subject.mesh.devices,
        versions=number_versions(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        commit=commit(),
        command=command,
        started=now(),
        mesh=subject.mesh.axes if subject.mesh.devices > 1 else {},
        processes=mesh_processes(subject),
        program="shipped" if subject.parts == family_parts(subject.config) else "other",
    )


def asked_in_words(record: RunRecord) -> dict[str, str]:
    """Return what a run was asked for: model, policy and what is recorded, by what each is called."""
    asked = msgspec.to_builtins(record.requested)
    return {
        "the weights": record.model.sha256,
        **{f"policy {key}": str(value) for key, value in record.policy.items()},
        **{key: str(value) for key, value in asked.items()},
    }

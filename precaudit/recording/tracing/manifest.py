"""The manifest of a model's run: model, policy, what was requested, and where."""

from dataclasses import asdict

import msgspec

from precaudit.mirrors import by_url
from precaudit.models.jax_decoder.family import family_parts as family_parts
from precaudit.recording.tracing.conditions import now, run_conditions
from precaudit.recording.tracing.devices import devices_of_processes
from precaudit.recording.tracing.predicting import device_name
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.records.manifests import SCHEMA
from precaudit.schema.records.runs import ModelRecord, Requested, RunRecord


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
        command=command,
        started=now(),
        mesh=subject.mesh.axes if subject.mesh.devices > 1 else {},
        processes=mesh_processes(subject),
        program="shipped" if subject.parts == family_parts(subject.config) else "other",
        **run_conditions(),
    )


def asked_in_words(record: RunRecord) -> dict[str, str]:
    """Return what a run was asked for: model, policy and what is recorded, by what each is called."""
    asked = msgspec.to_builtins(record.requested)
    return {
        "the weights": record.model.sha256,
        **{f"policy {key}": str(value) for key, value in record.policy.items()},
        **{key: str(value) for key, value in asked.items()},
    }

"""What a run was: the facts of its manifest, for the foot of a report."""

from collections.abc import Iterator

from precaudit.recording.runs.programs import ProgramRun, points_text
from precaudit.reports.report import Facts
from precaudit.schema.digits import count_text
from precaudit.schema.places import spans
from precaudit.schema.records.runs import RunRecord


def title(r: RunRecord | ProgramRun) -> str:
    """Return what was run."""
    return (r.program or r.id) if isinstance(r, ProgramRun) else r.model.id


def subtitle(r: RunRecord | ProgramRun) -> str:
    """Return how and on what it was run, in a line."""
    if isinstance(r, ProgramRun):
        return f"run {r.id} · {r.device} · {count_text(len(r.cases), 'case')}, {r.every_calls} · {_day(r)}"
    layers = count_text(len(r.requested.layers), "layer")
    prompts = count_text(len(r.requested.prompts), "prompt")
    return f"run {r.id} · policy {r.policy.get('name', '')} · {r.device} · {layers}, {prompts} · {_day(r)}"


def _day(r: RunRecord | ProgramRun) -> str:
    return (r.finished or "not finished").partition("T")[0]


def facts_of(r: RunRecord | ProgramRun) -> Facts:
    """Return (name, value) of everything that says what a run's numbers are of."""
    return tuple((k, v) for k, v in (_program(r) if isinstance(r, ProgramRun) else _model(r)) if v)


def _model(r: RunRecord) -> Iterator[tuple[str, str]]:
    c, asked = r.model.config, r.requested
    yield "run", r.id
    yield "model", r.model.id if r.model.id == r.model.reference else f"{r.model.id} ({r.model.reference})"
    yield "weights, SHA-256", r.model.sha256
    yield "architecture", ", ".join(f"{k} {c[k]}" for k in ("family", "layers", "width", "heads", "vocab") if k in c)
    yield "policy", ", ".join(f"{k} {v}" for k, v in r.policy.items())
    yield "recorded", f"{', '.join(asked.points)}; {', '.join(asked.phases)}; layers {spans(asked.layers)}"
    yield "prompts", ", ".join(asked.prompts)
    yield "decode steps", str(asked.decode_steps)
    yield "device", f"{r.device} × {r.device_count}"
    yield "mesh", ", ".join(f"{axis} {n}" for axis, n in r.mesh.items())
    yield from _common(r)
    yield "SHA of the files", ", ".join(f"{k} {v}" for k, v in r.hashes.items())


def _program(r: ProgramRun) -> Iterator[tuple[str, str]]:
    yield "run", r.id
    yield "program", r.program
    yield "code, SHA-256", r.code
    yield "weights, SHA-256", r.weights
    yield "cases", ", ".join(r.cases)
    yield "calls", r.every_calls
    yield "points", f"{len(r.judged_points)}, {points_text(r)}"
    yield "device", r.device
    yield from _common(r)


def _common(r: RunRecord | ProgramRun) -> Iterator[tuple[str, str]]:
    yield "XLA flags", r.xla_flags
    yield "versions", ", ".join(f"{k} {v}" for k, v in r.versions.items())
    yield "commit", r.commit or ""
    yield "command", r.command
    yield "started", r.started
    yield "finished", r.finished or "not finished"

"""What a run was: the facts of its manifest, for the foot of a report."""

from collections.abc import Iterator

from precaudit.recording.runs.programs import ProgramRun, taken
from precaudit.reports.gathered import Gathered
from precaudit.schema.places import spans
from precaudit.schema.records.runs import RunRecord


def title(found: Gathered) -> str:
    """Return what was run."""
    if found.program is not None:
        return found.program.record.program or found.program.record.id
    assert found.compared is not None
    return found.compared.run.record.model.id


def subtitle(found: Gathered) -> str:
    """Return how and on what it was run, in a line."""
    r = found.judgement.name
    if found.program is not None:
        p = found.program.record
        return f"run {r} · {p.device} · {_counted(len(p.cases), 'case')}, {_counted(p.calls, 'call')} · {_day(p)}"
    assert found.compared is not None
    m = found.compared.run.record
    layers = _counted(len(m.requested.layers), "layer")
    prompts = _counted(len(m.requested.prompts), "prompt")
    return f"run {r} · policy {m.policy.get('name', '')} · {m.device} · {layers}, {prompts} · {_day(m)}"


def _counted(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def _day(r: RunRecord | ProgramRun) -> str:
    return (r.finished or "not finished").partition("T")[0]


def facts(found: Gathered) -> list[tuple[str, str]]:
    """Return (name, value) of everything that says what the numbers are of."""
    if found.program is not None:
        return [(k, v) for k, v in _program(found.program.record) if v]
    assert found.compared is not None
    return [(k, v) for k, v in _model(found.compared.run.record) if v]


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
    yield "XLA flags", r.xla_flags
    yield from _common(r)
    yield "commit", r.commit or ""
    yield "SHA of the files", ", ".join(f"{k} {v}" for k, v in r.hashes.items())


def _program(r: ProgramRun) -> Iterator[tuple[str, str]]:
    yield "run", r.id
    yield "program", r.program
    yield "code, SHA-256", r.code
    yield "weights, SHA-256", r.weights
    yield "cases", ", ".join(r.cases)
    yield "calls", str(r.calls)
    yield "points", f"{len(r.judged)}, {taken(r)}"
    yield "device", r.device
    yield from _common(r)


def _common(r: RunRecord | ProgramRun) -> Iterator[tuple[str, str]]:
    yield "versions", ", ".join(f"{k} {v}" for k, v in r.versions.items())
    yield "command", r.command
    yield "started", r.started
    yield "finished", r.finished or "not finished"

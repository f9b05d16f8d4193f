"""The same prompts under many policies: what each costs in precision, and what it takes in time and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as changed

from precaudit.checks.rollouts.limits import RolloutRecord
from precaudit.errors import UserError, enough_memory
from precaudit.progress import Progress
from precaudit.reports.policies import PolicyRow
from precaudit.reports.sweep import SweepRow, front
from precaudit.schema.meshes import ONE, MeshShape
from precaudit.schema.policies import Policy
from precaudit.schema.records.base import Number, Record, json_number, value
from precaudit.schema.records.lines import decode_lines, write_lines
from precaudit.workflows.several import PolicySubjects, compare_policies, trace_policies

if TYPE_CHECKING:
    from precaudit.checks.rollouts.timing import How, Spread, Timing
    from precaudit.recording.tracing.subject import Subject
    from precaudit.recording.tracing.trace import TraceOptions
    from precaudit.references.comparison.compare import CompareOptions as CompareOptions
    from precaudit.schema.selection import Selection

ROWS, DRAWN = "sweep.jsonl", "drawn.jsonl"
Load = Callable[[Policy, str], "Subject"]


class Asked(Record, frozen=True, tag_field="kind", tag="asked"):
    """What was drawn: under which policies, after which tokens, and how; the first line of drawn.jsonl."""

    policies: tuple[dict[str, str], ...]
    prompts: tuple[tuple[int, ...], ...]
    how: str


@dataclass(frozen=True)
class Sweep:
    """What is asked: policies, prompts, how tokens are drawn, a TPU to predict (None: none), and the subjects' mesh."""

    policies: Sequence[Policy]
    prompts: Any
    select: "Selection"
    traced: "TraceOptions"
    compared: "CompareOptions"
    how: "How"
    tpu: str | None = None
    mesh: MeshShape = ONE


def sweep(load: Load, asked: Sweep, folder: Path, progress: Progress | None = None) -> list[SweepRow]:
    """Trace, compare, draw and time every policy into ``folder``, and return a row a policy, the first one's first.

    ``load(policy, device)`` opens the subject. What stands in the folder of the same request is not done again where
    ``asked.traced.resume`` says so. Raises UserError where no policy can run.
    """
    progress = progress or Progress()
    _check(asked)
    subjects = PolicySubjects(asked.policies, lambda p: load(p, ""))
    traced = trace_policies(subjects, folder, asked.prompts, asked.select, asked.traced, progress)
    errors, _ = compare_policies(folder, asked.compared, progress.advance)
    by_name = {row.policy: row for row in errors}
    ran = [(p, t) for p, t in zip(asked.policies, traced, strict=True) if t.run is not None]
    given = [(q.id, q.tokens) for q in next(t.run for _, t in ran if t.run is not None).prompts.values()]
    drawn = _draw(load, [p for p, _ in ran], given, asked, folder, progress)
    predicted = {} if asked.tpu is None else _predict(load, asked, given[0][0], folder, progress)
    rows = [
        _row(t.policy, by_name.get(t.policy), drawn.get(t.policy), predicted.get(t.policy), t.why or None)
        for t in traced
    ]
    first, best = next((r.prefill_ms for r in rows if r.prefill_ms is not None), None), front(rows)
    rows = [
        changed(r, front=r.policy in best, prefill_ratio=None if r.prefill_ms is None else _over(r.prefill_ms, first))
        for r in rows
    ]
    write_lines(folder / ROWS, rows)
    return rows


def _check(asked: Sweep) -> None:
    """Refuse what could not be drawn or predicted before anything runs."""
    from precaudit.checks.rollouts.scoring import BATCH
    from precaudit.interpreters.tpu.target import mesh as target_mesh
    from precaudit.recording.tracing.predicting import target_of

    if min(asked.how.batch, asked.how.new_tokens, asked.how.rounds) < 1:
        raise UserError("--batch, --new-tokens and --rounds must be at least 1")
    mesh = asked.mesh
    for n, what in ((asked.how.batch, f"--batch {asked.how.batch}"), (BATCH, f"the {BATCH} sequences scored together")):
        if n % mesh.data:
            raise UserError(f"--mesh {mesh}: data={mesh.data} does not divide {what}")
    if asked.tpu is not None:
        target = target_of(f"tpu-predicted:{asked.tpu}")
        if mesh.devices > 1 and target is not None:
            target_mesh(target, mesh.axes)


@dataclass(frozen=True)
class _Drawn:
    """What was measured of a policy's drawing, and its mismatch with its own prefill."""

    timing: "Timing"
    parity: RolloutRecord


def _draw(
    load: Load,
    policies: Sequence[Policy],
    prompts: Sequence[tuple[str, Sequence[int]]],
    asked: Sweep,
    folder: Path,
    progress: Progress,
) -> dict[str, _Drawn]:
    """Draw under every policy, interleaved, or read what was drawn of the same request before."""
    request = Asked(
        policies=tuple({"name": p.name, **p.settings()} for p in policies),
        prompts=tuple(tuple(ids) for _, ids in prompts),
        how=repr(asked.how) + (f" on {asked.mesh}" if asked.mesh.devices > 1 else ""),
    )
    path = folder / DRAWN
    if asked.traced.resume and (found := _read_kept(path, request)) is not None:
        return found
    from precaudit.checks.rollouts.drawn import draw_all
    from precaudit.checks.rollouts.parity import Checks
    from precaudit.checks.rollouts.timing import tasks

    subjects = [load(p, "") for p in policies]
    made = draw_all(subjects, tasks(prompts, 1), asked.how, Checks(exact=False), (), progress.advance)
    wholes = {p.policy: p.whole[0] for p in made.parities}
    write_lines(path, [request, *made.timings, *wholes.values()])
    return {t.policy: _Drawn(t, wholes[t.policy]) for t in made.timings}


def _read_kept(path: Path, request: Asked) -> dict[str, _Drawn] | None:
    """Return what drawn.jsonl holds of a request; None where it is not there, or of another."""
    from precaudit.checks.rollouts.timing import Timing

    try:
        data = path.read_bytes()
    except OSError:
        return None
    kinds: Any = Asked | Timing | RolloutRecord
    lines = list(decode_lines(data, kinds, str(path)))
    if not lines or lines[0] != request:
        return None
    wholes = {r.policy: r for r in lines if isinstance(r, RolloutRecord)}
    return {t.policy: _Drawn(t, wholes[t.policy]) for t in lines if isinstance(t, Timing) and t.policy in wholes}


def _predict(load: Load, asked: Sweep, prompt: str, folder: Path, progress: Progress) -> dict[str, PolicyRow]:
    """Return every policy's row on a TPU that is predicted, of one prompt."""
    device = f"tpu-predicted:{asked.tpu}"
    into = folder / f"tpu-{str(asked.tpu).replace(':', '-')}"
    select = replace(asked.select, prompts=(prompt,))
    with enough_memory():
        subjects = PolicySubjects(asked.policies, lambda p: load(p, device))
        trace_policies(subjects, into, asked.prompts, select, asked.traced, progress)
        rows, _ = compare_policies(into, asked.compared, progress.advance)
    return {row.policy: row for row in rows}


def _row(
    policy: str, errors: PolicyRow | None, drawn: _Drawn | None, predicted: PolicyRow | None, why: str | None
) -> SweepRow:
    if why is not None or errors is None or drawn is None:
        return SweepRow(policy=policy, why=why or "nothing was compared or sampled")
    t, m = drawn.timing, drawn.parity.mismatch
    return SweepRow(
        policy=policy,
        errors=errors,
        why=errors.why,
        prefill_ms=json_number(1e3 * t.prefill.median / t.prompt_tokens),
        decode_ms=None if t.decode_ms is None else json_number(t.decode_ms.median),
        memory=t.memory,
        decode_ratio=None if t.decode_ratio is None else json_number(1 / t.decode_ratio.median),
        k3_kl=m.k3_kl,
        abs_diff_max=m.abs_diff_max,
        predicted=None if predicted is None else predicted.logits,
        predicted_why=None if predicted is None else predicted.why,
        rounds=t.rounds,
        decode_spread=None if t.decode_ms is None else _spread(t.decode_ms),
    )


def _spread(times: "Spread") -> Number:
    return json_number(times.high / times.low)


def _over(ms: Number | None, first: Number | None) -> Number:
    return json_number(value(ms) / value(first))


def policies_of(names: str | None) -> list[str]:
    """Return the names in ``a,b``; without any the shipped policies, bf16 first. Raises UserError for an empty list."""
    from precaudit.schema.policies import shipped_policies

    if names is None:
        return sorted(shipped_policies(), key=lambda name: (name != "bf16", name))
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise UserError(f"--policy {names!r} names no policy")
    return [names] if Path(names).is_file() else found

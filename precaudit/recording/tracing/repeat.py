"""The same run once more: does the program give the same bits twice."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precaudit.errors import UserError
from precaudit.models.checkpoints import recorded_source
from precaudit.progress import Progress
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.tracing.subject import Subject, load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.brief import Brief
from precaudit.schema.coverage import SUMS
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.meshes import recorded_mesh
from precaudit.schema.policies import declared_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.runs import PointRecord
from precaudit.schema.selection import PHASES, Selection


@dataclass(frozen=True, repr=False)
class Repeat(Brief):
    """The new run, how many tensors both hold, and the first of those that differ, in program order."""

    run: Run
    tensors: int
    differing: int
    first: PointRecord | None

    @property
    def where(self) -> str | None:
        """The first tensor that differs, in words; None where none does."""
        if (p := self.first) is None:
            return None
        layer = "" if p.layer is None else f" of layer {p.layer}"
        return f"{p.point}{layer} ({p.prompt}, {p.phase} step {p.step})"


def repeat(
    run: Run | Path | str,
    output: Path | str,
    subject: Subject | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Repeat:
    """Trace what a run recorded again, as it was recorded, into ``output``, and compare every tensor bit for bit.

    ``subject``: its program, where it was not the shipped decoder. Raises UserError as ``trace`` does, and where the
    program is not at hand.
    """
    before = run if isinstance(run, Run) else open_run(run)
    record, asked = before.record, before.record.requested
    if subject is None:
        if record.program != "shipped":
            raise UserError(
                f"{before.folder}: not a run of the shipped decoder; precaudit.repeat(…, subject=…) takes it"
            )
        policy = declared_policy(record)
        where, device = recorded_source(record.model.reference), device_kind(record.device)
        mesh = recorded_mesh(record.mesh)
        subject = load(where, policy, None, device, allow=record.model.allowed, mesh=mesh)
    if subject.checkpoint.hashes.sha256() != record.model.sha256:
        raise UserError(f"{subject.reference}: the weights are not those of {before.folder}")
    prompts = [Prompt(id=p.id, tokens=p.tokens) for p in before.prompts.values()]
    points = ",".join([*asked.points, *(["logits:all"] if asked.every_logit else [])])
    source = Path(asked.tokens_from) if asked.tokens_from is not None else None
    ids = ",".join(asked.prompts) if source else None
    select = Selection.parse(",".join(map(str, asked.layers)), points, ",".join(asked.phases), asked.positions, ids)
    options = TraceOptions(
        asked.decode_steps, asked.batch, asked.pad, source, force, f"precaudit trace --repeat {before.folder}"
    )
    again = trace(subject, output, None if source else prompts, select, options, progress)
    return _compare(before, again)


def count_differing(before: Run, again: Run) -> int:
    """Return how many tensors of a run are not bit for bit those of another, or not there."""
    return _compare(before, again).differing


def _compare(before: Run, again: Run) -> Repeat:
    held: Mapping[Any, PointRecord] = {_key(p): p for p in again.points}
    both = [(p, held[_key(p)]) for p in before.points if _key(p) in held]
    differing = [p for p, q in both if (p.hash, p.shape, p.dtype) != (q.hash, q.shape, q.dtype)]
    differing += [p for p in before.points if _key(p) not in held]
    return Repeat(again, len(both), len(differing), min(differing, key=_order, default=None))


def _order(p: PointRecord) -> tuple[int, int, bool, int, int]:
    outside = p.layer is None
    return (PHASES.index(p.phase), p.step, outside, p.layer or 0, list(POINTS).index(p.point.removesuffix(SUMS)))


def _key(p: PointRecord) -> tuple[Any, ...]:
    return (p.prompt, p.phase, p.step, p.layer, p.point)

"""The same run once more: does the program give the same bits twice."""

from pathlib import Path

from precaudit.errors import UserError
from precaudit.models.checkpoints import recorded_source
from precaudit.progress import Progress
from precaudit.recording.runs.bits import Repeat, compare_bits
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.tracing.predicting import asked_device
from precaudit.recording.tracing.subject import Subject, load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.meshes import recorded_mesh
from precaudit.schema.policies import declared_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection


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
        where, device = recorded_source(record.model.reference), asked_device(record.device)
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
    return compare_bits(before, again)

"""The first line of rollouts.jsonl, of what was drawn and of what was read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import msgspec

from precaudit.checks.rollouts.drawn import Drawn
from precaudit.checks.rollouts.origin import RolloutRun, digest
from precaudit.checks.rollouts.parity import Checks, Parity
from precaudit.checks.rollouts.questions import Question
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.timing import How, Task
from precaudit.recording.tracing.conditions import number_versions
from precaudit.recording.tracing.manifest import device_of
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.records.base import SCHEMA


def of_drawn(
    found: Drawn,
    subjects: Sequence[Subject],
    given: Sequence[Task],
    how: How,
    checks: Checks,
    questions: Sequence[Question] = (),
) -> RolloutRun:
    """Return the first line of what was drawn after ``given``. Another batch is no other request."""
    ends = ",".join(map(str, how.ends))
    asked = {"rollouts": "drawn", "new_tokens": how.new_tokens, "end_tokens": ends, **asdict(how.sampling)}
    return msgspec.structs.replace(
        _record(subjects, found.parities[0], (t.prompt for t in given), asked),
        refused={r.policy: r.why for r in found.refused},
        apart=tuple(found.apart),
        trainer={} if checks.trainer is None else _trainer(checks.trainer),
        questions=digest(f"{q.id} {q.how} {q.final}" for q in questions),
    )


def of_read(found: Parity, subject: Subject, rollouts: Sequence[Rollout], temperature: float) -> RolloutRun:
    """Return the first line of rollouts that were made elsewhere."""
    asked = {"rollouts": "read", "temperature": temperature}
    return _record([subject], found, (r.prompt for r in rollouts), asked)


def _record(
    subjects: Sequence[Subject], parity: Parity, prompts: Iterable[Sequence[int]], asked: Mapping[str, object]
) -> RolloutRun:
    """Return the first line of rollouts to which no question was put, and which no trainer scored."""
    first = subjects[0]
    mesh = first.mesh if first.mesh.devices > 1 else None
    return RolloutRun(
        schema=SCHEMA,
        model=first.checkpoint.name,
        weights=first.checkpoint.hashes.sha256(),
        policies={s.policy.name: s.policy.settings() for s in subjects},
        refused={},
        apart=(),
        sides=tuple((r.rollout, r.trainer) for r in parity.whole),
        trainer={},
        prompts=digest(",".join(map(str, ids)) for ids in prompts),
        questions=digest(()),
        asked={k: str(x) for k, x in {**asked, "mesh": mesh}.items() if x is not None},
        device=device_of(first),
        versions=number_versions(),
    )


def _trainer(trainer: Subject) -> dict[str, str]:
    sha256 = trainer.checkpoint.hashes.sha256()
    return {"name": trainer.checkpoint.name, "weights_sha256": sha256, **trainer.policy.settings()}

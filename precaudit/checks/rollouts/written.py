"""What a file of rollouts' records holds that can be judged. No JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from precaudit.checks.rollouts.engine_rounding import EngineRounding
from precaudit.checks.rollouts.kinds import KINDS, Kind
from precaudit.checks.rollouts.limits import RolloutRecord, Side
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.questions import Answers, Changed
from precaudit.errors import UserError
from precaudit.schema.records.base import Number

Pair = tuple[str, Side, Side]  # a policy, the side that drew, the side it is held to
DECODED = {
    "rollout": RolloutRun,
    "mismatch": RolloutRecord,
    "rounding": EngineRounding,
    "answers": Answers,
    "paired": Changed,
}


class Reason(msgspec.Struct, frozen=True, tag_field="kind", tag="cause"):
    """What is judged of a cause (checks/rollouts/causes.py): whether rounding explains the records of its run."""

    id: str
    policy: str
    index: int
    verdict: str
    change: Number = "nan"


@dataclass(frozen=True)
class WrittenRecords:
    """The records of a rollout: of the whole by pair, answers by policy, paired answers and causes.

    ``rounding``: whether rounding explains an engine that made them.
    """

    path: Path
    origin: RolloutRun
    whole: dict[Pair, RolloutRecord]
    answers: dict[str, Answers]
    changed: tuple[Changed, ...]
    causes: tuple[Reason, ...]
    rounding: EngineRounding | None = None


def read_written(path: Path) -> WrittenRecords:
    """Read rollouts.jsonl; raises UserError that names the line of what is wrong, or of a record that is there twice.

    Records of single sequences, times and divergences are passed over.
    """
    whole: dict[Pair, RolloutRecord] = {}
    answers: dict[str, Answers] = {}
    origin, changed, causes, rounding = None, [], [], None
    for i, line in enumerate(path.read_bytes().split(b"\n"), 1):
        where = f"{path}:{i}"
        it = _decode(line, where) if line.strip() else None
        if isinstance(it, RolloutRun) and i == 1:
            origin = it
        elif isinstance(it, RolloutRun):
            raise UserError(f"{where}: a second first line; the file was put together wrongly")
        elif isinstance(it, RolloutRecord) and it.id is None:
            _once(whole, (it.policy, it.rollout, it.trainer), it, where)
        elif isinstance(it, EngineRounding):
            if rounding is not None:
                raise UserError(f"{where}: a second record of kind rounding; the file was put together wrongly")
            rounding = it
        elif isinstance(it, Answers):
            _once(answers, it.policy, it, where)
        elif isinstance(it, Changed):
            changed.append(it)
        elif isinstance(it, Reason):
            causes.append(it)
    if origin is None:
        raise UserError(f"{path}: no first line of kind rollout; write it again with: precaudit rollout … -o {path}")
    return WrittenRecords(path, origin, whole, answers, tuple(changed), tuple(causes), rounding)


def _decode(line: bytes, where: str) -> Any:
    """Return a record that is judged; None for one that is not."""
    try:
        kind = msgspec.json.decode(line, type=Kind).kind
        if kind not in KINDS:
            raise UserError(f"{where}: kind {kind!r} is none of a rollout's: {', '.join(KINDS)}")
        if kind == "cause":
            return msgspec.json.decode(line, type=Reason)
        return msgspec.json.decode(line, type=DECODED[kind]) if kind in DECODED else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from None


def _once(found: dict[Any, Any], key: object, record: object, where: str) -> None:
    if key in found:
        raise UserError(f"{where}: a second record of {key}; the file was put together wrongly")
    found[key] = record

"""run.json of a model: what the run is of, read and held against what a run can be."""

from pathlib import Path

import msgspec

from precaudit.errors import UserError
from precaudit.recording.runs.kinds import check_schema
from precaudit.schema.coverage import config_of
from precaudit.schema.policies import KEYS, Policy, apply_settings, complete_policy
from precaudit.schema.records.runs import PointRecord, PromptRecord, RunRecord, StepRecord
from precaudit.schema.selection import parse_points

JSONL = {"prompts.jsonl": PromptRecord, "steps.jsonl": StepRecord, "points.jsonl": PointRecord}


def read_manifest(path: Path) -> RunRecord:
    """Read run.json of a model; raises UserError when it is none, is of a newer schema, or holds what no run holds."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
        schema = raw["schema"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not a run manifest") from None
    if type(schema) is not int or schema < 1:
        raise UserError(f"{path}: not a run manifest: schema is {schema!r}")
    check_schema(path)
    try:
        record = msgspec.convert(raw, RunRecord)
        config = config_of(record.model.config)
        apply_settings(Policy(), {k: v for k, v in record.policy.items() if k != "name"})
        parse_points(",".join((*record.requested.points, *record.requested.support)))
    except (msgspec.ValidationError, UserError) as error:
        raise UserError(f"{path}: {error}") from None
    record = msgspec.structs.replace(record, policy=complete_policy(record.policy))
    if missing := {"name", *KEYS} - record.policy.keys():
        raise UserError(f"{path}: the policy lacks {', '.join(sorted(missing))}")
    if not 0 <= record.requested.decode_steps <= config.context:
        raise UserError(f"{path}: decode_steps = {record.requested.decode_steps} is outside the model's context")
    return record

"""Rows of logits as lines of steps.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.metrics.logits import top_ids
from precaudit.schema.records.base import json_number
from precaudit.schema.records.runs import StepRecord

TOP = 10


@dataclass(frozen=True)
class LogitsCall:
    """A call that makes logits of a prompt; ``first``: the position whose row is step 0."""

    prompt: str
    phase: str
    step: int
    first: int


def step_records(call: LogitsCall, rows: Sequence[int], tokens: Sequence[int], logits: Array) -> list[StepRecord]:
    """Return one StepRecord for each logits row [R, V]; in prefill and rescore the step is the position − first."""
    records = []
    for row, token, x in zip(rows, tokens, logits.astype(np.float64), strict=True):
        ids = top_ids(x, TOP)
        top = x[ids]
        peak = top[0]
        with np.errstate(all="ignore"):
            total = peak + np.log(np.sum(np.exp(x - peak)))
        gap = top[0] - top[1] if len(top) > 1 else np.inf
        records.append(
            StepRecord(
                prompt=call.prompt,
                phase=call.phase,
                step=call.step if call.phase == "decode" else row - call.first,
                position=row,
                token=int(token),
                top_ids=tuple(int(i) for i in ids),
                top_logits=tuple(json_number(v) for v in top),
                gap=json_number(gap),
                logsumexp=json_number(total),
            )
        )
    return records

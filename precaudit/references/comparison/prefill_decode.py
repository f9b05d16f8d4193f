"""Prefill against decode at the same position: top-1, gaps, KL, and what FP64 says (docs/design.md §4)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from math import isfinite, isnan
from typing import Any, Literal

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.positions import unpack_positions
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.whole import Whole
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.metrics.logits import kl
from precaudit.schema.places import Place
from precaudit.schema.records.base import number, value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.runs import StepRecord

NEAR = 4.0  # a tie is near when FP64's gap is at most this many σ (docs/design.md §1)
HELD = 1 << 26  # bytes of logits rows that are compared with each other


def prefill_decode(recorded: Recorded, prompts: tuple[str, ...], whole: Whole | None) -> Iterator[PrefillDecodeRecord]:
    """Yield prefill's last position against decode0, then rescore against decode at every position."""
    steps = {(s.prompt, s.phase, s.step): s for s in recorded.run.steps}
    for prompt in prompts:
        first, decode0 = steps.get((prompt, "prefill", 0)), steps.get((prompt, "decode", 0))
        if first is not None and decode0 is not None:
            yield _pair(recorded, "prefill", first, decode0, whole)
        for step in recorded.steps("decode"):
            again, decoded = steps.get((prompt, "rescore", step)), steps.get((prompt, "decode", step))
            if again is not None and decoded is not None:
                yield _pair(recorded, "rescore", again, decoded, whole)


def _pair(
    recorded: Recorded, against: Literal["prefill", "rescore"], a: StepRecord, b: StepRecord, whole: Whole | None
) -> PrefillDecodeRecord:
    x, y = logits_of(recorded, a), logits_of(recorded, b)
    exact = [whole.logits(s.prompt, s.phase, s.position) for s in (a, b)] if whole is not None else []
    f64 = [x for x in exact if x is not None]
    top_a, top_b = a.top_ids[0], b.top_ids[0]
    finite = _finite(a) and _finite(b) and all(bool(np.isfinite(x).all()) for x in f64)
    match = finite and top_a == top_b
    known: dict[str, Any] = {"f64_top1": None, "f64_gap": None, "f64_match": None, "near_tie": None}
    if len(f64) == 2 and whole is not None:
        best, second = np.argsort(-f64[1], kind="stable")[:2]
        one = np.array_equal(f64[0], f64[1])  # else RoPE turned the two views by other lengths
        other = int(np.argmax(f64[0]))
        views = (
            [({top_a, top_b, int(best)}, f64[1])] if one else [({top_a, other}, f64[0]), ({top_b, int(best)}, f64[1])]
        )
        apart = max(_apart(x, tokens) for tokens, x in views)
        agree = finite and all(len(tokens) == 1 for tokens, _ in views)
        known = {
            "f64_top1": int(best),
            "f64_gap": number(f64[1][best] - f64[1][second]),
            "f64_match": finite and top_b == int(best),
            "near_tie": None if agree else finite and apart <= NEAR * whole.sigma,
            "f64_against_top1": None if one else other,
        }
    names: dict[str, Any] = {"prefill_last_top1": top_a, "decode0_top1": top_b} if against == "prefill" else {}
    sizes = (number(kl(x, y)), number(_largest(x, y))) if x is not None and y is not None else (None, None)
    return PrefillDecodeRecord(
        prompt=a.prompt, against=against, step=b.step, position=a.position, prefill_top1=top_a, decode_top1=top_b,
        prefill_gap=a.gap, decode_gap=b.gap, match=match,
        kl=sizes[0], max_diff=sizes[1], **known, **names,
    )  # fmt: skip


def _finite(step: StepRecord) -> bool:
    """Whether a row of logits has a top-1: no NaN, no infinity on top."""
    return isfinite(value(step.top_logits[0])) and not isnan(value(step.gap))


def _apart(f64: Array, tokens: set[int]) -> float:
    """Return how far apart tokens' logits are in FP64."""
    with np.errstate(invalid="ignore"):
        return max(abs(float(f64[i] - f64[j])) for i in tokens for j in tokens)


def _largest(x: Any, y: Any) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(x - y)))


def logits_of(recorded: Recorded, step: StepRecord) -> Array | None:
    """Return the recorded logits row [V] behind a step, in FP64; None where logits were not recorded."""
    call = step.step if step.phase == "decode" else 0
    key = Place(step.prompt, step.phase, call, None, LOGITS)
    if key not in recorded.index:
        return None
    rows = unpack_positions(recorded.index[key])
    at = np.flatnonzero(rows == step.position)
    return widen(recorded.run.tensor(recorded.index[key])[int(at[0])]) if len(at) else None


def independent_prompts(recorded: Recorded, prompts: tuple[str, ...], whole: Whole | None) -> list[tuple[str, str]]:
    """Return pairs of prompts with different tokens whose decode0 logits agree although they should not.

    They agree when their rms difference is at most 4 σ; they should not when FP64's (without it: prefill's) differ by
    more than twice that. Without σ, when they agree to 1e-5 of their own rms.
    """
    steps = {(s.prompt, s.phase): s for s in recorded.run.steps if s.step == 0}

    def recorded_row(phase: str, prompt: str) -> Array | None:
        return logits_of(recorded, steps[prompt, phase]) if (prompt, phase) in steps else None

    def expected_row(prompt: str) -> Array | None:
        if whole is None:
            return recorded_row("prefill", prompt)
        return whole.logits(prompt, "decode", len(recorded.run.prompts[prompt].tokens) - 1)

    found = []
    for a, b, decoded in _distances(partial(recorded_row, "decode"), prompts, recorded.config.vocab):
        if recorded.run.prompts[a].tokens == recorded.run.prompts[b].tokens:
            continue
        if whole is not None and decoded > NEAR * whole.sigma:
            continue
        x, y = expected_row(a), expected_row(b)
        expected = None if x is None or y is None else _rms(x - y)
        limit = NEAR * whole.sigma if whole is not None else 1e-5 * (expected or 0.0)
        if expected is not None and decoded <= limit and expected > 2 * limit:
            found.append((a, b))
    return found


def _distances(
    row: Callable[[str], Array | None], prompts: Sequence[str], size: int
) -> Iterator[tuple[str, str, float]]:
    """Yield the rms difference of every two prompts' rows [size], some of them held at a time."""
    n = max(1, HELD // (8 * size))
    blocks = [prompts[i : i + n] for i in range(0, len(prompts), n)]
    for i, block in enumerate(blocks):
        held = [(p, x) for p in block if (x := row(p)) is not None]
        yield from ((a, b, _rms(x - y)) for (a, x), (b, y) in combinations(held, 2))
        for other in (p for later in blocks[i + 1 :] for p in later):
            if (y := row(other)) is not None:
                yield from ((a, other, _rms(x - y)) for a, x in held)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))

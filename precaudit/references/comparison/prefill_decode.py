"""Prefill against decode at the same position: top-1, gaps, KL, and what FP64 says (docs/files.md)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from math import isfinite, isnan
from typing import Any, NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.positions import unpack_positions
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.whole import Whole
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.metrics.logits import is_distribution, kl, top_ids
from precaudit.schema.places import Place
from precaudit.schema.records.base import Number, json_number, value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.runs import StepRecord

NEAR = 4.0  # a tie is near when FP64's gap is at most this many σ (docs/numerics.md)
ONE = 1e-9  # of the largest logit, that FP64 rounds two ways to one function apart by (seen: 1e-13)
HELD = 1 << 26  # bytes of logits rows that are compared with each other


def prefill_decode_records(
    recorded: Recorded, prompts: tuple[str, ...], whole: Whole | None
) -> Iterator[PrefillDecodeRecord]:
    """Yield prefill's last position against decode0, then rescore against decode at every position."""
    steps = {(s.prompt, s.phase, s.step): s for s in recorded.run.steps if s.top_ids}  # a dump may lack logits
    for prompt in prompts:
        first, decode0 = steps.get((prompt, "prefill", 0)), steps.get((prompt, "decode", 0))
        if first is not None and decode0 is not None:
            yield _pair(recorded, "prefill", first, decode0, whole)
        for step in recorded.steps("decode"):
            again, decoded = steps.get((prompt, "rescore", step)), steps.get((prompt, "decode", step))
            if again is not None and decoded is not None:
                yield _pair(recorded, "rescore", again, decoded, whole)


class View(NamedTuple):
    """A row of logits as one of two ways to come there gives it: [V] in FP64 (None: not recorded), its top-1 and gap.

    ``finite``: whether there is a top-1.
    """

    step: int
    position: int
    logits: Array | None
    top1: int
    gap: Number
    finite: bool

    @classmethod
    def of_step(cls, recorded: Recorded, s: StepRecord) -> "View":
        """Return the row of a step of a model's run."""
        finite = isfinite(value(s.top_logits[0])) and not isnan(value(s.gap))
        return cls(s.step, s.position, logits_of(recorded, s), s.top_ids[0], s.gap, finite)

    @classmethod
    def of_row(cls, step: int, position: int, logits: Array) -> "View":
        """Return a row of logits [V] of a call."""
        first, *rest = top_ids(logits, 2)
        gap = float(logits[first] - logits[rest[0]]) if rest else float("inf")
        return cls(step, position, logits, int(first), json_number(gap), bool(np.isfinite(logits[first])))


def _pair(recorded: Recorded, against: str, a: StepRecord, b: StepRecord, whole: Whole | None) -> PrefillDecodeRecord:
    exact = [whole.logits(s.prompt, s.phase, s.position) for s in (a, b)] if whole is not None else []
    f64 = [x for x in exact if x is not None]
    sigma = whole.sigma if whole is not None else float("nan")
    return compare_views(a.prompt, against, (View.of_step(recorded, a), View.of_step(recorded, b)), f64, sigma)


def compare_views(
    prompt: str, against: str, views: tuple[View, View], f64: Sequence[Array], sigma: float
) -> PrefillDecodeRecord:
    """Return the record of a position that ``against`` and decode see.

    ``f64``: FP64 logits [V] of both views, which are of one function unless they differ by more than FP64 rounds;
    ``sigma``: rms of the emulated error of logits, by which ties are near. Errors of σ in either view's logits make a
    KL of Var(δ)/2 = σ² to second order, whatever the distribution (Kullback 1959, §2.6).
    """
    a, b = views
    finite = a.finite and b.finite and all(map(is_distribution, f64))
    match = finite and a.top1 == b.top1
    known: dict[str, Any] = {"f64_top1": None, "f64_gap": None, "f64_match": None, "near_tie": None}
    if len(f64) == 2:
        best, second = np.argsort(-f64[1], kind="stable")[:2]
        same = finite and np.allclose(
            f64[0], f64[1], rtol=0, atol=ONE * float(np.abs(f64[1][~np.isneginf(f64[1])]).max(initial=0))
        )
        one = bool(same) or not finite
        other = int(np.argmax(f64[0]))
        each = [({a.top1, other}, f64[0]), ({b.top1, int(best)}, f64[1])]
        each = [({a.top1, b.top1, int(best)}, f64[1])] if one else each
        apart = max(_apart(x, tokens) for tokens, x in each)
        agree = finite and all(len(tokens) == 1 for tokens, _ in each)
        known = {
            "f64_top1": int(best),
            "f64_gap": json_number(f64[1][best] - f64[1][second]),
            "f64_match": finite and b.top1 == int(best),
            "near_tie": None if agree else finite and apart <= NEAR * sigma,
            "f64_against_top1": None if one else other,
        }
    names: dict[str, Any] = {"prefill_last_top1": a.top1, "decode0_top1": b.top1} if against == "prefill" else {}
    x, y = a.logits, b.logits
    sizes = (json_number(kl(x, y)), json_number(_largest(x, y))) if x is not None and y is not None else (None, None)
    noise = json_number(sigma**2) if sizes[0] is not None and isfinite(sigma) and len(f64) == 2 else None
    return PrefillDecodeRecord(
        prompt=prompt,
        against=against,
        step=b.step,
        position=a.position,
        prefill_top1=a.top1,
        decode_top1=b.top1,
        prefill_gap=a.gap,
        decode_gap=b.gap,
        match=match,
        kl=sizes[0],
        kl_noise=noise,
        max_diff=sizes[1],
        **known,
        **names,
    )


def _apart(f64: Array, tokens: set[int]) -> float:
    """Return how far apart tokens' logits are in FP64."""
    with np.errstate(invalid="ignore"):
        return max(abs(float(f64[i] - f64[j])) for i in tokens for j in tokens)


def _largest(x: Any, y: Any) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(x == y, 0.0, np.abs(x - y))))


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

"""Whether an engine's log-probabilities differ from FP64's by rounding, and which mistake explains them where not.

Of a correct engine δ = log p − log p in FP64 has the size that rounding in its formats gives: that of its policy's own
prefill, together with what rounding the logits to 16 bits adds, as engines do. A mistake is named only where the values
that it makes of FP64's logits leave of δ no more than rounding.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from precaudit.checks.rollouts.hypotheses import Hypothesis, Sample, hypotheses, residual
from precaudit.checks.rollouts.reading import Rollout
from precaudit.numbers.arrays import Array
from precaudit.schema.digits import digits
from precaudit.schema.records.base import Count, Index, Number, Record, json_number, value

# Of n tokens rounding is a root mean square of at most RMS + FEW / √n times noise, and a largest value of LARGEST[0] +
# LARGEST[1] · log₁₀ n. Correct engines of tiny (float16, other attention, no excess precision) gave, of 8, 120 and
# 8,000 tokens, at most 1.47, 1.10 and 1.00, and 2.8, 4.1 and 10.0: `python -m tests.helpers.engine_noise`.
RMS, FEW, LARGEST = 2.5, 3.0, (6.0, 3.0)
NAMED, SHARE = 1.5, 0.4  # of what a cause may leave: of noise, as RMS, and of what it explains
TOLD = 3.0  # log-likelihood ratio below which neither of two causes is told from the other, of Gaussian noise
FLOOR = 2.0**-20  # of a log-probability that is written in float32 or with six digits


class EngineRounding(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="rounding"):
    """Whether rounding explains an engine's log-probabilities, over all judged tokens.

    ``policy``: the formats that the engine is taken to compute in. ``noise``: root mean square of what these make of a
    log-probability, nats. ``rms``, ``largest``: of δ against FP64, in units of it; ``id``, ``index``: the token with
    the largest. ``status``: unknown where no token could be judged. ``cause``: the mistake that leaves ``left`` of
    ``rms``; ``change``: what to do about it. ``tried``: what each mistake leaves, by its name.
    """

    policy: str
    status: Literal["pass", "fail", "unknown"]
    tokens: Count
    noise: Number = "nan"
    rms: Number = "nan"
    largest: Number = "nan"
    id: str | None = None
    index: Index | None = None
    cause: str | None = None
    change: str | None = None
    left: Number | None = None
    tried: dict[str, Number] = msgspec.field(default_factory=dict)


def engine_noise(exact: Array, rounded: Sequence[Array], where: Array) -> float:
    """Return the root mean square of what rounding makes of a log-probability, nats.

    ``exact``: log-probabilities [sequences, tokens] in FP64; ``rounded``: the same as roundings make them that add up.
    """
    return float(np.sqrt(sum(np.square((x - exact)[where]).mean() for x in rounded)))


def judge_engine(
    policy: str, rollouts: Sequence[Rollout], engine: Array, exact: Array, noise: float, where: Array
) -> EngineRounding:
    """Judge log-probabilities [sequences, tokens] against FP64's, where there is a token that can be judged."""
    if not where.any():
        return EngineRounding(policy=policy, status="unknown", tokens=0)
    apart = np.where(where, engine - exact, 0.0)
    units = np.abs(apart) / np.maximum(noise, FLOOR * np.maximum(np.abs(exact), 1))
    rms = float(np.sqrt(np.square(units[where]).mean()))
    row, column = np.unravel_index(int(units.argmax()), units.shape)
    largest = float(units[row, column])
    n = int(where.sum())
    return EngineRounding(
        policy=policy,
        status="pass" if _is_rounding(rms, largest, n) else "fail",
        tokens=n,
        noise=json_number(noise),
        rms=json_number(rms),
        largest=json_number(largest),
        id=rollouts[int(row)].id,
        index=int(column),
    )


def explain_engine(found: EngineRounding, samples: Sequence[Sample]) -> EngineRounding:
    """Return the verdict with the mistake that explains it, where one leaves no more than rounding.

    Of several that do, that with the fewest numbers that were chosen to fit.
    """
    noise, n = max(value(found.noise), FLOOR), sum(len(s.tokens) for s in samples)
    tried: dict[str, float] = {}
    fitting: list[tuple[float, Hypothesis]] = []
    before = residual(Hypothesis("", "", "", lambda s: s.exact), samples, noise).rms
    for h in hypotheses(samples):
        rms, largest = residual(h, samples, noise)
        tried[h.kind] = min(rms, tried.get(h.kind, math.inf))
        if rms <= min(NAMED + FEW / math.sqrt(n), SHARE * before) and largest <= _most(n):
            fitting.append((rms, h))
    told = {name: json_number(x) for name, x in tried.items()}
    if not fitting:
        return msgspec.structs.replace(found, tried=told)
    fewest = min(len(h.numbers) for _, h in fitting)
    simple = sorted((x for x in fitting if len(x[1].numbers) == fewest), key=lambda x: x[0])
    left, best = simple[0]
    alike = [h for rms, h in simple if n * (rms * rms - left * left) / 2 < TOLD]
    kinds = dict.fromkeys(h.kind for h in alike)
    cause = ", or ".join(_cause_text([h for h in alike if h.kind == kind]) for kind in kinds)
    return msgspec.structs.replace(found, tried=told, cause=cause, change=best.change, left=json_number(left))


def _cause_text(alike: Sequence[Hypothesis]) -> str:
    """Return mistakes of one kind as one cause: with ranges of their numbers, or each where words differ."""
    first = alike[0]
    if len({h.cause for h in alike}) > 1:
        return ", or ".join(h.text for h in alike)
    return first.cause.format(*(_range_text(each) for each in zip(*(h.numbers for h in alike), strict=True)))


def _range_text(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return digits(low, 6) if low == high else f"{digits(low, 6)} to {digits(high, 6)}"


def _most(n: int) -> float:
    """Return the largest of n tokens that is rounding, in units of noise."""
    return LARGEST[0] + LARGEST[1] * math.log10(n)


def engine_sentence(r: EngineRounding) -> str:
    """Return whether rounding explains an engine's log-probabilities, and what does where it does not, in words."""
    if r.status == "unknown":
        return "no token of the engine's can be judged"
    size = f"{digits(r.rms)} × what rounding in {r.policy} makes"
    if r.status == "pass":
        return f"the engine differs from FP64 by {size}"
    where = f"the engine differs from FP64 by {size} (largest {digits(r.largest)} ×, {r.id} token {r.index})"
    if r.cause is None:
        return f"{where}; none of {len(r.tried)} kinds of mistakes explains it"
    left = value(r.left) if r.left is not None else 0.0
    return f"{where}: {r.cause}; corrected, the difference is {digits(left, 2)} ×"


def _is_rounding(rms: float, largest: float, n: int) -> bool:
    return rms <= RMS + FEW / math.sqrt(n) and largest <= _most(n)

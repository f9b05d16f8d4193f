"""What an engine may have done instead: the log-probabilities that a mistake makes of FP64's logits of the same tokens.

Each of the mistakes is a value of every token, made without the engine's. Numbers that a mistake has (a temperature, k,
p) are found by least squares, or among those that users set.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.digits import digits
from precaudit.schema.metrics.logits import log_softmax

FEWEST = 8  # tokens that a number is found from
TOP_K = (1, 2, 3, 4, 5, 8, 10, 15, 16, 20, 25, 30, 32, 40, 50, 64, 80, 100, 128, 200, 250, 256, 500, 512, 1000, 1024)
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
UNDECIDED = 0.02  # distance from what decides which tokens are kept, relative, within which rounding decides


@dataclass(frozen=True)
class Sample:
    """Tokens of a sequence: what the engine wrote of them [T], their ids [T] and FP64's logits.

    ``logits``: [T, V] of the rows that predict them, ``before`` and ``after`` [T, V] of those beside, NaN where there
    is none; not divided by ``temperature``, which the engine is said to divide by. ``prompts``: by what was done
    to the prompt, log-probabilities [T] after it; ``others``: of other weights, by their name.
    """

    engine: Array
    tokens: Array
    logits: Array
    before: Array
    after: Array
    temperature: float
    prompts: dict[str, Array] = field(default_factory=dict)
    others: dict[str, Array] = field(default_factory=dict)

    @property
    def exact(self) -> Array:
        """Log-probabilities in FP64, [T]."""
        return self.of(self.logits / self.temperature)

    def of(self, logits: Array) -> Array:
        """Return log-probabilities [T] of the tokens under logits [T, V]."""
        return log_softmax(logits)[np.arange(len(self.tokens)), self.tokens]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake: its kind, it and what to change in words, and what it makes of a sample's tokens.

    ``make`` returns [T], NaN where it makes nothing of a token, or the least and the largest that it may make, [2, T].
    ``numbers``: those that were chosen to fit, which stand in ``cause`` as ``{}``. ``summed``: each value adds up those
    before it, and their noise.
    """

    kind: str
    cause: str
    change: str
    make: Callable[[Sample], Array]
    numbers: tuple[float, ...] = ()
    summed: bool = False

    @property
    def text(self) -> str:
        """The cause with its numbers."""
        return self.cause.format(*(digits(x, 6) for x in self.numbers))


class Residual(NamedTuple):
    """Root mean square and largest of what a mistake leaves, in units of noise; infinite where it makes nothing."""

    rms: float
    largest: float


def residual(h: Hypothesis, samples: Sequence[Sample], noise: float) -> Residual:
    """Return what a mistake leaves of the engine's values; of fewer than half of the tokens, nothing is known.

    Noise grows with the improbability 1 − p of a token: the derivative of log p by the logits is 1 − p at the token's
    own and −p at the others.
    """
    each = [(s.engine, s.exact, *np.broadcast_to(h.make(s), (2, len(s.tokens)))) for s in samples]
    engine, exact, least, most = (np.concatenate(x) for x in zip(*each, strict=True))
    made = np.clip(engine, least, most)
    there = np.isfinite(made)
    if there.sum() < max(len(made) / 2, 1):
        return Residual(math.inf, math.inf)
    here, before = (np.sqrt(np.square(-np.expm1(x[there])).mean()) for x in (np.minimum(made, 0), exact))
    terms = np.concatenate([np.arange(1.0, len(s.tokens) + 1) if h.summed else np.ones(len(s.tokens)) for s in samples])
    made = (np.abs(engine - made) / np.sqrt(terms))[there] / (noise * max(1.0, here / max(before, noise)))
    return Residual(float(np.sqrt(np.square(made).mean())), float(made.max()))


def hypotheses(samples: Sequence[Sample]) -> Iterator[Hypothesis]:
    """Yield the mistakes, those with numbers of their own at the numbers that fit best."""
    yield from ALIGNMENTS
    for what in dict.fromkeys(name for s in samples for name in s.prompts):
        cause, change = f"the engine's prompt is another: {what}", "give engine and trainer the same token ids"
        yield Hypothesis("prompt", cause, change, partial(_after_prompt, what))
    yield from SCALES
    yield from _temperatures(samples)
    if sum(len(s.tokens) for s in samples) >= FEWEST:
        yield from _kept(samples)
    for name in sorted({name for s in samples for name in s.others}):
        cause, change = f"the weights are those of {name}", "let engine and trainer load one checkpoint"
        yield Hypothesis("weights", cause, change, partial(_of_weights, name))


def _after_prompt(what: str, s: Sample) -> Array:
    return s.prompts.get(what, s.exact)


def _of_weights(name: str, s: Sample) -> Array:
    return s.others.get(name, np.full(len(s.tokens), np.nan))


def _moved(by: int, s: Sample) -> Array:
    """Return log-probabilities of the tokens ``by`` places on."""
    found, exact = np.full(len(s.tokens), np.nan), s.exact
    if by > 0:
        found[:-by] = exact[by:]
    else:
        found[-by:] = exact[:by]
    return found


ALIGNMENTS = (
    Hypothesis(
        "shift",
        "log-probabilities are shifted by one: each is that of the token after it",
        "write with each token the log-probability of that token",
        partial(_moved, 1),
    ),
    Hypothesis(
        "shift",
        "log-probabilities are shifted by one: each is that of the token before it",
        "write with each token the log-probability of that token",
        partial(_moved, -1),
    ),
    Hypothesis(
        "row",
        "each token is scored by the logits after it, which have read it",
        "score a token by the logits of the position before it",
        lambda s: s.of(s.after / s.temperature),
    ),
    Hypothesis(
        "row",
        "each token is scored by the logits of one position too early",
        "score a token by the logits of the position before it",
        lambda s: s.of(s.before / s.temperature),
    ),
)
SCALES = (
    Hypothesis("base", "logarithms have base 2", "write natural ones", lambda s: s.exact / math.log(2)),
    Hypothesis("base", "logarithms have base 10", "write natural ones", lambda s: s.exact / math.log(10)),
    Hypothesis(
        "sum",
        "each number is the sum of all log-probabilities so far",
        "write each token's own",
        lambda s: np.cumsum(s.exact),
        summed=True,
    ),
)


def _temperatures(samples: Sequence[Sample]) -> Iterator[Hypothesis]:
    """Yield temperatures with a meaning beside the one that was said, and the one that fits best."""
    told = samples[0].temperature
    for t, cause in (
        (
            (told * told, f"temperature {digits(told, 6)} is applied twice"),
            (1.0, f"temperature {digits(told, 6)} is not applied"),
            (1 / told, f"logits are multiplied by temperature {digits(told, 6)}, not divided"),
        )
        if told != 1
        else ()
    ):
        yield Hypothesis("temperature", cause, f"divide logits once by {digits(told, 6)}", partial(_divided, t))
    if sum(len(s.tokens) for s in samples) >= FEWEST:
        t = float(f"{_fitted(samples):.3g}")
        change = f"say --temperature {digits(t, 6)}, if that is meant"
        yield Hypothesis(
            "temperature", f"logits are divided by {{}}, not by {digits(told, 6)}", change, partial(_divided, t), (t,)
        )


def _divided(t: float, s: Sample) -> Array:
    return s.of(s.logits / t)


def _fitted(samples: Sequence[Sample]) -> float:
    """Return the temperature of least squares, by golden-section search around the best of a grid."""

    def cost(x: float) -> float:
        return sum(float(np.square(s.engine - s.of(s.logits / math.exp(x))).sum()) for s in samples)

    grid = np.linspace(math.log(0.1), math.log(10), 24)
    best = int(np.argmin([cost(x) for x in grid]))
    a, b = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    costs = cost(c), cost(d)
    for _ in range(24):
        if costs[0] < costs[1]:
            b, d, c = d, c, d - ratio * (d - a)
            costs = cost(c), costs[0]
        else:
            a, c, d = c, d, c + ratio * (b - c)
            costs = costs[1], cost(d)
    return math.exp((a + b) / 2)


def _kept(samples: Sequence[Sample]) -> Iterator[Hypothesis]:
    """Yield probabilities that are those of the tokens kept by top-k, top-p, both, or min-p, divided by their sum."""
    ranked = {id(s): np.exp(np.sort(log_softmax(s.logits / s.temperature), axis=-1)[:, ::-1]) for s in samples}
    sums = {key: np.cumsum(p, axis=-1) for key, p in ranked.items()}
    begin, says = "log-probabilities", "write them before tokens are dropped, or score the trainer's so, too"
    for k in TOP_K:
        yield Hypothesis("top-k", f"{begin} are those among the top {{}}", says, partial(_of_kept, sums, None, k), (k,))
    for p in TOP_P:
        yield Hypothesis("top-p", f"{begin} are those within top-p {{}}", says, partial(_of_kept, sums, p, None), (p,))
        for k in TOP_K:
            cause = f"{begin} are those among the top {{}} within top-p {{}}"
            yield Hypothesis("top-k and top-p", cause, says, partial(_of_kept, sums, p, k), (k, p))
    for x in MIN_P:
        yield Hypothesis("min-p", f"{begin} are those above min-p {{}}", says, partial(_of_least, ranked, x), (x,))


def _of_kept(sums: Mapping[int, Array], p: float | None, k: int | None, s: Sample) -> Array:
    """Return log-probabilities among the k most likely, of these the fewest that reach p.

    [2, T], least and largest: where a sum is as near to p as rounding may move it, one token more or less is kept.
    """
    total = sums[id(s)]
    rows, ends = np.arange(len(total)), np.full(len(total), min(k or total.shape[1], total.shape[1]) - 1)
    reach = np.stack([ends, ends])
    if p is not None:
        margin = UNDECIDED * (1 - p)
        found = np.stack([(total < x).sum(axis=1) for x in (p - margin, p + margin)])
        reach = np.minimum(found, ends)
    return np.stack([s.exact - np.log(total[rows, last]) for last in reach[::-1]])


def _of_least(ranked: Mapping[int, Array], least: float, s: Sample) -> Array:
    """Return log-probabilities among tokens of at least a share of the most likely one's, [2, T] as ``_of_kept``."""
    p = ranked[id(s)]
    share = p / p[:, :1]
    ends = (np.log(np.where(share >= x * least, p, 0).sum(axis=1)) for x in (1 - UNDECIDED, 1 + UNDECIDED))
    return np.stack([s.exact - x for x in ends])

"""Which top tokens rounding exchanged, and whether FP64 held them for nearly equal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.prefill_decode import NEAR, logits_of
from precaudit.references.textbook.whole import sequence_of
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.metrics.logits import is_distribution, top_ids
from precaudit.schema.selection import PHASES

TOP = (1, 5)


class Flip(NamedTuple):
    """One logits row whose ``k`` most likely tokens are not FP64's.

    ``apart``: the largest FP64 logit difference between a token that came in and one that fell out; ``near``: at most
    4 σ (docs/numerics.md: near tie), None without σ.
    """

    prompt: str
    phase: str
    step: int
    position: int
    k: int
    came: tuple[int, ...]
    fell: tuple[int, ...]
    apart: float
    near: bool | None


class LogitsRows(NamedTuple):
    """All logits rows that FP64 is known of: how many, the flips among them, and how many are not finite.

    ``decoded``: the decode rows among them of the prompt that has fewest.
    """

    rows: int
    flips: tuple[Flip, ...]
    nonfinite: int = 0
    decoded: int = 0


def flips(recorded: Recorded, config: DecoderConfig, weights: str, cache: Path, sigma: float) -> LogitsRows:
    """Compare the top tokens of every recorded logits row with FP64's, which ``compare`` left in ``cache``."""
    found: list[Flip] = []
    count = nonfinite = 0
    decoded = dict.fromkeys(recorded.run.prompts, 0)
    for prompt in recorded.run.prompts:
        rows = recorded.logit_rows(prompt)
        places = {p: sequence_of(recorded, prompt, p).place(cache, weights, config) for p in PHASES}
        references = {phase: place.load(None, LOGITS, rows) for phase, place in places.items()}
        for s in recorded.run.steps:
            reference = references[s.phase]
            candidate = logits_of(recorded, s) if s.prompt == prompt else None
            if candidate is not None and reference is not None:
                count += 1
                decoded[prompt] += s.phase == "decode"
                exact = np.asarray(reference[int(np.searchsorted(rows, s.position))], np.float64)
                if not (is_distribution(candidate) and is_distribution(exact)):
                    nonfinite += 1
                    continue
                for k, came, fell, apart in exchanged_tokens(candidate, exact):
                    near = apart <= NEAR * sigma if sigma == sigma else None
                    found.append(Flip(prompt, s.phase, s.step, s.position, k, came, fell, apart, near))
    return LogitsRows(count, tuple(found), nonfinite, min(decoded.values(), default=0))


def exchanged_tokens(candidate: Array, exact: Array) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], float]]:
    """Yield (k, tokens that came in, tokens that fell out, how far apart in FP64) where the top k of [V] differ."""
    for k in TOP:
        a, b = top_ids(candidate, k), top_ids(exact, k)
        came, fell = np.setdiff1d(a, b), np.setdiff1d(b, a)
        if len(came):
            apart = float(np.abs(exact[came][:, None] - exact[fell][None, :]).max())
            yield k, tuple(int(x) for x in came), tuple(int(x) for x in fell), apart


def flips_sentence(rows: LogitsRows, steps: int) -> str | None:
    """Return what flipped, in one sentence; None where no row is known. ``steps``: decode steps after the prompt."""
    if not rows.rows:
        return None
    words = [f"{rows.nonfinite} of {rows.rows} rows are not finite"] if rows.nonfinite else []
    known = rows.rows - rows.nonfinite
    if not known:
        return words[0]
    for k in TOP:
        some = [f for f in rows.flips if f.k == k]
        ties = sum(bool(f.near) for f in some)
        near = f", {ties} of them near ties" if some else ""
        words.append(f"top-{k} {'is' if k == 1 else 'are'} not FP64's in {len(some)} of {known} rows{near}")
    parted = [f for f in rows.flips if f.k == 1 and f.phase == "decode"]
    if not rows.nonfinite and (parted or rows.decoded >= steps):
        words.append(_continuations(parted, steps))
    return "; ".join(w for w in words if w)


def _continuations(parted: Sequence[Flip], steps: int) -> str:
    """Return where greedy continuations differ from FP64's: at the first decode row whose top-1 is another."""
    if not steps:
        return ""
    first: dict[str, Flip] = {}
    for f in sorted(parted, key=lambda f: f.step):
        first.setdefault(f.prompt, f)
    if not first:
        return f"greedy continuations stay FP64's for {steps} steps"
    told = [
        f"{p} at step {f.step} ({'near tie' if f.near else 'no near tie'}, {digits(f.apart, 2)} apart)"
        for p, f in first.items()
    ]
    return f"greedy continuations differ from FP64's: {', '.join(told)}"

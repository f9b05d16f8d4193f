"""Errors pooled over prompts, phases and calls: a fault that is the same everywhere shows in no single record.

Of one record the limit leaves room for what eight draws do not show; the median of many needs none. Forward errors of a
run, and what two runs differ by.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import NamedTuple

from precaudit.judging.verdicts import Verdict
from precaudit.schema.digits import digits
from precaudit.schema.limits import Limits
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ForwardError

FEWEST = 8  # records that are pooled; fewer have the limit of one
ELEMENTS = 64  # of a record that is pooled: of fewer, eight draws do not say what noise is
RATIO, GAIN = "pooled ratio", "pooled gain"
METRICS = (RATIO, GAIN)


@dataclass
class Samples:
    """Forward records of a layer and point: of each its prompt by number, ratio, signed gain, and that over the noise.

    Four numbers in arrays: a million records of as many prompts are 32 MB.
    """

    prompts: "array[int]" = field(default_factory=lambda: array("l"))
    ratios: "array[float]" = field(default_factory=lambda: array("d"))
    gains: "array[float]" = field(default_factory=lambda: array("d"))
    over: "array[float]" = field(default_factory=lambda: array("d"))

    def typical(self, numbers: "array[float]") -> float:
        """Return the median over prompts of each one's median."""
        return _median_of_prompts(self.prompts, numbers)


@dataclass
class ForwardPool:
    """Forward records as they stream by: of each layer and point its first phase, whether it is float32, and samples.

    A sample is a prompt's: its calls share what they read, so that prompts are what counts.
    """

    _points: dict[tuple[int | None, str], tuple[str, bool, Samples]] = field(default_factory=dict)
    _prompts: dict[str, int] = field(default_factory=dict)

    def add(self, e: ErrorRecord) -> None:
        """Look at a record; what is not finite is judged elsewhere."""
        if not isinstance(e, ForwardError) or e.ratio is None or e.noise is None or e.gain is None or e.n < ELEMENTS:
            return
        ratio, noise, gain = value(e.ratio), value(e.noise), value(e.gain)
        if not (isfinite(ratio) and isfinite(gain) and noise > 0):
            return
        wide = e.dtype in ("float32", "float64")
        _, _, samples = self._points.setdefault((e.layer, e.point), (e.phase, wide, Samples()))
        samples.prompts.append(self._prompts.setdefault(e.prompt, len(self._prompts)))
        for kept, x in ((samples.ratios, ratio), (samples.gains, gain), (samples.over, gain / noise)):
            kept.append(x)

    def medians(self, limits: Limits) -> Iterator[Verdict]:
        """Yield both medians of every layer and point beside their limits for so many prompts.

        Of the ratios, and of the signed gain over the noise, where rounding errs both ways.
        """
        for (layer, point), (phase, wide, samples) in self._points.items():
            records, n = len(samples.ratios), len(set(samples.prompts))
            if records < FEWEST:
                continue
            told = f"in the median of {records} records of {n} prompt{'s' if n > 1 else ''}"
            gain = samples.typical(samples.gains)
            signed = f"{told}: values are {digits(100 * abs(gain), 2)} % too {'large' if gain > 0 else 'small'}"
            ratio, over = samples.typical(samples.ratios), samples.typical(samples.over)
            allowed = (limits.pooled, limits.pooled_gain)
            if wide:
                allowed = (limits.float32_ratio, limits.float32_gain)
            for metric, found, limit, text in zip(METRICS, (ratio, abs(over)), allowed, (told, signed), strict=True):
                yield Verdict(
                    status="pass" if found <= limit.at(n) else "fail",
                    kind="forward",
                    phase=phase,
                    layer=layer,
                    point=point,
                    metric=metric,
                    scope="run",
                    value=found,
                    limit=limit.at(n),
                    text=text,
                )

    def verdicts(self, limits: Limits) -> Iterator[Verdict]:
        """Yield a failing verdict for every layer and point with a median over its limit."""
        failed: set[tuple[int | None, str]] = set()
        for v in self.medians(limits):
            if v.status == "fail" and (v.layer, v.point) not in failed:
                failed.add((v.layer, v.point))
                yield v


class PairMedian(NamedTuple):
    """What two runs differ by at a layer and point over what rounding makes: the median, its limit, of how many."""

    layer: int | None
    point: str
    ratio: float
    limit: float
    records: int
    prompts: int


@dataclass
class PairPool:
    """Differences of two runs as they stream by, over what both runs' rounding makes of them."""

    _points: dict[tuple[int | None, str], tuple[bool, "array[int]", "array[float]"]] = field(default_factory=dict)
    _prompts: dict[str, int] = field(default_factory=dict)

    def add(self, e: ErrorRecord, ratio: float, wide: bool) -> None:
        """Take a difference; ``wide``: both runs hold float32 there. What is not finite is judged elsewhere."""
        if not isfinite(ratio) or e.n < ELEMENTS:
            return
        _, prompts, ratios = self._points.setdefault((e.layer, e.point), (wide, array("l"), array("d")))
        prompts.append(self._prompts.setdefault(e.prompt, len(self._prompts)))
        ratios.append(ratio)

    def medians(self, limits: Limits) -> list[PairMedian]:
        """Return the median of every layer and point that has records enough, in the order in which they came."""
        found = []
        for (layer, point), (wide, prompts, ratios) in self._points.items():
            if len(ratios) >= FEWEST:
                n = len(set(prompts))
                limit = (limits.float32_ratio if wide else limits.pair_ratio).at(n)
                ratio = _median_of_prompts(prompts, ratios)
                found.append(PairMedian(layer, point, ratio, limit, len(ratios), n))
        return found


def _median_of_prompts(prompts: "array[int]", numbers: "array[float]") -> float:
    each: dict[int, list[float]] = {}
    for prompt, x in zip(prompts, numbers, strict=True):
        each.setdefault(prompt, []).append(x)
    return median(median(its) for its in each.values())


def pooled_verdicts(errors: Iterable[ErrorRecord], limits: Limits) -> list[Verdict]:
    """Return the verdicts on records that are pooled."""
    pool = ForwardPool()
    for e in errors:
        pool.add(e)
    return list(pool.verdicts(limits))

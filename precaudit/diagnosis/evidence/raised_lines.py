"""What a program's output gains where lines of it round to float32 alone, over realisations of the rounding (JAX)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from precaudit.diagnosis.evidence.last_call import NOT_FINITE, Given, Last
from precaudit.diagnosis.evidence.records import LineRemedy
from precaudit.interpreters.jaxpr.emulate import emulate_program
from precaudit.interpreters.jaxpr.excess import Unrounded
from precaudit.interpreters.jaxpr.raised import Line, product_lines, raising, rounding_lines
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.references.traced.forward import NotChained, effort, small
from precaudit.schema.metrics.logits import is_distribution, kl, top_ids
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records.base import json_number, value

TRIED = 2  # cases that lines are raised on
FEWEST, MOST_DRAWS, ENOUGH = 2, 64, 128  # realisations of the rounding; rows of the output over all of them
BASE = 4  # times as many of what every gain is measured from
WORTH = 0.1  # of the size that a line takes away for it to be worth a word
MOST = 4  # lines that are tried together
WAYS: tuple[Unrounded | None, ...] = (None, "computed", "none")  # to leave out roundings, in the order they are tried
LEAST = 0.25  # of the output's distance as it ran, that its emulation leaves where it is made so
CALLS, FEW_CALLS = 64, 4  # the last ones that are run in a chain: of a small program, of a large one


class OutputDistance(NamedTuple):
    """An output against FP64, [realisations]: mean KL over rows in nats, or relative distance; top-1 flips of all."""

    sizes: Array
    flips: int

    @property
    def size(self) -> float:
        """The mean over realisations."""
        return float(self.sizes.mean())

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(self.sizes.std(ddof=1) / len(self.sizes) ** 0.5)


@dataclass(frozen=True)
class Trial:
    """A program's lines that round to less than float32, and what its output is with some of them raised to it.

    ``sizes``: bytes that each line's results take more then; ``products``: lines whose products a device makes of
    narrower parts; ``calls``: what each case's calls were given that are run, one after another; ``exact``: rows [R, N]
    of each case in FP64; ``real``: how far the output was as it ran.
    """

    last: Last
    sizes: dict[Line, int]
    products: set[Line]
    calls: dict[str, list[Given]]
    exact: dict[str, Array]
    raised: Callable[..., Any]
    real: float

    @classmethod
    def of(cls, last: Last, cases: Sequence[str], options: dict[str, Any] | None) -> "Trial":
        """Compile a program for its lines to be tried on cases; raises as the FP64 shadow does.

        ``options``: the compiler's.
        """
        sizes = rounding_lines(last.made.jaxpr.jaxpr, last.how)
        products = product_lines(last.made.jaxpr.jaxpr, last.how)
        exactly = partial(jax.jit(emulate_program(last.jaxpr, None), compiler_options=options), 0)
        raised = jax.jit(raising(last.jaxpr, last.how, tuple(sizes)), compiler_options=options)
        first = max(last.call + 1 - (CALLS if small(last.made) else FEW_CALLS), 0)
        calls = {c: last.calls(c, first) for c in cases if sizes}

        def ends() -> dict[str, Array]:
            return {c: np.asarray(last.of(last.run_chain(given, exactly))) for c, given in calls.items()}

        try:
            exact = ends()
        except NotChained:
            calls = {c: given[-1:] for c, given in calls.items()}
            exact = ends()
        each = [_distance(x, last.recorded_output(c), last.distributions)[0] for c, x in exact.items()]
        return cls(last, sizes, products, calls, exact, raised, float(np.mean(each)) if each else 0.0)

    @property
    def rows(self) -> int:
        """Rows of the output, of all cases."""
        return sum(map(len, self.exact.values()))

    @property
    def draws(self) -> int:
        """How many realisations of the rounding give each line enough rows."""
        return min(max(-(-ENOUGH // max(self.rows, 1)), FEWEST), MOST_DRAWS)

    def measure(self, which: Sequence[int], times: int = 1) -> OutputDistance:
        """Return how far the output is from FP64 with some lines raised; ``times`` as many realisations."""
        mask = np.zeros(len(self.sizes), bool)
        mask[list(which)] = True
        each = []
        for case, exact in self.exact.items():
            for seed in range(1, times * self.draws + 1):
                run = partial(self.raised, np.uint64(seed), mask)
                out = self.last.of(self.last.run_chain(self.calls[case], run))
                each.append(_distance(exact, np.asarray(out), self.last.distributions))
        return OutputDistance(np.asarray([size for size, _ in each]), sum(flips for _, flips in each))

    def remedy(self, which: Sequence[int], before: OutputDistance, best: OutputDistance) -> LineRemedy:
        """Return what raising some lines changes; ``before``: with none, ``best``: with all of them raised."""
        lines, after, size = list(self.sizes), self.measure(which), before.size or 1.0
        return LineRemedy(
            run=file_hash(manifest_of(self.last.opened.folder)),
            output=self.last.output,
            measure="kl" if self.last.distributions else "distance",
            sources=tuple(lines[i].source for i in which),
            text=tuple(lines[i].text for i in which),
            size=(json_number(before.size), json_number(after.size)),
            all=json_number(best.size),
            flips=(round(before.flips / BASE), after.flips),
            rows=self.rows * self.draws,
            gain=json_number((before.size - after.size) / size),
            error=json_number(float(np.hypot(before.error, after.error)) / size),
            bytes=sum(self.sizes[lines[i]] for i in which),
            real=json_number(self.real),
            calls=max(map(len, self.calls.values())),
            products=tuple(lines[i].source for i in which if lines[i] in self.products),
        )


def line_remedies(last: Last, tell: Advance) -> Iterator[LineRemedy]:
    """Yield what each line that rounds gains in float32 alone, largest gain first; then those that help, together."""
    with jax.enable_x64(True):
        for options in (effort(last.made), None):
            trial, before = _trial_as_it_ran(last, options)
            n = len(trial.sizes)
            if not n:
                return
            tell(0, n + 2, "lines in float32")
            best = trial.measure(range(n))
            if np.isfinite([before.size, best.size]).all():
                break
        else:
            raise ValueError(_finite_with(trial, best))
        found = []
        for i in range(n):
            tell(i + 1, n + 2, "lines in float32")
            found.append((i, trial.remedy((i,), before, best)))
        found = sorted((f for f in found if np.isfinite(value(f[1].gain))), key=lambda f: -float(f[1].gain))
        yield from (r for _, r in found)
        helps = [i for i, r in found if is_worth_a_word(r)][:MOST]
        if len(helps) > 1:
            yield trial.remedy(helps, before, best)
        tell(n + 2, n + 2, "lines in float32")


def _finite_with(trial: Trial, best: OutputDistance) -> str:
    """Return which lines in float32 make an output finite, in words: each by itself, or all; or that none do.

    ``best``: the output with all of them raised.
    """
    if not np.isfinite(best.size):
        return NOT_FINITE
    alone = [line.source for i, line in enumerate(trial.sizes) if np.isfinite(trial.measure((i,)).size)]
    lines = f"{' or '.join(alone)} alone" if alone else f"all {len(trial.sizes)} lines that round to less"
    return f"as its equations round it is not finite; it is with {lines} in float32"


def _trial_as_it_ran(last: Last, options: dict[str, Any] | None) -> tuple[Trial, OutputDistance]:
    """Return a program's lines to be tried, and how far it is from FP64 as emulated with none of them raised.

    A compiler removes some pairs of conversions and keeps others: of the ways in which it may, the first that leaves
    about as much as the program did when it ran, or the one that leaves most.
    """
    found = []
    for unrounded in WAYS:
        trial = Trial.of(replace(last, unrounded=unrounded), last.opened.record.cases[:TRIED], options)
        if not trial.sizes:
            return trial, OutputDistance(np.zeros(2), 0)
        before = trial.measure((), BASE)
        if not before.size < LEAST * trial.real:
            return trial, before
        found.append((trial, before))
    return max(found, key=lambda f: f[1].size)


def is_worth_a_word(r: LineRemedy) -> bool:
    """Whether a line's gain is worth a word, and told from what other realisations of the rounding would give."""
    return float(r.gain) >= max(WORTH, 2 * float(r.error))


def _distance(exact: Array, made: Array, distributions: bool) -> tuple[float, int]:
    """Return how far rows [R, N] are from FP64's, and top-1 flips: of rows that have a softmax there.

    Infinite where one of these has none as it is made.
    """
    if not distributions:
        return ratio(norm(made - exact), norm(exact)), 0
    known = [(e, m) for e, m in zip(exact, made, strict=True) if is_distribution(e)]
    if not all(is_distribution(m) for _, m in known):
        return float("inf"), 0
    flips = sum(int(top_ids(e, 1)[0] != top_ids(m, 1)[0]) for e, m in known)
    return float(np.mean([kl(e, m) for e, m in known])) if known else 0.0, flips

"""Which known mistake explains an array: another constant, a factor, or one term, row or step of its formula."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from precaudit.checks.gradients.case import GradientCase, about
from precaudit.checks.gradients.changes import FACTOR, Change, Changes
from precaudit.checks.gradients.constants import Constant, constant_pairs, with_constant
from precaudit.checks.gradients.formula import Formula, as_float32
from precaudit.checks.gradients.lines import short_line
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.numbers.arrays import Array, widen
from precaudit.schema.digits import digits
from precaudit.schema.metrics.sizes import norm, ratio

LEFT = 0.1  # of the error: what may be left with the mistake where rounding does not explain the rest
LESS = 0.9  # of the error: what is left of it at most with a mistake that is tried by rounding
JUDGED = 6  # changes with the smallest rest, which are judged
SEARCHES = 4  # of every change, for one array of a side; later inputs are tried with what was found
KNOWN = "a constant, a factor, a term or rows that are omitted, a scan that reads one row beside"
Remade = Callable[[GradientCase], list[Array]]


@dataclass(frozen=True)
class Mistake:
    """What the reference's formula has in place of something (``words``), and its FP64 values with that."""

    key: tuple[Any, ...]
    words: str
    remade: Remade


@dataclass(frozen=True)
class Explained:
    """A mistake that explains an array: what it leaves of its norm, and whether rounding explains that (``whole``)."""

    mistake: Mistake
    left: float
    whole: bool

    @property
    def words(self) -> str:
        """The mistake, and what is left with it."""
        if not self.left:
            return f"{self.mistake.words} (with that, nothing is unexplained)"
        if self.whole:
            return f"{self.mistake.words} (rounding explains the rest, {digits(self.left, 2)} of its norm)"
        return f"{self.mistake.words} (with that, {digits(self.left, 2)} of its norm is unexplained)"


class Mistakes:
    """What was found for the arrays of a gradcheck: tried first on each other one."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Mistake] = {}
        self._searches: dict[tuple[str, str], int] = {}

    def find(self, c: GradientCase, side: str, i: int, run: Array) -> Explained | None:
        """Return the mistake that explains best what a side gave (``run``); None where none does."""
        known = _best(_explained(c, side, i, run, m) for m in self._known.values())
        if known is not None and known.whole:
            return known
        asked = side, c.names[i]
        self._searches[asked] = self._searches.get(asked, 0) + 1
        if self._searches[asked] > SEARCHES:
            return known
        for some in (_constants(c, side), _factors(c, i, run), _changed(c, i, run)):
            found = _best([known, *(_explained(c, side, i, run, m) for m in some)])
            if found is not None:
                self._known.setdefault(found.mistake.key, found.mistake)
                return found
        return None


def _best(found: Any) -> Explained | None:
    """Return the first that leaves rounding alone, or else what leaves least."""
    every = [x for x in found if x is not None]
    return next((x for x in every if x.whole), min(every, key=lambda x: x.left, default=None))


def _explained(c: GradientCase, side: str, i: int, run: Array, mistake: Mistake) -> Explained | None:
    try:
        made = mistake.remade(c)[i]
    except CannotLift:
        return None
    before, left = residual(run, c.exact[i]), residual(run, made)
    if not np.isfinite(left) or left > LESS * before:
        return None
    again = replace(c, exact=[*c.exact[:i], made, *c.exact[i + 1 :]], runs={**c.runs, side: _put(c, side, i, run)})
    whole = any(_passes(again, side, i, some, c.exact[i]) for some in _draws(c, side))
    enough = LEFT * (before if np.isfinite(before) else 1.0)
    return Explained(mistake, left, whole) if whole or left <= enough else None


def _draws(c: GradientCase, side: str) -> Iterator[list[list[Array]]]:
    """Yield what roundings of a side make of the exact arrays: float32's, or those that it declares."""
    if not c.own[side].narrow():
        yield c.draws
        return
    try:
        yield c.declared_draws(side)
        yield c.declared_draws(side, every=True)
    except CannotLift:
        yield c.draws


def _passes(again: GradientCase, side: str, i: int, draws: list[list[Array]], exact: Array) -> bool:
    """Whether one array of a case with other exact values passes, by what roundings make about its own (``exact``)."""
    shifted = [[*d[:i], *about([again.exact[i]], [d[i]], [exact]), *d[i + 1 :]] for d in draws]
    if draws is again.draws:  # as wide as float32: near a tie nothing is said
        again = replace(again, draws=shifted)
    return again.judge(side, i, shifted).verdict.status == "pass"


def _put(c: GradientCase, side: str, i: int, run: Array) -> list[Array]:
    its = c.runs[side]
    return [*its[:i], run, *its[i + 1 :]]


def residual(run: Array, exact: Array) -> float:
    """Return the relative distance of two arrays; infinite where one is not finite and the other is."""
    wide = widen(run)
    finite = np.isfinite(wide)
    if not np.array_equal(finite, np.isfinite(exact)):
        return np.inf
    return ratio(norm(wide[finite] - exact[finite]), norm(exact[finite]))


def _held(c: GradientCase) -> tuple[Any, Any]:
    held: tuple[Any, Any] = jax.tree.map(as_float32, (c.cotangents, c.inputs))
    return held


def _constants(c: GradientCase, side: str) -> Iterator[Mistake]:
    for mine, its in constant_pairs(c.own[side], c.formula):
        what = f"{_at(mine)} stands for {_at(its)}" if mine.value else f"{_at(its)} is omitted"
        yield Mistake(("constant", mine.value, its.value), what, _exchange(its.value, mine.value))


def _exchange(old: float, new: float) -> Remade:
    def remade(c: GradientCase) -> list[Array]:
        key = "constant", old, new
        if key not in c.formula.remade:
            jaxpr = jex.ClosedJaxpr(with_constant(c.formula.jaxpr.jaxpr, old, new), c.formula.jaxpr.consts)
            c.formula.remade[key] = Formula(jaxpr)
        found: list[Array] = c.formula.remade[key].exact(*_held(c))
        return found

    return remade


def _at(constant: Constant) -> str:
    return digits(constant.value, 6) + (f" at {short_line(constant.line)}" if constant.line else "")


def _factors(c: GradientCase, i: int, run: Array) -> Iterator[Mistake]:
    """Yield the factor that is nearest, under its name if it has one."""
    exact, wide = c.exact[i], widen(run)
    both = np.isfinite(wide) & np.isfinite(exact)
    size = float(np.sum(exact[both] ** 2))
    if not size:
        return
    factor = float(np.sum(wide[both] * exact[both])) / size
    near = 4 * residual(run, factor * exact) + 1e-6
    sizes = sorted({n for x in jax.tree.leaves((c.inputs, c.exact)) for n in np.shape(x) if n > 1})
    name, best = next(((n, x) for n, x in named_factors(sizes) if abs(factor - x) <= near * abs(x)), ("", factor))
    words = f"a factor of {digits(best, 6)}" + (f" ({name})" if name else "")
    words = {0.0: "it is 0 everywhere", -1.0: "its sign is wrong"}.get(best, words)
    yield Mistake(("factor", c.names[i], round(best, 3)), words, lambda c: [_times(best, e) for e in c.exact])


def _times(factor: float, x: Array) -> Array:
    return factor * x if factor else np.zeros_like(x)


def named_factors(sizes: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Yield factors that mistakes of a gradient make, and what they come from: sums for means, a wrong count."""
    for x in (0.0, -1.0, 2.0, 0.5, -2.0, -0.5):
        yield "", x
    for n in sizes:
        yield f"{n} / {n - 1}, with {n} the size of an axis", n / (n - 1)
        yield f"{n - 1} / {n}, with {n} the size of an axis", (n - 1) / n
        yield f"{n} / {n + 1}, with {n} the size of an axis", n / (n + 1)
        yield f"the size of an axis, {n}: a sum in place of a mean", float(n)
        yield f"1 / {n}, with {n} the size of an axis: a mean in place of a sum", 1 / n
        yield f"the root of {n}, the size of an axis", n**0.5
        yield f"1 / the root of {n}, the size of an axis", n**-0.5


def _changed(c: GradientCase, i: int, run: Array) -> list[Mistake]:
    """Return the changes of one value in the formula that leave least, those of one value in the order it has."""
    leaves = c.formula.leaves(*_held(c))
    changes = _changes(c)
    before = residual(run, c.exact[i])
    found = []
    try:
        for change in changes.every(leaves):
            made = changes.run(change, leaves)[i]
            if change.kind == FACTOR and (solved := _solved(run, made, c.exact[i])) is not None:
                change = replace(change, factor=solved)
                made = changes.run(change, leaves)[i]
            left = residual(run, made)
            if left <= LESS * before:
                found.append((left, change))
    except CannotLift:
        return []
    least = min((left for left, _ in found), default=0.0)
    near = [x for x in found if x[0] <= 1.01 * least + 1e-12]
    rest = sorted((x for x in found if x not in near), key=lambda x: x[0])
    return [_mistake(change, backward=i >= c.outputs) for _, change in [*near, *rest][:JUDGED]]


def _changes(c: GradientCase) -> Changes:
    found: Changes = c.formula.remade.setdefault(("changes",), Changes(c.formula.jaxpr))
    return found


def _mistake(change: Change, backward: bool) -> Mistake:
    words = replace(change, site=replace(change.site, line=short_line(change.site.line))).words
    if backward and change.kind == FACTOR and not change.factor:
        words += ", as by a stop_gradient"

    def remade(c: GradientCase) -> list[Array]:
        return _changes(c).run(change, c.formula.leaves(*_held(c)))

    return Mistake(("change", change.index, change.kind, round(change.factor, 3)), words, remade)


def _solved(run: Array, without: Array, exact: Array) -> float | None:
    """Return the factor of a term that fits best, of 0 (``without``) and 1 (``exact``); None where it has no effect."""
    finite = np.isfinite(widen(run)) & np.isfinite(without) & np.isfinite(exact)
    effect = exact[finite] - without[finite]
    size = float(np.sum(effect**2))
    if not size:
        return None
    factor = float(np.sum((widen(run)[finite] - without[finite]) * effect)) / size
    return next((x for x in (0.0, -1.0, 2.0, 0.5) if abs(factor - x) <= 0.02), factor)

"""The operation that first makes what is not finite in a segment: overflow, invalid, division by zero (JAX)."""

from functools import cached_property
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from precaudit.interpreters.jaxpr.exceptions import ProgramOperation, Watched, Watching
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.references.traced.remade import Tapped, Values
from precaudit.schema.digits import digits

INVALID = dict.fromkeys(("add", "cumsum", "reduce_sum", "sub"), "inf − inf")
INVALID |= dict.fromkeys(("conv_general_dilated", "dot_general", "ragged_dot_general"), "inf − inf or 0 · inf in a sum")
INVALID |= {"div": "0/0 or inf/inf", "mul": "0 · inf", "sqrt": "√ of less than 0", "rsqrt": "1/√ of less than 0"}
INVALID |= {"log": "log of less than 0", "log1p": "log of less than 0"}
POLES = {"div": "x/0", "log": "log 0", "log1p": "log 0", "rsqrt": "1/√0", "pow": "0 to a negative power"}
POLES |= {"integer_pow": POLES["pow"], "atanh": "atanh 1", "logistic": "log 0"}

QUOTIENTS = ("div", "rsqrt", "pow", "integer_pow")  # of what is infinite: 0
WIDTHS = (8, 16, 32, 64)  # bits of floats
At = tuple[tuple[int, int], ...]  # the step of each scan, and how many it has


class Counted(NamedTuple):
    """The ``Counts`` of an operation in the steps that are looked at, summed; ``largest``: the largest there."""

    nonfinite: float
    over: float
    largest: float
    invalid: float
    infinite: float

    @property
    def arises(self) -> bool:
        """Whether it makes what is not finite of what is."""
        return bool(self.over or self.invalid or self.infinite)


class Origin(NamedTuple):
    """What makes values not finite, in words; ``fp64_too``: FP64 makes as many of them, so that no rounding does."""

    text: str
    fp64_too: bool = False


class Origins:
    """What is not finite in a program's segments: operations that make it, as they round and in FP64."""

    def __init__(self, tapped: Tapped) -> None:
        self.tapped = tapped
        self.rounded, self.exact = (
            Watching(tapped.call, exact, tapped.steps, tapped.options) for exact in (False, True)
        )

    def on(self, taps: Values, args: tuple[object, ...]) -> "OfCall":
        """Return those of a call, on its recorded values."""
        return OfCall(self, taps, args)


class OfCall:
    """Origins of what is not finite in the segments of one call; made when first asked for."""

    def __init__(self, origins: Origins, taps: Values, args: tuple[object, ...]) -> None:
        self.origins, self.taps, self.args = origins, taps, args

    def of(self, p: ProgramPoint, step: int) -> Origin | None:
        """Return what makes a point's values not finite in a step of its scans; None where nothing is known.

        Followed back are operands that are not finite: what a selection, or a quotient by infinity, takes away makes
        nothing. Of what arises the first in the program is told; what FP64 makes alike, such as the logarithm of a
        mask, only where there is nothing else, and not of what was recorded as no number before. What a step makes of
        infinities that it is handed is told as what made these, in a step before.
        """
        if (handed := self._handed(p, step)) is not None:
            return handed
        for at in (_at(p, step), ()):
            found = [(self._alike(n, at), n) for n in self._sources(p, at) if self._count_of(n, at).arises]
            if found and not (min(found)[0] and self._reads_nonfinite(p)):
                alike, n = min(found)
                return Origin(overflow_text(self.rounded.operations[n], self._count_of(n, at)), alike)
        return None

    def _handed(self, p: ProgramPoint, step: int) -> Origin | None:
        """Return what first made the infinities that a step is handed; None where it makes its own, or FP64 does.

        Operations are numbered as the program has them: those after a point's own are of the step before. Not where
        some steps alone were recorded.
        """
        if self.origins.tapped.steps is not None:
            return None
        last, at, origin = max(self.rounded.taps.get(p.name, ()), default=-1), _at(p, step), None
        found = {n for n in self._sources(p, at) if n <= last}
        if not all(self._consumes(n, at) for n in found):
            return None
        for before in range(step - 1, -1, -1):
            at = _at(p, before)
            found = self._bad_sources({m for n in found for m in self.rounded.read.get(n, ())}, at)
            made = [n for n in found if not self._consumes(n, at) and not self._alike(n, at)]
            if made:
                text = overflow_text(self.rounded.operations[min(made)], self._count_of(min(made), at))
                origin = Origin(f"{text}, in layer {before}")
        return origin

    def _consumes(self, n: int, at: At) -> bool:
        """Whether all that an operation makes there that is not finite may be of operands that are not."""
        counted = self._count_of(n, at)
        return not (counted.over or counted.infinite)

    def hidden_overflow(self, p: ProgramPoint, step: int) -> Origin | None:
        """Return an overflow that a point's finite values are made of: a quotient by it is 0, as by infinity.

        Followed back are operands up to such a quotient, and not through a selection, whose other branch is no matter.
        The first in the program is told.
        """
        at, found = _at(p, step), set[int]()
        seen, new = set[int](), set(self.rounded.taps.get(p.name, ()))
        while new:
            seen |= new
            finite = {n for n in new if n in self.rounded.counts and not self._count_of(n, at).nonfinite}
            through = {n for n in finite if self.rounded.operations[n].primitive != "select_n"}
            for n in (n for n in through if self.rounded.operations[n].primitive in QUOTIENTS):
                found |= self._bad_sources(set(self.rounded.read.get(n, ())), at)
            new = {m for n in through for m in self.rounded.read.get(n, ())} - seen
        over = [n for n in sorted(found) if self._count_of(n, at).over]
        return Origin(overflow_text(self.rounded.operations[over[0]], self._count_of(over[0], at))) if over else None

    @cached_property
    def rounded(self) -> Watched:
        """What operations count as the equations round."""
        return self.origins.rounded(self.taps, self.args)

    @cached_property
    def exact(self) -> Watched:
        """What they count in FP64."""
        return self.origins.exact(self.taps, self.args)

    def _sources(self, p: ProgramPoint, at: At) -> set[int]:
        """Return the operations whose results that are not finite a point's may be made of."""
        return self._bad_sources(set(self.rounded.taps.get(p.name, ())), at)

    def _bad_sources(self, new: set[int], at: At) -> set[int]:
        """Return the operations whose results that are not finite those of some may be made of, these among them."""
        found: set[int] = set()
        while new:
            bad = {n for n in new if n in self.rounded.counts and self._count_of(n, at).nonfinite}
            found |= bad
            new = {m for n in bad for m in self.rounded.read.get(n, ())} - found
        return found

    def _reads_nonfinite(self, p: ProgramPoint) -> bool:
        """Whether anything that a point's segment may read, of its call's inputs too, is not finite."""
        read = (
            self.taps[name]
            for bits in WIDTHS
            for name in self.origins.tapped.narrow_reads(p.name, self.taps, self.args, bits)
        )
        return not all(np.isfinite(widen(np.asarray(x))).all() for x in (*read, *_floats(self.args[1:])))

    def _count_of(self, n: int, at: At) -> Counted:
        return _of_step(self.rounded, n, at)

    def _alike(self, n: int, at: At) -> bool:
        """Whether an operation has as many results in FP64 that are not finite."""
        return _of_step(self.exact, n, at).nonfinite >= self._count_of(n, at).nonfinite


def _floats(args: tuple[object, ...]) -> list[Array]:
    leaves = [np.asarray(x) for x in jax.tree.leaves(args) if hasattr(x, "dtype")]
    return [x for x in leaves if x.dtype.name in FORMATS]


def _at(p: ProgramPoint, step: int) -> At:
    index = np.unravel_index(step, p.stacked) if p.stacked else ()
    return tuple((int(i), n) for i, n in zip(index, p.stacked, strict=True))


def _of_step(found: Watched, n: int, at: At) -> Counted:
    """Return an operation's counts at a step of the scans that it shares; over all steps of others."""
    counts = found.counts[n]
    steps = [i for (i, length), other in zip(at, np.shape(counts.largest), strict=False) if length == other]
    one = {name: np.asarray(x)[tuple(steps)] for name, x in counts._asdict().items()}
    sums = {name: float(np.sum(x)) for name, x in one.items()}
    return Counted(**sums | {"largest": float(np.max(one["largest"], initial=0.0))})


def overflow_text(o: ProgramOperation, counted: Counted) -> str:
    """Return what an operation makes, and where: its value and its format's largest, or which rule has no result."""
    where = f" at {o.source}" if o.source else f" in {o.primitive}"
    if counted.over:
        return f"overflow: {_short(counted.largest)} exceeds {o.dtype}'s {_largest(o.dtype)}{where}"
    if counted.invalid:
        return f"invalid: {INVALID.get(o.primitive, o.primitive)}{where}"
    if o.primitive in POLES:
        return f"division by zero: {POLES[o.primitive]}{where}"
    return f"overflow: {o.primitive} exceeds float64's {_largest('float64')}{where}"


def _largest(dtype: str) -> str:
    """Return the largest finite number of a format, in words."""
    x = float(ml_dtypes.finfo(FORMATS[dtype].dtype).max)
    return f"{x:.0f}" if x < 1e6 else _short(x)


def _short(x: float) -> str:
    return digits(x, 2).replace("e+0", "e").replace("e+", "e")

"""Which variant made a recorded tensor: each is run on the recorded inputs, and named only if it closes."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precaudit.arrays import Array
from precaudit.formats import FORMATS
from precaudit.metrics.residue import Noise
from precaudit.metrics.sizes import canonical, half_ulp, norm, ratio
from precaudit.mutations.candidates import variants
from precaudit.mutations.fitting import AHEAD, Fit, fits, minimise, shortest
from precaudit.mutations.forms import Form, Inputs, made, plain
from precaudit.mutations.heads import head_variants
from precaudit.mutations.keys import missing_keys
from precaudit.mutations.parts import scaled_parts
from precaudit.mutations.stochastic import stochastic_variants
from precaudit.mutations.variants import Class, Variant
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import FP64, Rounding, elisions, formula, of_policy, sharing_products
from precaudit.policies import Policy
from precaudit.references.closing import Yardstick
from precaudit.references.textbook.closing import honest, yardstick
from precaudit.references.textbook.operations import Operation

Unrounded = Sequence[Sequence[Array]]
ROWS = 64  # query rows variants are tried on; the one that is named is made on all
ENOUGH = 0.9  # share of the error from which single roundings that fell otherwise are allowed for
DRAWS = 8  # of inputs moved by MOVED, relative: as far as float32 arithmetic moves what is rounded next
MOVED = 2.0**-21
POOR = 0.2  # badness from which a number is fitted although a formula closes
MUCH = 4.0  # times what a fitted number leaves, squared, from which it is named in place of a formula that closes
NEARLY = 2.0  # badness up to which a number is rounded further
CLOSE = 0.03  # badness more that it may have instead
ALIKE = 0.25  # share more that a number of fewer digits may leave, squared


@dataclass(frozen=True)
class Tried:
    """A variant's answer: the share of the error it reproduces, of the elements it gives bit for bit, and badness.

    ``badness``: the largest of the gate's numbers for what it leaves, over their limits; at most 1: it closes.
    """

    variant: Variant
    explained: float
    equal: float
    badness: float = float("inf")

    @property
    def closes(self) -> bool:
        """Whether the gate would pass what it leaves."""
        return self.badness <= 1.0

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Exact formulas before fitted ones, then bits, then badness."""
        return (self.variant.fitted, -round(self.equal, 3), round(self.badness, 2))


@dataclass(frozen=True)
class Replay:
    """All answers for one operation, best first; ``named``: the one that closes, None where none does.

    ``left`` [T, H, K]: what the announced policy leaves; ``made``: what it makes; ``candidate``,
    ``reference``: what was recorded, and what FP64 makes.
    """

    tried: tuple[Tried, ...]
    announced: Tried
    named: Tried | None
    left: Array
    made: Array
    candidate: Array
    reference: Array

    @property
    def best(self) -> Tried:
        """The variant that is named, or else the one that reproduces most."""
        return self.named or self.tried[0]

    @property
    def second(self) -> Tried | None:
        """The next best."""
        return next((t for t in self.tried if t.variant.name != self.best.variant.name), None)


@dataclass(frozen=True)
class Bench:
    """Rows of an operation to try variants on: what it read, how the policy may round, and what it has to reach.

    ``members``: the ensemble of honest roundings that noise is taken from; ``others``: inputs as they were before they
    were rounded to be stored, which a compiler may have kept; ``formula``: FP64, with what a policy means by integers.
    """

    inputs: Inputs
    axes: str
    roundings: tuple[Rounding, ...]
    yardstick: Yardstick
    members: tuple[Rounding, ...]
    others: tuple[Inputs, ...] = ()
    formula: Rounding = FP64

    def rows(self, some: slice) -> "Bench":
        """Return some of the rows."""
        return replace(
            self, inputs=self.inputs.rows(some), yardstick=self.yardstick.rows(some),
            others=tuple(i.rows(some) for i in self.others),
        )  # fmt: skip

    def make(self, form: Form, r: Rounding, ahead: int = 0) -> Array:
        """Return what a form makes, canonical; what was recorded where it is masked or reads what was not recorded."""
        out = canonical(made(form, self.inputs, r), self.axes)
        blind = self.blind(ahead)
        if blind.any() and not blind.all():
            out = np.where(blind[:, None, None], self.yardstick.candidate, out)
        hidden = self.yardstick.hidden
        return out if hidden is None else np.where(hidden, self.yardstick.candidate, out)

    def blind(self, ahead: int) -> Array:
        """Return the rows [T] of which a key so far ahead was not recorded."""
        keys = self.inputs.values[0].shape[2] if self.inputs.row.kind == "softmax" else len(self.inputs.values[-1])
        return (
            np.asarray(self.inputs.positions + ahead >= keys)
            if ahead > 0
            else np.zeros(len(self.inputs.positions), bool)
        )

    def nearest(self, variant: Variant) -> Array:
        """Return what a variant makes under the elision that comes nearest."""
        outs = [self.make(variant.form, variant.change(r), variant.ahead) for r in self.roundings]
        return min(outs, key=lambda y: -self.answer(variant, y).explained)

    def answer(self, variant: Variant, y: Array) -> Tried:
        """Return the share of candidate − FP64 that y reproduces, over what is finite; NaN must fall together."""
        c, reference = self.yardstick.candidate, self.yardstick.reference
        same = np.isfinite(c) == np.isfinite(y)
        if not same.all():
            return Tried(variant, -float(np.mean(~same)), 0.0)
        fit = np.isfinite(c) & np.isfinite(reference)
        if self.yardstick.hidden is not None:
            fit &= ~self.yardstick.hidden
        error = float(np.sum((c - reference)[fit] ** 2))
        left = float(np.sum((c - y)[fit] ** 2))
        share = 1.0 - left / error if error else 1.0 if left == 0 else 0.0
        return Tried(variant, share, float(np.mean((c == y)[fit])) if fit.any() else 1.0)

    def tried(self, variant: Variant, floor: float = 0.0) -> Tried:
        """Return a variant's answer; its badness where it reproduces more than ``floor``."""
        y = self.nearest(variant)
        found = self.answer(variant, y)
        if found.explained <= floor and floor < 1.0:
            return found
        measure = self.measure(variant)
        badness = measure.badness(y)
        for other in self.others if badness > 1.0 and found.explained >= ENOUGH else ():
            wide = replace(self, inputs=other).nearest(variant)
            badness = min(badness, measure.reading_unrounded(wide, y).badness(wide))
        if badness > 1.0 and found.explained >= ENOUGH:
            badness = min(badness, measure.badness(self.flipped(variant, y)))
        return replace(found, badness=badness)

    def measure(self, variant: Variant) -> Yardstick:
        """Return what honest programs leave of a variant: of another formula, with the policy's rounding in it.

        A narrower format has no more noise for that.
        """
        if variant.kind != "semantics":
            return self.yardstick
        old, dtype = self.yardstick, self.yardstick.dtype
        reference = self.make(variant.form, self.formula, variant.ahead)
        clean = np.where(np.isfinite(reference), reference, 0.0)
        shown = clean if old.hidden is None else np.where(old.hidden, 0.0, clean)
        with np.errstate(invalid="ignore"):
            deviations = [self.make(variant.form, r, variant.ahead) - reference for r in self.members]
        noise = Noise.pooled(deviations, shown, FORMATS[dtype].unit_roundoff, old.noise.common)
        larger = max(ratio(norm(shown), norm(np.nan_to_num(old.reference))), 1.0)
        inner = old.allowed - half_ulp(old.reference, dtype)
        # what the announced formula makes exactly 0, as keys outside a window, has no bound of its own: its row's has
        nothing = old.reference == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(nothing, 0.0, inner / np.abs(old.reference)).max(axis=-1, keepdims=True)
        bound = np.where(nothing, np.maximum(inner, relative * np.abs(clean)), inner) * larger
        return replace(old, reference=reference, noise=noise, allowed=bound + half_ulp(clean, dtype))

    def flipped(self, variant: Variant, y: Array) -> Array:
        """Return ``y`` with elements as near to the candidate as roundings take them that fall otherwise.

        A sum in float32 may end on the other side of a number that a narrower format rounds to, here or inside.
        """
        rng = np.random.default_rng(0)
        lowest, highest = y.copy(), y.copy()
        for _ in range(DRAWS):
            values = tuple(x * (1 + MOVED * rng.uniform(-1, 1, x.shape)) for x in self.inputs.values)
            z = replace(self, inputs=replace(self.inputs, values=values)).nearest(variant)
            np.fmin(lowest, z, out=lowest)
            np.fmax(highest, z, out=highest)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(y), np.clip(self.yardstick.candidate, lowest, highest), y)


def replay(
    o: Operation,
    model: Model,
    policy: Policy,
    known: Sequence[Variant] = (),
    unrounded: Unrounded = (),
    probs: Array | None = None,
    settled: bool = False,
    never: Collection[Class] = (),
) -> Replay:
    """Try every variant of an operation on its recorded inputs, and those ``known`` from the same point elsewhere.

    ``unrounded``: its inputs as they were before they were rounded to be stored; ``probs``: what attn_out's second
    product read, tried where nothing made of q, k and v closes. ``settled``: ``policy`` makes its products as the
    compiled program says. ``never``: classes that no cause is of, since the formula is known to be the reference's.
    """
    point, layer = o.place.point, o.place.layer
    base = of_policy(policy, o.place.phase == "decode").starting(o.start)
    roundings = tuple(base.eliding(places) for places in elisions(point, model.config, policy))
    members = tuple(honest(o, model, policy, base))
    others = tuple(replace(read_by(o, model), values=tuple(values)) for values in unrounded)
    whole = Bench(
        read_by(o, model), o.axes, roundings, yardstick(o, model, policy, settled), members, others, formula(policy)
    )
    announced, *rest = variants(point, policy, model.config, layer)
    rest = [v for v in rest if v.kind not in never]
    known = [v for v in known if v.kind not in never]
    emulated = whole.nearest(announced)
    left = whole.yardstick.candidate - emulated
    if whole.yardstick.hidden is not None:
        left = np.where(whole.yardstick.hidden, 0.0, left)
    part = _part(whole, left, emulated, announced)
    first = part.tried(announced, 1.0)
    floor = max(first.explained, 0.0)
    tried = [first, *_exact(part, [*rest, *known], first)]
    named = _confirmed(whole, part, tried)
    if named is None:
        tried += [whole.tried(v, floor) for v in _keys(whole, emulated) if v.kind not in never]
        named = _confirmed(whole, part, tried)
    if "semantics" not in never and (named is None or named.badness > POOR):
        tried += _numbers(part, floor)
        named = _confirmed(whole, part, tried)
    if named is None and probs is not None:
        named = _after(whole, announced, [*rest, *known], probs)
        tried += [] if named is None else [named]
    if named is None:
        tried += [whole.tried(v, floor) for v in _others(whole) if v.kind not in never]
        named = _confirmed(whole, part, tried)
    if named is None:
        scaled = [whole.tried(v, floor) for v in _parts_of(whole)]
        tried += scaled
        causes = [t for t in tried if t.variant.kind not in never]
        named = _simplest([t for t in scaled if t in causes]) or _confirmed(whole, part, causes)
    ordered = sorted(tried, key=lambda t: (-t.explained, t is not first))
    return Replay(tuple(ordered), first, named, left, emulated, whole.yardstick.candidate, whole.yardstick.reference)


def read_by(o: Operation, model: Model) -> Inputs:
    """Return what an operation read."""
    at = np.asarray(o.positions)
    return Inputs(model, o.place.layer, o.place.point, at, o.inputs, o.last, start=o.start, lengths=o.lengths)


def _part(whole: Bench, left: Array, emulated: Array, announced: Variant) -> Bench:
    """Return the ROWS rows with the largest errors; all where the policy closes there and not in the whole."""
    n = len(left)
    if n <= ROWS:
        return whole
    power = np.nan_to_num(left**2, nan=1e300, posinf=1e300).sum(axis=(1, 2))
    sizes = power / np.maximum(np.nan_to_num(emulated**2).sum(axis=(1, 2)), 1e-300)
    sums = np.convolve(np.minimum(sizes, 1e300), np.ones(ROWS), "valid")
    end = n - int(np.argmax(sums[::-1]))  # of equals the last
    some = whole.rows(slice(end - ROWS, end))
    return whole if some.tried(announced, 1.0).closes else some


def _exact(part: Bench, others: Sequence[Variant], announced: Tried) -> Iterator[Tried]:
    """Yield the answers of variants without a free number; the last ones only where nothing closes so far."""
    closed = False
    for v in sorted(others, key=lambda v: v.last):
        if closed and v.last:
            continue
        found = part.tried(v, max(announced.explained, 0.0))
        closed = closed or found.closes
        yield found


def _confirmed(whole: Bench, part: Bench, tried: Sequence[Tried]) -> Tried | None:
    """Return the best answer that closes on all rows too: an exact formula unless a fitted one leaves far less.

    What has a number of its own for every slice is none.
    """
    causes = [t for t in tried if t.closes and not t.variant.describes]
    kinds = [[t for t in causes if t.variant.fitted is fitted] for fitted in (False, True)]
    exact, fitted = (_first(whole, part, sorted(kind, key=lambda t: t.rank)) for kind in kinds)
    if exact is None or fitted is None:
        return exact or fitted
    return fitted if MUCH * (1 - fitted.explained) < 1 - exact.explained else exact


def _first(whole: Bench, part: Bench, ranked: Sequence[Tried]) -> Tried | None:
    return next((t for t in ranked if part is whole or whole.tried(t.variant, 1.0).closes), None)


def _numbers(part: Bench, floor: float) -> Iterator[Tried]:
    """Yield formulas with the number that fits best; fitted without rounding, where what is left is smooth."""
    for fit in fits(part.inputs):
        x = _fitted(part, fit)
        if x is not None and x != fit.announced:
            yield _rounder(part, fit, x, floor)


def _rounder(part: Bench, fit: Fit, x: float, floor: float) -> Tried:
    """Return the answer of the number of fewest digits that leaves as little as x does, but for ALIKE or CLOSE.

    x comes nearest without rounding: with it a rounder number may close where x, within NEARLY, does not.
    """
    best = part.tried(fit.variant(x), floor)
    for digits in range(5) if best.badness <= NEARLY and not fit.whole else ():
        short = part.tried(fit.variant(float(f"{x:.{digits}e}")), floor)
        alike = 1 - short.explained <= (1 + ALIKE) * (1 - best.explained)
        if short.closes and (alike or short.badness <= best.badness + CLOSE):
            return short
    return best


def _fitted(part: Bench, fit: Fit) -> float | None:
    r = sharing_products([part.formula])[0]
    c = part.yardstick.candidate

    def loss(x: float) -> float:
        with np.errstate(all="ignore"):
            y = part.make(fit.form(x), r, int(x) if fit.what == AHEAD else 0)
        left = np.where(np.isfinite(c), c - y, 0.0)
        return float(np.sum(left**2)) if np.isfinite(left).all() else float("inf")

    x = minimise(loss, fit.grid, fit.whole)
    if not np.isfinite(loss(x)):
        return None
    return x if fit.whole else shortest(x, loss, c.size)


def _keys(whole: Bench, emulated: Array) -> Iterator[Variant]:
    """Yield attention without a key."""
    if whole.inputs.row.weighs:
        yield from missing_keys(whole.inputs, whole.yardstick.candidate, emulated)


def _others(whole: Bench) -> Iterator[Variant]:
    """Yield attention that reads other key heads, and results that are rounded at random."""
    c, row = whole.yardstick.candidate, whole.inputs.row
    yield from head_variants(whole.inputs, c)
    for r in whole.roundings:
        unrounded = canonical(made(plain, whole.inputs, r.eliding((row.place,))), whole.axes)
        yield from stochastic_variants(whole.axes, whole.yardstick.dtype, c, unrounded)


def _parts_of(whole: Bench) -> Iterator[Variant]:
    """Yield results of which a part is scaled, zero or clipped: of what comes nearest to the candidate's direction."""
    c, at = whole.yardstick.candidate, np.asarray(whole.inputs.positions)
    outs = [np.where(np.isfinite(c), np.nan_to_num(whole.make(plain, r)), 0.0) for r in whole.roundings]
    clean = np.where(np.isfinite(c), c, 0.0)
    emulated = max(outs, key=lambda y: ratio(float((clean * y).sum()) ** 2, float((y * y).sum())))
    roundoff = FORMATS[whole.yardstick.dtype].unit_roundoff
    yield from scaled_parts(at, whole.axes, clean, emulated, roundoff)


def _simplest(parts: Sequence[Tried]) -> Tried | None:
    """Return the first part that leaves next to nothing and is a cause: more factors always leave less."""
    return next((t for t in parts if t.badness <= POOR and not t.variant.describes), None)


def _after(whole: Bench, announced: Variant, others: Sequence[Variant], probs: Array) -> Tried | None:
    """Return what explains attention's second product, made from the recorded probabilities, on all rows."""
    bench = replace(whole, inputs=replace(whole.inputs, probs=probs), others=())
    bench = replace(bench, yardstick=bench.measure(replace(announced, kind="semantics")))
    first, emulated = bench.tried(announced, 1.0), bench.nearest(announced)
    if first.closes:
        return None
    floor = max(first.explained, 0.0)
    tried = [bench.tried(v, floor) for v in (*others, *_keys(bench, emulated))]
    if (named := _confirmed(bench, bench, tried)) is not None:
        return named
    scaled = [bench.tried(v, floor) for v in _parts_of(bench)]
    return _simplest(scaled) or _confirmed(bench, bench, scaled)

"""Which variant made a recorded tensor: each is run on the recorded inputs, and named only if it closes."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import elisions, formula_rounding, of_policy
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.references.mutations.bench import Bench, Tried
from precaudit.references.mutations.candidates import variants
from precaudit.references.mutations.epsilons import EPSILON, known_of_epsilon
from precaudit.references.mutations.forms import Inputs, evaluate_form, usual_form
from precaudit.references.mutations.heads import head_variants
from precaudit.references.mutations.keys import missing_keys
from precaudit.references.mutations.numbers import fitted_numbers
from precaudit.references.mutations.operands import single_weights
from precaudit.references.mutations.parts import added_number, scaled_parts
from precaudit.references.mutations.products import addend_left_out
from precaudit.references.mutations.stochastic import stochastic_variants
from precaudit.references.mutations.variants import Class, Variant
from precaudit.references.textbook.closing import honest, yardstick
from precaudit.references.textbook.operations import Operation
from precaudit.schema.metrics.sizes import canonical, ratio
from precaudit.schema.policies import Policy

Unrounded = Sequence[Sequence[Array]]
ROWS = 64  # query rows variants are tried on; the one that is named is made on all
NEAREST = 3  # variants by which it is asked, where none closes, whether an input was read unrounded
POOR = 0.2  # badness from which a number is fitted although a formula closes
LEAVES = 0.5  # most that a cause leaves of what the announced policy leaves, squared
MUCH = 4.0  # times what a fitted number leaves, squared, from which it is named in place of a formula that closes


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
class KnownBeside:
    """What is known of an operation beside what it read and made.

    ``variants``: causes at the same point elsewhere; ``unrounded``: its inputs as they were before they were rounded to
    be stored; ``probs``: what attn_out's second product read, tried where nothing made of q, k and v closes.
    ``never``: classes that no cause is of, since the formula is known to be the reference's.
    """

    variants: Sequence[Variant] = ()
    unrounded: Unrounded = ()
    probs: Array | None = None
    never: Collection[Class] = ()


def replay(
    o: Operation, model: Model, policy: Policy, known: KnownBeside = KnownBeside(), settled: bool = False
) -> Replay:
    """Try every variant of an operation on its recorded inputs.

    ``settled``: ``policy`` makes its products as the compiled program says.
    """
    point, layer, never = o.place.point, o.place.layer, known.never
    base = of_policy(policy, o.place.phase == "decode").starting(o.start)
    roundings = tuple(base.eliding(places) for places in elisions(point, model.config, policy))
    members = tuple(honest(o, model, policy, base))
    others = tuple(replace(operands_of(o, model), values=tuple(values)) for values in known.unrounded)
    whole = Bench(
        operands_of(o, model),
        o.axes,
        roundings,
        yardstick(o, model, policy, settled),
        members,
        others,
        formula_rounding(policy),
    )
    announced, *rest = variants(point, policy, model.config, layer)
    causes = [v for v in (*rest, *known.variants) if v.kind not in never]
    whole = whole.reading([announced])
    sought = _sought(whole, announced, causes, never, policy)
    if sought.named is None and whole.others:
        nearest = sorted(sought.tried, key=lambda t: -t.explained)[:NEAREST]
        again = whole.reading([t.variant for t in nearest])
        whole, sought = (whole, sought) if again is whole else (again, _sought(again, announced, causes, never, policy))
    part, first, tried, named = sought
    floor = max(first.explained, 0.0)
    if named is None and known.probs is not None:
        named = _after(whole, announced, causes, known.probs)
        tried += [] if named is None else [named]
    if named is None:
        tried += [whole.try_variant(v, floor) for v in _others(whole, announced) if v.kind not in never]
        named = _confirm(whole, part, tried)
    if named is None:
        scaled = [whole.try_variant(v, floor) for v in _parts_of(whole)]
        tried += scaled
        allowed = [t for t in tried if t.variant.kind not in never]
        allowed = allowed if first in allowed else [first, *allowed]
        named = _simplest([t for t in scaled if t in allowed], first) or _confirm(whole, part, allowed)
    if named is None and "semantics" not in never:
        tried += fitted_numbers(part, floor, policy, last=True)
        named = _confirm(whole, part, tried)
    if named is not None and named.variant.name.startswith(EPSILON):
        known_of_it = known_of_epsilon(part, named, tried)
        if part is whole or whole.try_variant(known_of_it.variant, 1.0).closes:
            named = known_of_it
            tried.append(named)
    ordered = sorted(tried, key=lambda t: (-t.explained, t is not first))
    left, emulated = _left_by_announced(whole, announced)
    return Replay(tuple(ordered), first, named, left, emulated, whole.yardstick.candidate, whole.yardstick.reference)


class Sought(NamedTuple):
    """The rows that variants were tried on, what the announced one and all others answer, and the one that closes."""

    part: Bench
    first: Tried
    tried: list[Tried]
    named: Tried | None


def _sought(
    whole: Bench, announced: Variant, others: Sequence[Variant], never: Collection[Class], policy: Policy
) -> Sought:
    """Try what has no free number; where nothing closes attention without a key; then what has one."""
    left, emulated = _left_by_announced(whole, announced)
    part = _part(whole, left, emulated, announced)
    first = part.try_variant(announced, 1.0)
    floor = max(first.explained, 0.0)
    tried = [first, *_exact(part, others, first)]
    named = _confirm(whole, part, tried)
    if named is None:
        tried += [whole.try_variant(v, floor) for v in _keys(whole, emulated) if v.kind not in never]
        named = _confirm(whole, part, tried)
    if "semantics" not in never and (named is None or named.badness > POOR):
        tried += fitted_numbers(part, floor, policy)
        named = _confirm(whole, part, tried)
    return Sought(part, first, tried, named)


def _left_by_announced(whole: Bench, announced: Variant) -> tuple[Array, Array]:
    """Return what the announced policy leaves, 0 where it is masked, and what it makes [T, H, K]."""
    emulated = whole.nearest(announced)
    left = whole.yardstick.candidate - emulated
    return left if whole.yardstick.hidden is None else np.where(whole.yardstick.hidden, 0.0, left), emulated


def operands_of(o: Operation, model: Model) -> Inputs:
    """Return what an operation read."""
    at = np.asarray(o.positions)
    return Inputs(
        model, o.place.layer, o.place.point, at, o.inputs, o.last, start=o.start, lengths=o.lengths, turned=o.turned
    )


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
    return whole if some.try_variant(announced, 1.0).closes else some


def _exact(part: Bench, others: Sequence[Variant], announced: Tried) -> Iterator[Tried]:
    """Yield the answers of variants without a free number; the last ones only where nothing closes so far."""
    closed = False
    for v in sorted(others, key=lambda v: v.last):
        if closed and v.last:
            continue
        found = part.try_variant(v, max(announced.explained, 0.0))
        closed = closed or found.closes
        yield found


def _confirm(whole: Bench, part: Bench, tried: Sequence[Tried]) -> Tried | None:
    """Return the best answer that closes on all rows too: an exact formula unless a fitted one leaves far less.

    What has a number of its own for every slice is none, nor what leaves most of what the announced policy, the first,
    leaves.
    """
    causes = [t for t in tried if t.closes and _explains(t, tried[0])]
    kinds = [[t for t in causes if t.variant.fitted is fitted] for fitted in (False, True)]
    exact, fitted = (_first(whole, part, sorted(kind, key=lambda t: t.rank)) for kind in kinds)
    if exact is None or fitted is None:
        return exact or fitted
    return fitted if MUCH * (1 - fitted.explained) < 1 - exact.explained else exact


def _explains(t: Tried, announced: Tried) -> bool:
    """Whether an answer is a cause: it has few numbers, and leaves little of what the announced policy leaves."""
    if t is announced:
        return True
    return not t.variant.describes and 1 - t.explained <= LEAVES * (1 - announced.explained)


def _first(whole: Bench, part: Bench, ranked: Sequence[Tried]) -> Tried | None:
    return next((t for t in ranked if part is whole or whole.try_variant(t.variant, 1.0).closes), None)


def _keys(whole: Bench, emulated: Array) -> Iterator[Variant]:
    """Yield attention without a key."""
    if whole.inputs.row.weighs:
        yield from missing_keys(whole.inputs, whole.yardstick.candidate, emulated)


def _others(whole: Bench, announced: Variant) -> Iterator[Variant]:
    """Yield attention of other key heads, sums without an addend, products without a weight, and random rounding."""
    c, row = whole.yardstick.candidate, whole.inputs.row
    left, _ = _left_by_announced(whole, announced)
    yield from head_variants(whole.inputs, c)
    yield from addend_left_out(whole.inputs, c)
    yield from single_weights(whole.inputs, np.where(np.isfinite(left), left, 0.0))
    for r in whole.roundings:
        unrounded = canonical(evaluate_form(usual_form, whole.inputs, r.eliding((row.place,))), whole.axes)
        yield from stochastic_variants(whole.axes, whole.yardstick.dtype, c, unrounded)


def _parts_of(whole: Bench) -> Iterator[Variant]:
    """Yield results of which a part is scaled, zero or clipped: of what comes nearest to the candidate's direction."""
    c, at = whole.yardstick.candidate, np.asarray(whole.inputs.positions)
    outs = [np.where(np.isfinite(c), np.nan_to_num(whole.make(usual_form, r)), 0.0) for r in whole.roundings]
    clean = np.where(np.isfinite(c), c, 0.0)
    emulated = max(outs, key=lambda y: ratio(float((clean * y).sum()) ** 2, float((y * y).sum())))
    roundoff = FORMATS[whole.yardstick.dtype].unit_roundoff
    shares = whole.inputs.row.kind == "softmax"
    yield from scaled_parts(at, whole.axes, clean, emulated, roundoff, shares)
    hidden = whole.yardstick.hidden
    shown = np.ones(clean.shape, bool) if hidden is None else ~np.broadcast_to(hidden, clean.shape)
    yield from added_number(clean[shown], emulated[shown], roundoff)


def _simplest(parts: Sequence[Tried], announced: Tried) -> Tried | None:
    """Return the first part that leaves next to nothing and is a cause: more factors always leave less."""
    return next((t for t in parts if t.badness <= POOR and _explains(t, announced)), None)


def _after(whole: Bench, announced: Variant, others: Sequence[Variant], probs: Array) -> Tried | None:
    """Return what explains attention's second product, made from the recorded probabilities, on all rows."""
    bench = replace(whole, inputs=replace(whole.inputs, probs=probs), others=())
    bench = replace(bench, yardstick=bench.measure(replace(announced, kind="semantics")))
    first, emulated = bench.try_variant(announced, 1.0), bench.nearest(announced)
    if first.closes:
        return None
    floor = max(first.explained, 0.0)
    tried = [first, *(bench.try_variant(v, floor) for v in (*others, *_keys(bench, emulated)))]
    if (named := _confirm(bench, bench, tried)) is not None:
        return named
    scaled = [bench.try_variant(v, floor) for v in _parts_of(bench)]
    return _simplest(scaled, first) or _confirm(bench, bench, [first, *scaled])

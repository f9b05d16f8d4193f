"""What makes a program's values of an operation from its own inputs, where the textbook's formula does not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from precaudit.diagnosis.masks import one_ahead, other_mask
from precaudit.diagnosis.named import UNNAMED, NamedOperation, norms, row_distances
from precaudit.diagnosis.parts_shown import first_part
from precaudit.diagnosis.scales import other_scale
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.formula import Shown
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.mutations.candidates import variants
from precaudit.references.mutations.declared import place_names
from precaudit.references.mutations.fitting import Fit, fits
from precaudit.references.mutations.forms import Form, Inputs, evaluate_form, usual_form
from precaudit.references.mutations.heads import head_variants
from precaudit.references.mutations.keys import missing_keys
from precaudit.references.mutations.minimising import minimise
from precaudit.references.mutations.parts import added_number, scaled_parts
from precaudit.references.mutations.products import narrow_constants
from precaudit.references.mutations.variants import Variant
from precaudit.references.sequences import Tokens
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.limits.checks import SAME
from precaudit.schema.metrics.sizes import canonical
from precaudit.schema.policies import load_policy

EXACT = 1e-10  # of a value, that FP64 sums in another order leave at most
CONSTANT = 1e-7  # of a value, that a constant held in float32 leaves at most
FEW = 3  # significant digits of a number that somebody wrote
FAR_LESS = 0.01  # of what a formula without a free number leaves, for one with a number to be named in its place
NEAR = 0.05  # of a formula that is told as the nearest where none is the one
CLOSER = 0.5  # of what the textbook's formula leaves, that the nearest may leave


def name_formula(book: MappedTextbook, beside: Shown, pair: Pair, suspect: bool = False) -> NamedOperation | None:
    """Return what makes the program's values of an operation from its own inputs; None where the textbook's does.

    Values are FP64 on both sides, so what a form leaves is nothing, or it is not the cause. ``suspect``: what it reads
    is not the textbook's either; then nothing is known of it unless the program shows all of that.
    """
    if not POINTS[pair.point].inputs:
        return None if suspect else _entering(book, beside, pair)
    found = [read_operands(book, beside, pair, name, suspect) for name in inputs_of(pair.point, book.config.sparse)]
    if any(x is None for x in found):
        return None
    values = [x.values for x in found if x is not None]
    sure = all(x.shown for x in found if x is not None) or not suspect
    every = [seq for seq in beside.sequences if len(seq.rows)]
    seen = [beside.seen[pair][b, seq.rows] for b, seq in enumerate(beside.sequences) if len(seq.rows)]
    if POINTS[pair.point].reads_keys and any(seq.earlier.mixed for seq in every):
        return None  # keys before the first row are not known
    each = [
        sequence_inputs(book, pair, seq, [x[b] for x in values])
        for b, seq in enumerate(beside.sequences)
        if len(seq.rows)
    ]

    def share_left(form: Form) -> float:
        with np.errstate(all="ignore"):
            off = np.concatenate([_off(evaluate_form(form, o, FP64), x) for o, x in zip(each, seen, strict=True)])
        return float(off.max()) if np.isfinite(off).all() else float("inf")

    if share_left(usual_form) <= SAME:
        return None
    cached = other_mask(each, seen) or other_scale(each, seen, beside.slots) or one_ahead(beside, each, seen)
    if cached is not None:
        return cached._replace(pair=first_part(beside, pair, each))
    policy = load_policy("fp32-highest")
    others = [v for v in variants(pair.point, policy, book.config, pair.layer) if v.form is not usual_form]
    if POINTS[pair.point].activates(book.config):
        others += narrow_constants(book.config)
    tried = [(share_left(v.form), v) for v in others]
    best = min(tried, key=lambda x: x[0], default=None)
    exact = None
    if best is not None and best[0] <= SAME:
        kind = "format" if best[1].kind == "format" else "semantics"
        exact = NamedOperation(best[1].name, best[1].says, best[0], kind, _part(beside, pair, each))
        if best[0] <= EXACT:
            return exact
    for fit in sorted(fits(each[0]), key=lambda f: f.last):
        x = _fit_number(fit, share_left)
        if x is not None and (
            exact is None or (_instead(x, exact) and share_left(fit.form(x)) <= FAR_LESS * exact.left)
        ):
            v = fit.variant(x)
            return NamedOperation(v.name, v.says, share_left(fit.form(x)), pair=_part(beside, pair, each))
    if exact is not None:
        return exact
    for v in _of_parts(each, seen):
        if not v.describes and share_left(v.form) <= SAME:
            return NamedOperation(v.name, v.says, share_left(v.form), pair=_part(beside, pair, each))
    if not suspect and (summed := _sum_before(book, beside, pair, each, seen)) is not None:
        return summed
    if not all(np.isfinite(x).all() for x in seen):
        return NamedOperation(UNNAMED, "it has NaN or infinity in FP64, too", 1.0)
    if not sure:
        return None
    near = (
        f"; nearest: {best[1].says}, with an error of {digits(best[0], 2)}"
        if best is not None and best[0] <= min(NEAR, CLOSER * share_left(usual_form))
        else ""
    )
    says = f"no known formula gives it from its own inputs{near}"
    return NamedOperation(UNNAMED, says, 1.0, pair=_part(beside, pair, each))


def _sum_before(
    book: MappedTextbook, beside: Shown, pair: Pair, each: Sequence[Inputs], seen: Sequence[Array]
) -> NamedOperation | None:
    """Return what changes the sum into the stream that an operation reads, where the program shows its addend alone."""
    name, layer = POINTS[pair.point].inputs[0], book.config.layers - 1 if pair.layer is None else pair.layer
    shown = {(p.layer, p.point): p for p in beside.seen}
    if POINTS[name].handed is not None and layer:
        name, layer = POINTS[name].handed or "", layer - 1
    if POINTS[name].kind != "sum" or (layer, name) in shown:
        return None
    stream, addend = POINTS[name].inputs
    if (added := shown.get((layer, addend))) is None:
        return None
    read = [beside.seen[x] if (x := shown.get((layer, n))) else beside.expected[layer, n] for n in (stream, addend)]
    every = [(b, seq) for b, seq in enumerate(beside.sequences) if len(seq.rows)]
    sums = [
        Inputs(book.model, layer, name, seq.positions, tuple(x[b, seq.rows] for x in read), turned=seq.earlier.turned)
        for b, seq in every
    ]

    def share_left(form: Form) -> float:
        with np.errstate(all="ignore"):
            made = [
                replace(o, values=(evaluate_form(form, s, FP64), *o.values[1:]))
                for o, s in zip(each, sums, strict=True)
            ]
            off = np.concatenate([_off(evaluate_form(usual_form, o, FP64), x) for o, x in zip(made, seen, strict=True)])
        return float(off.max()) if np.isfinite(off).all() else float("inf")

    # a norm knows no factor on both terms: that on the term which the program shows is told
    order = sorted(fits(sums[0]), key=lambda f: "addend" not in f.what)
    fitted = (f.variant(n) for f in order if (n := _fit_number(f, share_left)) is not None)
    for v in chain(variants(name, load_policy("fp32-highest"), book.config, layer), fitted):
        if v.form is not usual_form and (left := share_left(v.form)) <= SAME:
            what = v.says.removesuffix("; nearest known: none")
            return NamedOperation(v.name, f"{what}, in the sum that adds {place_names([added])}", left)
    return None


def _part(beside: Shown, pair: Pair, each: Sequence[Inputs]) -> Pair:
    return first_part(beside, pair, each) if POINTS[pair.point].kind == "mix" else pair


def _off(x: Array, seen: Array) -> Array:
    """Return the distance [T] of every row; what is not finite must be so in both, and tells no more."""
    both = ~np.isfinite(x) & ~np.isfinite(seen)
    return row_distances(np.where(both, 0.0, x), np.where(both, 0.0, seen))


def _of_parts(each: Sequence[Inputs], seen: Sequence[Array]) -> Iterator[Variant]:
    """Yield the operation of other heads, or with a part of its result changed, by the first sequence that differs."""
    for o, x in zip(each, seen, strict=True):
        with np.errstate(all="ignore"):
            y = evaluate_form(usual_form, o, FP64)
        if np.isfinite(x).all() and np.isfinite(y).all() and not _off(y, x).max() <= SAME:
            candidate, emulated = canonical(x, o.row.axes), canonical(y, o.row.axes)
            yield from head_variants(o, candidate)
            if o.row.weighs:
                yield from missing_keys(o, candidate, emulated)
            yield from scaled_parts(np.asarray(o.positions), o.row.axes, candidate, emulated, SAME)
            yield from added_number(candidate.ravel(), emulated.ravel(), SAME)
            return


class Read(NamedTuple):
    """What an operation reads [B, T, …], and whether the program shows it."""

    values: Array
    shown: bool


def read_operands(book: MappedTextbook, beside: Shown, pair: Pair, name: str, suspect: bool) -> Read | None:
    """Return what an operation reads: as the program shows it, or as the textbook makes it.

    ``suspect``: what comes before is not the textbook's; then from what the program shows, or None.
    """
    shown_by = {(p.layer, p.point): x for p, x in beside.seen.items()}
    layer = (book.config.layers - 1 if pair.layer is None else pair.layer) if POINTS[name].per_layer else None
    if (own := shown_by.get((layer, name))) is not None:
        return Read(own, True)
    if not suspect:
        return Read(beside.expected[layer, name], False)
    before = [shown_by.get((layer, source)) for source in inputs_of(name, book.config.sparse)]
    if POINTS[name].attends or not before or any(x is None for x in before):
        return None
    values = np.zeros(beside.expected[pair.layer, name].shape)
    for b, sequence in enumerate(beside.sequences):
        rows = [x[b, sequence.rows] for x in before if x is not None]
        context = book.model.context(layer, sequence.positions + sequence.earlier.turned, FP64)
        values[b, sequence.rows] = book.model.apply(name, context, rows) if len(sequence.rows) else 0
    return Read(values, False)


def sequence_inputs(book: MappedTextbook, pair: Pair, sequence: Tokens, read: Sequence[Array]) -> Inputs:
    """Return what an operation of a sequence reads, of values [T, …] of the calls' rows."""
    values = tuple(x[sequence.rows] for x in read)
    if POINTS[pair.point].reads_keys and pair.layer is not None:
        values = (values[0], *sequence.earlier.before(pair.layer, values[1], values[-1]))[: len(values)]
    turned = sequence.earlier.turned
    return Inputs(book.model, pair.layer, pair.point, sequence.positions, values, turned=turned)


def _entering(book: MappedTextbook, beside: Shown, pair: Pair) -> NamedOperation | None:
    """Return by what factor the stream that enters a layer is off, where it is one; None where it is the textbook's."""
    rows = [(b, seq.rows) for b, seq in enumerate(beside.sequences)]
    both = (beside.seen[pair], beside.expected[pair.layer, pair.point])
    seen, wanted = (np.concatenate([x[b, at] for b, at in rows]) for x in both)
    factor = float(np.sum(seen * wanted) / np.sum(wanted * wanted)) if wanted.any() else 0.0
    size = float(norms(wanted).max())
    if norms(seen - wanted).max() <= SAME * size:
        return None
    if pair.layer == 0 and norms(seen - factor * wanted).max() <= SAME * size:
        should = book.config.embed_scale
        says = f"embedding rows are times {digits(factor * should, 6)}, the configuration says {digits(should, 6)}"
        return NamedOperation("embedding factor", says, 0.0)
    return NamedOperation(
        UNNAMED, "what enters the layer is not what the layer before, or the embedding, hands it", 1.0
    )


def _instead(x: float, exact: NamedOperation) -> bool:
    """Whether a fitted number may stand for a formula without one that closes.

    What a float32 constant leaves of such a formula, a number of many digits fits: it is none that was written.
    """
    return exact.left > CONSTANT or float(f"{x:.{FEW - 1}e}") == x


def _fit_number(fit: Fit, left: Callable[[Form], float]) -> float | None:
    """Return the number of fewest digits under which a formula leaves nothing; None where none does.

    Of a number of a small effect, such as an epsilon beside a mean square of 1, every digit leaves less than SAME:
    the first is taken that leaves no more than all of them, or than FP64 rounds.
    """
    x = minimise(lambda x: left(fit.form(x)), fit.grid, fit.whole)
    if not left(fit.form(x)) <= 1e3 * SAME:
        return None
    allowed = min(SAME, max(EXACT, 2 * left(fit.form(x))))
    for places in range(12):
        short = float(f"{x:.{places}e}")
        if left(fit.form(short)) <= allowed:
            return short
    return None

"""Local records of a program's run out of what its segments make of recorded values."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from precaudit.models.numpy_decoder.ensemble import RECIPROCAL
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.threads import each
from precaudit.recording.runs.program_places import not_taken, step_values
from precaudit.recording.runs.programs import OWN_SUMS, Opened, ProgramPoint, ProgramRun
from precaudit.references.closing import SINGLE, TIES, Yardstick
from precaudit.references.traced.infinities import as_decided
from precaudit.references.traced.remade import DRAWS, INPUTS, SOME, UNSHARED, restore
from precaudit.references.traced.undrawn import undrawn_fields, undrawn_numbers
from precaudit.references.traced.units import flushes_of
from precaudit.references.traced.unrounded import Name, Place, Rows
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import local_checks
from precaudit.schema.metrics.axes import clusters, largest_along
from precaudit.schema.metrics.residue import Noise, finite
from precaudit.schema.metrics.sizes import canonical, explained_share, half_ulp, norm, ratio, smallest_normal
from precaudit.schema.places import Place as Where
from precaudit.schema.records.errors import AccumulationError, E, LocalError

CLEARLY = 0.9  # of every limit: what closes so by the least noise needs none drawn
# Times the emulation's own error that a draw's may be: honest ones stay below a quarter of it in formats of 16 bits and
# half of it in float32, where functions are drawn off by 4 ulp (tests/references/traced/test_rounding_draws.py, slow).
# What is farther turned something else than a rounding, such as a comparison.
MOST_NARROW, MOST_SINGLE = 8.0, 100.0
# Powers of these for one and two elements: the least of normal errors is below 1 / t of them with a chance of 0.8 / t
# and 0.5 / t², so that an emulation of one is by chance much nearer to FP64 than another draw
FEW = {1: 2.5, 2: 1.5}
SUMS = 0.1  # of a float32 result's units of its terms, that its sums leave (docs/numerics.md, ensemble)
FLUSHED = (FORMATS["float32"].dtype, FORMATS["bfloat16"].dtype)
ORDERS = 3.0  # times as far off as one order of a sum, another may be
At = tuple[ProgramPoint, int | None]  # a point and its layer
OPEN = (
    "the compiled program does not say which unit computes a float32 product of this operation, or in how many passes"
)
ALIKE = "it is computed in float64, and so is its reference"
Recomputed = LocalError | AccumulationError  # what is computed from recorded inputs


@dataclass(frozen=True)
class JudgedCall:
    """One call of a recorded program: its case, its number, and what it recorded, by name."""

    opened: Opened
    case: str
    number: int
    taps: dict[str, Array]

    def rows(self, p: ProgramPoint, layer: int | None) -> Callable[[Array], Array]:
        """Return what cuts a step out of a point's values, as rows [rows, N]."""
        return step_of(self.opened.record, p, layer)

    def record(self, p: ProgramPoint, layer: int | None, **numbers: Any) -> LocalError:
        """Return a local record of a point."""
        return record_of(LocalError, self.opened, self.case, self.number, p, layer, **numbers)


@dataclass(frozen=True)
class Segments:
    """What a call's segments make of recorded inputs: in FP64, as the equations round, and as drawn realisations.

    Rows [rows, N] of each place; where nothing is drawn, noise is the least that there is. ``moved``: what drawn
    realisations differ by from the equations' where both read narrow inputs unrounded, as each makes them: a float32
    result then has the noise of its inputs, too. ``open``: what is not a number where FP64 is one comes from a product
    that is not known. ``tied``: what the first ways make with what TF32 operands near a tie may make of it added;
    ``again``: what drawn realisations differ by where float32 inputs are made once more; ``gpu``: whether one made
    them. ``sizes``: (|A|·|B|) of places, what their terms add up to without cancelling.
    """

    exact: Rows
    honest: dict[Name, Rows]
    drawn: tuple[Rows, ...] = ()
    moved: tuple[Rows, ...] = ()
    open: bool = False
    tied: dict[Name, Rows] = field(default_factory=dict)
    again: tuple[Rows, ...] = ()
    gpu: bool = False
    sizes: Rows = field(default_factory=dict)

    def only(self, left: Collection[Place]) -> "Segments":
        """Return the same of some places, in memory of their own where these are few of their point's."""
        known = Counter(name for name, _ in self.exact)
        few = {name for name, n in Counter(name for name, _ in left).items() if 2 * n < known[name]}

        def of(rows: Rows) -> Rows:
            return {at: rows[at].copy() if at[0] in few else rows[at] for at in left if at in rows}

        honest = {name: of(rows) for name, rows in self.honest.items()}
        return Segments(
            of(self.exact), honest, tuple(map(of, self.drawn)), tuple(map(of, self.moved)), self.open, gpu=self.gpu
        )


@dataclass(frozen=True)
class PlaceRows:
    """What segments make of one place [rows, N], as ``Segments`` has it.

    ``terms``: the sizes of what is added up there.
    """

    exact: Array
    honest: dict[Name, Array]
    drawn: Sequence[Array] = ()
    moved: Sequence[Array] = ()
    tied: Mapping[Name, Array] = field(default_factory=dict)
    again: Sequence[Array] = ()
    gpu: bool = False
    terms: Array | None = None


def closes(e: LocalError, share: float = 1.0) -> bool:
    """Whether a local record has numbers within a share of every limit, or none that another emulation would give."""
    checks = list(local_checks(e, default_limits().local(e.dtype)))
    return e.unexplained is None or all(found <= share * limit for _, _, found, limit, _ in checks)


def judge_places(call: JudgedCall, some: Sequence[At], made: Segments) -> list[LocalError]:
    """Return the records of some places of a call, made by as many threads as there are cores."""
    elements = sum(prod(p.shape) for p, _ in some)
    return each(_record, [(call, p, layer, made) for p, layer in some], elements)


def _record(call: JudgedCall, p: ProgramPoint, layer: int | None, made: Segments) -> LocalError:
    whole = call.taps.get(p.name)
    if lacks := lacks_of(call.opened.record, p, layer, whole, call.taps):
        return call.record(p, layer, **lacks)
    assert whole is not None
    if p.dtype == "float64":
        return unknown(call, p, layer, ALIKE)
    place = p.name, layer
    if place not in made.exact:
        return call.record(p, layer, unknown="no segment ends in it")
    exact = made.exact[place]
    every = {name: rows[place] for name, rows in made.honest.items() if place in rows}
    if made.open and np.isnan(restore(every[()], p.dtype)[np.isfinite(exact)]).any():
        return call.record(p, layer, unknown=OPEN)
    stored = call.rows(p, layer)(whole)
    lost = lost_of(stored, exact) if p.whole else {}
    drawn = [restore(rows[place], p.dtype) for rows in made.drawn if place in rows]
    smallest = floor_of(p.dtype, flushes_of(call.opened.record))
    if not drawn:
        return call.record(p, layer, **lost, **undrawn_numbers(stored, exact, every, p.shape, smallest))
    honest = {name: restore(x, p.dtype) for name, x in every.items()}
    moved = [rows[place] for rows in made.moved if place in rows]
    tied = {name: rows[place] for name, rows in made.tied.items() if place in rows}
    again = [rows[place] for rows in made.again if place in rows]
    here = PlaceRows(exact, honest, drawn, moved, tied, again, made.gpu, made.sizes.get(place))
    return call.record(p, layer, **lost, **local_numbers(stored, here, p.shape, smallest))


def local_numbers(
    stored: Array, made: PlaceRows, shape: tuple[int, ...] | None = None, smallest: float = 0.0
) -> dict[str, Any]:
    """Return a local record's fields; arrays [rows, N]: what leads is rows.

    ``shape``: the point's own (None: [rows, N]); slices are lines and planes of it, whatever the order of its axes.
    ``smallest``: what any element may be off by; where sums in float32 cancel, their terms say how far they may.
    """
    rows, dtype, terms = np.arange(len(stored)), stored.dtype.name, made.terms
    exact = as_decided(stored, made.exact, _rounding_all(made.honest, made.drawn))
    candidate, reference = canonical(stored, "TD"), canonical(exact, "TD")
    emulations = {name: canonical(y, "TD") for name, y in made.honest.items()}
    members = [canonical(y, "TD") for y in made.drawn]
    wide = dtype in ("float32", "float64")
    if not wide:
        # limits are of an ensemble without this way: as near to others as it is, it would make the noise smaller
        members = [*(y for name, y in emulations.items() if not set(UNSHARED) & set(name)), *members]
    u = FORMATS[dtype].unit_roundoff
    clean = finite(candidate)
    best = min(emulations, key=lambda name: norm(clean - finite(emulations[name])))
    around: Array | None = reference
    if wide and made.moved and {INPUTS, SOME} & set(best):
        members, around = [canonical(y, "TD") for y in made.moved], None
    shown = finite(reference)
    steady = members
    if around is reference:
        sums = 0.0 if terms is None else SINGLE * norm(finite(canonical(terms, "TD")))
        steady = _steady(members, emulations[best], reference, (MOST_SINGLE if wide else MOST_NARROW, u, sums))
    unsteady, members = len(members) - len(steady), steady
    noise = Noise.pool(members, shown, u, RECIPROCAL if wide else 0.0, around=around)
    each = stored.shape if shape is None else shape
    noise = with_floors(noise, members, around, shown, each, smallest)
    size = np.abs(reference) if terms is None else finite(canonical(terms, "TD"))
    if terms is not None:  # in place: these may be hundreds of megabytes
        noise.power[...] += np.square(((SUMS if wide else 1.0) * SINGLE) * size)
    # where a result cancels by what no sum of terms tells, the size of what lies along an axis stands for theirs
    allowed = largest_along(shown.reshape(each)).reshape(shown.shape)
    allowed *= noise.relative
    np.square(allowed, out=allowed)
    allowed += noise.power
    np.sqrt(allowed, out=allowed)
    allowed += half_ulp(reference, dtype)
    ties = None if wide else TIES * SINGLE * size
    yard = Yardstick("TD", dtype, rows, candidate, reference, noise, allowed, sums=ties, shape=each)
    if made.gpu and (OWN_SUMS,) in emulations:  # in which order its threads add is not known
        one = np.abs(emulations[OWN_SUMS,] - emulations[()])
        every = np.maximum(one, ratio(norm(finite(one)), norm(shown)) * np.abs(reference))
        yard = yard.doubting(every, ORDERS, np.zeros(()))
    for change in made.again:  # each of several draws
        yard = yard.doubting(canonical(change, "TD"), len(DRAWS) ** -0.5, np.zeros(()))
    if best in made.tied:
        yard = yard.doubting(canonical(made.tied[best], "TD"), 1.0, emulations[best])
    with np.errstate(invalid="ignore"):  # equal infinities
        residue = yard.residue(emulations[best])
        error = norm(finite(candidate - reference))
    emulated = finite(emulations[best])
    share = explained_share(clean, norm(clean - shown), emulated)
    told = {"unsteady": unsteady} if unsteady else {}
    return undrawn_fields(stored, exact, best, residue, share, ratio(error, norm(emulated - shown))) | told


def _rounding_all(honest: Mapping[Name, Array], drawn: Sequence[Array]) -> list[Array]:
    """Return the realisations that round every result: where others are finite, an overflow was left out."""
    strict = [y for name, y in honest.items() if name[:1] in ((), (INPUTS,), (SOME,))]
    return strict + [y for i, y in enumerate(drawn) if i >= len(DRAWS) or DRAWS[i].unrounded == "none"]


def _steady(members: list[Array], emulated: Array, reference: Array, most: tuple[float, float, float]) -> list[Array]:
    """Return the realisations that are no farther from FP64 than ``most`` says.

    So many times as far as the emulation is, or one rounding of u; or as far as one rounding of what is added up.
    """
    times, u, sums = most
    times **= FEW.get(reference.size, 1.0)
    with np.errstate(invalid="ignore"):
        sizes = [norm(finite(y - reference)) for y in (emulated, *members)]
    limit = max(times * max(sizes[0], u / 3**0.5 * norm(finite(reference))), sums)
    near = [y for y, size in zip(members, sizes[1:], strict=True) if size <= limit]
    return near or [emulated]


def with_floors(
    noise: Noise, members: Sequence[Array], around: Array | None, shown: Array, shape: tuple[int, ...], smallest: float
) -> Noise:
    """Return noise with what lines of every axis make of it, and what any element may be off by."""
    middle = 0.0 if around is None else around
    with np.errstate(invalid="ignore"):
        made = [list(clusters(finite(d - middle).reshape(shape), shown.reshape(shape))) for d in members]
    root = len(members) ** -0.5
    others = tuple(tuple(root * np.stack(each) for each in zip(*axis, strict=True)) for axis in zip(*made, strict=True))
    return replace(noise, smallest=smallest, others=others)


def floor_of(dtype: str, flush: bool) -> float:
    """Return what any element may be off by: half the smallest subnormal's distance, or all that a device flushes."""
    smallest = smallest_normal(dtype)
    return smallest if flush and FORMATS[dtype].dtype in FLUSHED else smallest * FORMATS[dtype].unit_roundoff


def lost_of(stored: Array, exact: Array) -> dict[str, Any]:
    """Return which whole numbers a run holds as others, as a record has it; empty where FP64 makes other numbers, too.

    They collide where a number of the run stands for several of FP64. Empty, too, where the format has all of them:
    then something before rounded to another whole number, such as a quantiser.
    """
    held = widen(stored)
    if not np.array_equal(exact, np.rint(exact)) or np.array_equal(held, exact):
        return {}
    others = exact[held != exact]
    with np.errstate(over="ignore", invalid="ignore"):  # which a narrow format does not have
        known = widen(others.astype(stored.dtype))
    if np.array_equal(known, others):
        return {}
    pairs, times = np.unique(np.stack([held.ravel(), exact.ravel()]), axis=1, return_counts=True)
    _, stands, several = np.unique(pairs[0], return_inverse=True, return_counts=True)
    return {
        "lost": len(others),
        "lost_between": (float(others.min()), float(others.max())),
        "collisions": int(times[several[stands] > 1].sum()),
    }


def unknown(call: JudgedCall, p: ProgramPoint, layer: int | None, why: str) -> LocalError:
    """Return the record of a point that has no reference; a NaN needs none (an infinity may be a mask's)."""
    whole = call.taps.get(p.name)
    if lacks := lacks_of(call.opened.record, p, layer, whole, call.taps):
        return call.record(p, layer, **lacks)
    assert whole is not None
    values = call.rows(p, layer)(whole)
    bad = int(np.isnan(widen(values)).sum())
    return call.record(p, layer, unknown=why, dtype=p.dtype, n=values.size, nonfinite=bad)


def lacks_of(
    run: ProgramRun, p: ProgramPoint, layer: int | None, whole: Array | None, taps: dict[str, Array]
) -> dict[str, Any]:
    """Return why a point has no numbers; empty where it has."""
    if whole is None or whole.shape != (*p.stacked, *p.shape) or whole.dtype.name != p.dtype:
        return {"missing": "recorded with another shape or format, or not at all"}
    why = not_taken(run, p, layer, taps)
    return {} if why is None else {"skipped": why}


def step_of(run: ProgramRun, p: ProgramPoint, layer: int | None) -> Callable[[Array], Array]:
    """Return what cuts a step of its scans out of a point's values, as rows [rows, N]."""
    return lambda x: step_values(run, p, layer, x).reshape(-1, p.shape[-1] if p.shape else 1)


def record_of(
    kind: type[E], opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None, **numbers: Any
) -> E:
    """Return a record of a kind of a place of a program's run."""
    here = Where(case, opened.record.phase, call, layer, p.name)
    return here.record(kind, opened.record.id, "fp64", **numbers)

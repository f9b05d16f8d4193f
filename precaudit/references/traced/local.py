"""Local errors of a program's run: each segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import jax
import numpy as np

from precaudit.arrays import Array, widen
from precaudit.formats import FORMATS
from precaudit.limits import default_limits
from precaudit.limits.checks import local_checks
from precaudit.metrics.residue import Noise, finite
from precaudit.metrics.sizes import canonical, explained, half_ulp, norm, ratio, sizes
from precaudit.numpy_decoder.ensemble import RECIPROCAL
from precaudit.records import PROGRAM_CALL, ErrorRecord, Way, number
from precaudit.references.closing import SINGLE, TIES, Yardstick
from precaudit.references.traced.forward import effort
from precaudit.references.traced.remade import (
    DRAWS,
    FIRST,
    HONEST,
    INPUTS,
    INSIDE,
    NARROW,
    SOME,
    TERMS,
    UNSHARED,
    Remade,
    Tapped,
    once,
    restored,
)
from precaudit.references.traced.units import Units
from precaudit.references.traced.unrounded import Name, Place, Rows, Unrounded
from precaudit.runs.programs import (
    CARRIED,
    EQUATIONS,
    OWN_SUMS,
    Opened,
    ProgramPoint,
    ProgramRun,
    cut,
    not_taken,
    places,
)
from precaudit.threads import each, one_blas_thread
from precaudit.transforms.emulate import Realisation, exactly
from precaudit.transforms.opaque import KNOWN, Opaque
from precaudit.transforms.shadow import CannotLift, refusal
from precaudit.transforms.sites import numbered
from precaudit.transforms.sums import sums_narrow
from precaudit.transforms.tag import Tagged

Ways = dict[tuple[str, ...], Realisation]
# What is said of products that a GPU's compiled program does not name.
OPEN_PRODUCTS: dict[Way, str] = {"float32": "products in float32", "rounded products": TERMS}
ORDERS = 3.0  # times as far off as one order of a sum, another may be
OPEN = "the compiled program does not say which unit makes a float32 product of this segment, or in how many passes"


@dataclass(frozen=True)
class Segments:
    """What a call's segments make of recorded inputs: in FP64, as the equations round, and as drawn realisations.

    Rows [rows, N] of each place. ``moved``: what drawn realisations differ by from the equations' where both read
    narrow inputs unrounded, as each makes them: a float32 result then has the noise of its inputs, too. ``open``: what
    is not a number where FP64 is one comes from a product that is not known. ``tied``: what the first ways make with
    what TF32 operands near a tie may make of it added; ``again``: what drawn realisations differ by where float32
    inputs are made once more; ``gpu``: whether one made them.
    """

    exact: Rows
    honest: dict[Name, Rows]
    drawn: tuple[Rows, ...]
    moved: tuple[Rows, ...] = ()
    open: bool = False
    tied: dict[Name, Rows] = field(default_factory=dict)
    again: tuple[Rows, ...] = ()
    gpu: bool = False

    def only(self, left: Collection[Place]) -> "Segments":
        """Return the same of some places, in memory of their own."""

        def of(rows: Rows) -> Rows:
            return {place: rows[place].copy() for place in left if place in rows}

        honest = {name: of(rows) for name, rows in self.honest.items()}
        return Segments(
            of(self.exact), honest, tuple(map(of, self.drawn)), tuple(map(of, self.moved)), self.open, gpu=self.gpu
        )


class Emulations:
    """A program's segments, compiled once: in FP64, as its equations round, and as drawn realisations.

    ``units``: how a TPU or a GPU makes products, None of a CPU; where a TPU's vector unit makes some, every way is
    tried with their terms rounded, too. ``opaque``: of the program that ``made`` leaves blank in part.
    """

    def __init__(
        self, made: Tagged, layers: Sequence[int] | None = None, units: Units | None = None, opaque: Opaque = KNOWN
    ) -> None:
        ways = HONEST | (NARROW if sums_narrow(made.jaxpr.jaxpr) else {})
        self.open = units is not None and units.leaves_open(made.jaxpr.jaxpr)
        tried, self.gpu = FIRST, units is not None and units.gpu
        if units is not None and units.gpu:
            ways, tried = _on_gpu(ways, units, units.otherwise(made.jaxpr.jaxpr))
        elif units is not None:
            tried = (*FIRST, INSIDE, UNSHARED)
            ways = {name: units.making(how) for name, how in {**ways, UNSHARED: Realisation("unshared")}.items()}
            if units.vector:
                ways |= {(TERMS, *name): replace(how, unit="vector") for name, how in ways.items()}
        self.first = {name for name in ways if _declared(name) in tried}
        # steps that are not recorded go on with what was made in them: nothing there cuts what has no FP64 meaning off
        self.opaque = opaque.segment if layers is None else opaque.whole
        self.tapped, self.layers = Tapped(made, layers, self.opaque), layers
        self.states = {n for n, s in zip(numbered(made.states), made.states, strict=True) if s.stacked}
        with jax.enable_x64(True):
            self.exact = jax.jit(exactly(made.call, steps=layers), compiler_options=effort(made))
            self.honest = {name: Remade(self.tapped, how) for name, how in ways.items()}
            draws = [replace(how, sums="shuffled") for how in DRAWS] if self.gpu else DRAWS  # as its threads come
            self.drawn = [Remade(self.tapped, how) for how in draws]
            mine = ways.items() if self.gpu else ()
            self.tied = {n: Remade(self.tapped, replace(how, ties=True)) for n, how in mine if n in self.first}
            twice = self.drawn if self.gpu else ()
            self.apart = {way: Remade(self.tapped, replace(way.how, apart=True)) for way in twice}
            first = [how for name, how in ways.items() if name in self.first]
            self.together = jax.jit(once(self.tapped, [*draws, *first]), compiler_options=effort(made))

    def records(
        self, opened: Opened, case: str, call: int, taps: dict[str, Array], args: tuple[Any, ...]
    ) -> list[ErrorRecord]:
        """Return a call's local records, one for every point and step of its scans.

        What does not close as most segments do is tried in every honest way, with its inputs as they were before they
        were rounded, too; what still does not, with some inputs so and others as recorded, and then with the noise that
        these have before they are rounded.
        """
        every = [(p, layer) for p, layer in places(opened.record) if p.primitive != CARRIED]
        blank = [(p, layer, self.opaque.get(self.tapped.names.get(p.name, p.name))) for p, layer in every]
        unknown = [_unknown(opened, case, call, p, at, taps, why) for p, at, why in blank if why is not None]
        every = [(p, layer) for p, layer, why in blank if why is None]
        return [*unknown, *self._known(opened, case, call, taps, args, every)]

    def _known(
        self, opened: Opened, case: str, call: int, taps: dict[str, Array], args: tuple[Any, ...],
        every: Sequence[tuple[ProgramPoint, int | None]],
    ) -> list[ErrorRecord]:  # fmt: skip
        """Return the records of places whose segments have an FP64 meaning."""
        taps = self._steps(taps)
        try:
            with one_blas_thread(), jax.enable_x64(True):
                points = {p.name: p for p, _ in every}

                def rows(place: Place, values: Array) -> Array:
                    return step_of(opened.record, points[place[0]], place[1])(values)

                made = self._made(taps, args, [(p.name, layer) for p, layer in every], rows)
                found = _each(opened, case, call, taps, made, every)
                made = made.only(_left(found))

                def again(some: Collection[Place] | None = None) -> None:
                    open_ = [i for i, e in enumerate(found) if not closes(e) and (some is None or _place(e) in some)]
                    new = _each(opened, case, call, taps, made, [every[i] for i in open_])
                    for i, e in zip(open_, new, strict=True):
                        found[i] = e

                more = Unrounded(self.tapped, self.honest, self.first, taps, args, rows)

                def tried(some: Collection[Place] | None = None) -> None:
                    nonlocal made
                    for others in (more.all_inputs, more.other_ways, more.some_inputs):
                        if mine := [place for place in _left(found) if some is None or place in some]:
                            made = replace(made, honest=made.honest | others(_by_point(mine)))
                            again(some)

                # the layers of a scan are one compiled body: what closes one of them is tried of the others first
                several = {p: layers for p, layers in _by_point(_left(found)).items() if len(layers) > 1}
                if several and not self.tapped.small:
                    tried({(p, layers[0]) for p, layers in several.items()})
                    for e in list(found):
                        if e.elided and e.layer in several.get(e.point, ())[:1] and closes(e):
                            name, rest = e.elided[EQUATIONS], {e.point: several[e.point][1:]}
                            if name not in self.first:
                                made = replace(made, honest=made.honest | {name: more.made_as(name, rest)})
                                again({(e.point, layer) for layer in rest[e.point]})
                tried()
                if left := _left(found):
                    made = replace(made, moved=more.moved(self.drawn, _by_point(left), made.honest[(INPUTS,)]))
                    again()
                if self.gpu and (left := _left(found)):
                    made = replace(made, again=more.again(self.apart, _by_point(left)))
                    again()
                if self.gpu and (left := _left(found)):
                    made = replace(made, tied=more.tied(self.tied, _by_point(left)))
                    again()
                return found
        except (CannotLift, NotImplementedError) as error:
            return [record_of(opened, case, call, p, layer, unknown=refusal(error)) for p, layer in every]

    def _made(
        self, taps: dict[str, Array], args: tuple[Any, ...], every: Sequence[Place],
        rows: Callable[[Place, Array], Array],
    ) -> Segments:  # fmt: skip
        """Return all segments in FP64, as drawn realisations, and in the first ways."""

        def of(values: dict[str, Any]) -> Rows:
            host = {name: np.asarray(x) for name, x in values.items()}
            return {place: rows(place, host[place[0]]) for place in every if place[0] in host}

        names = [name for name in self.honest if name in self.first]
        if self.tapped.small:
            ways = [*self.drawn, *(self.honest[name] for name in names)]
            exact, *rounded = of(self.exact(taps, *args)), *(of(way.rounded(taps, args)) for way in ways)
        else:
            exact, *rounded = map(of, self.together(taps, *args))
        n = len(self.drawn)
        return Segments(
            exact, dict(zip(names, rounded[n:], strict=True)), tuple(rounded[:n]), open=self.open, gpu=self.gpu
        )

    def _steps(self, taps: dict[str, Array]) -> dict[str, Array]:
        """Return a call's taps; what loops decided, which is recorded at every step, at those steps that points are."""
        if self.layers is None:
            return taps
        return {n: x[[i for i in self.layers if i < len(x)]] if n in self.states else x for n, x in taps.items()}


def _on_gpu(ways: Ways, units: Units, otherwise: Sequence[Way]) -> tuple[Ways, tuple[tuple[str, ...], ...]]:
    """Return ways as a GPU has them, and which are tried first; those products that are left open in every way."""
    made = {name: units.making(how) for name, how in ways.items()}
    if not otherwise:
        return made, FIRST
    forms = {(): otherwise[0]} | {(OPEN_PRODUCTS[way],): way for way in otherwise[1:]}
    every = {(*form, *name): replace(how, otherwise=way) for form, way in forms.items() for name, how in made.items()}
    return every, (*FIRST, *((*form, *name) for form in forms if form for name in FIRST))


def _declared(name: tuple[str, ...]) -> tuple[str, ...]:
    """Return a way's name without how products are made."""
    return name[1:] if name[:1] == (TERMS,) else name


def _each(
    opened: Opened, case: str, call: int, taps: dict[str, Array], made: Segments,
    some: Sequence[tuple[ProgramPoint, int | None]],
) -> list[ErrorRecord]:  # fmt: skip
    """Return the records of some places of a call, made by as many threads as there are cores."""
    elements = sum(prod(p.shape) for p, _ in some)
    return each(_record, [(opened, case, call, p, layer, taps, made) for p, layer in some], elements)


def closes(e: ErrorRecord) -> bool:
    """Whether a local record has numbers within every limit, or none that another emulation would give."""
    checks = list(local_checks(e, default_limits().local(e.dtype)))
    return e.unexplained is None or all(found <= limit for _, _, found, limit, _ in checks)


def _unknown(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None, taps: dict[str, Array], why: str
) -> ErrorRecord:
    """Return the record of a point that has no reference; a NaN needs none (an infinity may be a mask's)."""
    whole = taps.get(p.name)
    if lacks := lacks_of(opened.record, p, layer, whole, taps):
        return record_of(opened, case, call, p, layer, **lacks)
    assert whole is not None
    values = step_of(opened.record, p, layer)(whole)
    bad = int(np.isnan(widen(values)).sum())
    return record_of(opened, case, call, p, layer, unknown=why, dtype=p.dtype, n=values.size, nonfinite=bad)


def _place(e: ErrorRecord) -> Place:
    return e.point, e.layer


def _left(found: Sequence[ErrorRecord]) -> list[Place]:
    """Return the places of records that do not close."""
    return [_place(e) for e in found if not closes(e)]


def _by_point(left: Sequence[Place]) -> dict[str, list[int | None]]:
    """Return the layers of every point."""
    found: dict[str, list[int | None]] = {}
    for point, layer in left:
        found.setdefault(point, []).append(layer)
    return found


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
    return lambda x: cut(run, p, layer, x).reshape(-1, p.shape[-1] if p.shape else 1)


def record_of(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None,
    kind: Literal["local", "forward", "formula"] = "local", **numbers: Any,
) -> ErrorRecord:  # fmt: skip
    """Return a record of a place of a program's run."""
    return ErrorRecord(
        prompt=case, phase=PROGRAM_CALL, step=call, layer=layer, point=p.name, kind=kind, candidate=opened.record.id,
        reference="fp64", **numbers,
    )  # fmt: skip


def _record(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None, taps: dict[str, Array], made: Segments
) -> ErrorRecord:
    whole = taps.get(p.name)
    if lacks := lacks_of(opened.record, p, layer, whole, taps):
        return record_of(opened, case, call, p, layer, **lacks)
    assert whole is not None
    place = p.name, layer
    if place not in made.exact:
        return record_of(opened, case, call, p, layer, unknown="no segment ends in it")
    exact = made.exact[place]
    honest = {name: restored(rows[place], p.dtype) for name, rows in made.honest.items() if place in rows}
    drawn = [restored(rows[place], p.dtype) for rows in made.drawn]
    moved = [rows[place] for rows in made.moved if place in rows]
    if made.open and np.isnan(honest[()][np.isfinite(exact)]).any():
        return record_of(opened, case, call, p, layer, unknown=OPEN)
    tied = {name: rows[place] for name, rows in made.tied.items() if place in rows}
    again = [rows[place] for rows in made.again if place in rows]
    numbers = _numbers(step_of(opened.record, p, layer)(whole), exact, honest, drawn, moved, tied, again, made.gpu)
    return record_of(opened, case, call, p, layer, **numbers)


def _numbers(
    stored: Array, exact: Array, honest: dict[tuple[str, ...], Array], drawn: list[Array], moved: Sequence[Array] = (),
    tied: Mapping[Name, Array] | None = None, again: Sequence[Array] = (), on_gpu: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return a local record's fields; arrays [rows, N]: what leads is rows, since axes are not known."""
    rows, dtype = np.arange(len(stored)), stored.dtype.name
    candidate, reference = canonical(stored, "TD"), canonical(exact, "TD")
    emulations = {name: canonical(y, "TD") for name, y in honest.items()}
    members = [canonical(y, "TD") for y in drawn]
    wide = dtype in ("float32", "float64")
    if not wide:
        # limits are of an ensemble without this way: as near to others as it is, it would make the noise smaller
        members = [*(y for name, y in emulations.items() if not set(UNSHARED) & set(name)), *members]
    u = FORMATS[dtype].unit_roundoff
    clean = finite(candidate)
    best = min(emulations, key=lambda name: norm(clean - finite(emulations[name])))
    around: Array | None = reference
    if wide and moved and {INPUTS, SOME} & set(best):
        members, around = [canonical(y, "TD") for y in moved], None
    shown = finite(reference)
    noise = Noise.pooled(members, shown, u, RECIPROCAL if wide else 0.0, around=around)
    # |A||B| of a segment is not known: where a result cancels, its row's size stands for that of its terms
    floor = noise.relative * np.sqrt(np.mean(shown**2, axis=2, keepdims=True))
    allowed = half_ulp(reference, dtype) + np.sqrt(noise.power + floor**2)
    # likewise the result's own size for what float32 may be off a tie by: no more than the terms of its sums
    ties = None if wide else TIES * SINGLE * np.abs(reference)
    yard = Yardstick("TD", dtype, rows, candidate, reference, noise, allowed, sums=ties)
    if on_gpu and (OWN_SUMS,) in emulations:  # in which order its threads add is not known
        one = np.abs(emulations[OWN_SUMS,] - emulations[()])
        every = np.maximum(one, ratio(norm(finite(one)), norm(shown)) * np.abs(reference))
        yard = yard.doubting(every, ORDERS, np.zeros(()))
    for change in again:  # each of several draws
        yard = yard.doubting(canonical(change, "TD"), len(DRAWS) ** -0.5, np.zeros(()))
    if tied and best in tied:
        yard = yard.doubting(canonical(tied[best], "TD"), 1.0, emulations[best])
    residue = yard.residue(emulations[best])
    found = sizes(stored, reference, "TD", rows)
    for name, scope in residue.scopes.items():
        found["scopes"].setdefault(name, {}).update(scope)
    error = norm(finite(candidate - reference))
    share = explained(clean, norm(clean - shown), emulations[best])
    found |= {
        "explained": {EQUATIONS: number(share)}, "unexplained": residue.unexplained, "slices": residue.slices,
        "ratio": number(ratio(error, norm(emulations[best] - shown))),
    }  # fmt: skip
    return found | ({"elided": {EQUATIONS: best}} if best else {})

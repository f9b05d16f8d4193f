"""Local errors of a program's run: each segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import jax
import numpy as np

from precaudit.arrays import Array, widen
from precaudit.formats import FORMATS
from precaudit.limits import default_limits
from precaudit.limits.checks import local_checks
from precaudit.metrics.residue import Noise
from precaudit.metrics.sizes import canonical, explained, half_ulp, norm, ratio, sizes
from precaudit.numpy_decoder.ensemble import RECIPROCAL
from precaudit.records import PROGRAM_CALL, ErrorRecord, number
from precaudit.references.closing import Yardstick
from precaudit.references.traced.forward import effort
from precaudit.references.traced.units import Units
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
from precaudit.transforms import CannotLift
from precaudit.transforms.emulate import Realisation, emulated, exactly, sums_narrow
from precaudit.transforms.sites import numbered
from precaudit.transforms.tag import Tagged

# How the equations may round, the best kept; and realisations more, of which noise is made.
INSIDE = ("results inside",)
CONVERTED = ("results converted to a wider format",)
INPUTS, SOME = "inputs", "some inputs"  # read as they were before they were rounded
# What is tried of every segment; the others of those that these leave open.
FIRST: tuple[tuple[str, ...], ...] = ((), CONVERTED)
HONEST = {
    (): Realisation(),
    CONVERTED: Realisation("converted"),
    ("functions in one step",): Realisation("converted", expanded=False),
    INSIDE: Realisation("all"),
}
NARROW = {(OWN_SUMS,): Realisation(sums="own"), (OWN_SUMS, *CONVERTED): Realisation("converted", sums="own")}
# What a TPU's vector unit may do to products of narrow results, which the compiled program does not say.
TERMS = "products of rounded terms"
# Its arithmetic is float32 inside fusions, and what they hand on is stored
UNSHARED = ("results that few read",)
OPEN = "the compiled program does not say which unit makes a float32 product of this segment, or in how many passes"
DRAWS = (
    Realisation(seed=1, sums="single"),
    Realisation(seed=2, sums="reversed"),
    Realisation("converted", seed=3, sums="single"),
)


Made = dict[str, tuple[Any, Any]]  # what an emulation makes of each tap: rounded, and before
Ways = Mapping[tuple[str, ...], Callable[..., Made]]


@dataclass(frozen=True)
class Segments:
    """What a call's segments make of recorded inputs: in FP64, as the equations round, and as drawn realisations.

    ``moved``: what drawn realisations differ by from the equations' where both read narrow inputs unrounded, as each
    makes them: a float32 result then has the noise of its inputs, too. ``open``: what is not a number where FP64 is
    one comes from a product that is not known.
    """

    exact: dict[str, Array]
    honest: dict[tuple[str, ...], dict[str, Array]]
    drawn: tuple[dict[str, Array], ...]
    moved: tuple[dict[str, Array], ...] = ()
    open: bool = False


class Emulations:
    """A program's segments, compiled once: in FP64, as its equations round, and as drawn realisations.

    ``units``: how a TPU makes products, None of other devices; where its vector unit makes some, every way is tried
    with their terms rounded, too.
    """

    def __init__(self, made: Tagged, layers: Sequence[int] | None = None, units: Units | None = None) -> None:
        ways = HONEST | (NARROW if sums_narrow(made.jaxpr.jaxpr) else {})
        self.open = units is not None and units.leaves_open(made.jaxpr.jaxpr)
        if units is not None:
            ways = {name: units.making(how) for name, how in {**ways, UNSHARED: Realisation("unshared")}.items()}
            if units.vector:
                ways |= {(TERMS, *name): replace(how, unit="vector") for name, how in ways.items()}
        tried = FIRST if units is None else (*FIRST, INSIDE, UNSHARED)
        self.first = {name for name in ways if _declared(name) in tried}
        options = effort(made)
        self.layers, self.states = (
            layers,
            {n for n, s in zip(numbered(made.states), made.states, strict=True) if s.stacked},
        )
        with jax.enable_x64(True):
            self.exact = jax.jit(exactly(made.call, steps=layers), compiler_options=options)
            self.honest = {
                name: jax.jit(emulated(made.call, how, steps=layers), compiler_options=options)
                for name, how in ways.items()
            }
            self.drawn = [jax.jit(emulated(made.call, how, steps=layers), compiler_options=options) for how in DRAWS]

    def records(
        self, opened: Opened, case: str, call: int, taps: dict[str, Array], args: tuple[Any, ...]
    ) -> list[ErrorRecord]:
        """Return a call's local records, one for every point and step of its scans.

        What does not close as most segments do is tried in every honest way, with its inputs as they were before they
        were rounded, too; what still does not, with some inputs so and others as recorded, and then with the noise that
        these have before they are rounded.
        """
        every = [(p, layer) for p, layer in places(opened.record) if p.primitive != CARRIED]
        taps = self._steps(taps)
        try:
            with one_blas_thread(), jax.enable_x64(True):
                read = _lifted(taps)
                exact, drawn = _host(self.exact(read, *args)), tuple(_rounded(f(read, *args)) for f in self.drawn)
                first = {name: f(read, *args) for name, f in self.honest.items() if name in self.first}
                honest = {name: _rounded(made) for name, made in first.items()}
                made = Segments(exact, honest, drawn, open=self.open)
                found = _each(opened, case, call, taps, made, every)
                for more in (_unrounded, _others, _partly):
                    left = {e.point for e in found if not closes(e)}
                    if not left:
                        break
                    honest |= more(self.honest, first, taps, args, left)
                    self._again(found, opened, case, call, taps, made, every)
                moved = self._moved(honest, taps, args, {e.point for e in found if not closes(e)})
                self._again(found, opened, case, call, taps, replace(made, moved=moved), every)
                return found
        except (CannotLift, NotImplementedError) as error:
            return [record_of(opened, case, call, p, layer, unknown=str(error)) for p, layer in every]

    def _again(
        self, found: list[ErrorRecord], opened: Opened, case: str, call: int, taps: dict[str, Array], made: Segments,
        every: Sequence[tuple[ProgramPoint, int | None]],
    ) -> None:  # fmt: skip
        """Replace the records of a call that do not close by those of what is made by now."""
        open_ = [i for i, e in enumerate(found) if not closes(e)]
        for i, e in zip(open_, _each(opened, case, call, taps, made, [every[i] for i in open_]), strict=True):
            found[i] = e

    def _moved(
        self, honest: Mapping[tuple[str, ...], dict[str, Array]], taps: dict[str, Array], args: tuple[Any, ...],
        points: Collection[str],
    ) -> tuple[dict[str, Array], ...]:  # fmt: skip
        """Return Segments' ``moved`` of ``points``; nothing where they close."""
        found = []
        for f in self.drawn if points else ():
            read = _read_unrounded(f(_lifted(taps), *args), taps)
            made = _of(points, f(read, *args))
            found.append({name: x - honest[(INPUTS,)][name] for name, x in made.items()})
        return tuple(found)

    def _steps(self, taps: dict[str, Array]) -> dict[str, Array]:
        """Return a call's taps; what loops decided, which is recorded at every step, at those steps that points are."""
        if self.layers is None:
            return taps
        return {n: x[[i for i in self.layers if i < len(x)]] if n in self.states else x for n, x in taps.items()}


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


def _host(values: dict[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(x) for name, x in values.items()}


def _rounded(values: Made) -> dict[str, Array]:
    return {name: np.asarray(x) for name, (x, _) in values.items()}


def _unrounded(
    emulations: Ways, first: Mapping[tuple[str, ...], Made], taps: dict[str, Array], args: tuple[Any, ...],
    points: Collection[str],
) -> dict[tuple[str, ...], dict[str, Array]]:  # fmt: skip
    """Return what the first emulations make of ``points`` from narrow inputs as they were before they were rounded.

    A compiler that widens what it has just rounded hands the unrounded value on (docs/design.md §7, 2).
    """
    found = {}
    for name, made in first.items():
        found[(*name, INPUTS)] = _of(points, emulations[name](_read_unrounded(made, taps), *args))
    return found


def _lifted(taps: Mapping[str, Array]) -> dict[str, Array]:
    """Return recorded values, floats in FP64, so that an emulation is compiled once whichever of them it reads."""
    return {k: x if x.dtype.kind in "biu" else widen(x) for k, x in taps.items()}


def _read_unrounded(made: Made, taps: dict[str, Array]) -> dict[str, Array]:
    """Return recorded values, lifted, with the narrow ones as ``made`` has them before they are rounded."""
    narrow = {k for k, x in taps.items() if k in made and x.dtype.itemsize < 4}
    return {k: np.asarray(made[k][1]) if k in narrow else x for k, x in _lifted(taps).items()}


def _others(
    emulations: Ways, first: Mapping[tuple[str, ...], Made], taps: dict[str, Array], args: tuple[Any, ...],
    points: Collection[str],
) -> dict[tuple[str, ...], dict[str, Array]]:  # fmt: skip
    """Return what the other emulations make of ``points``."""
    read = _lifted(taps)
    return {name: _of(points, f(read, *args)) for name, f in emulations.items() if name not in first}


def _partly(
    emulations: Ways, first: Mapping[tuple[str, ...], Made], taps: dict[str, Array], args: tuple[Any, ...],
    points: Collection[str],
) -> dict[tuple[str, ...], dict[str, Array]]:  # fmt: skip
    """Return what each emulation makes of ``points`` with some narrow inputs read unrounded, the others as recorded.

    Which: those whose number has a bit set, or not set, so that of any two inputs either is read so without the other.
    """
    made, lifted = first[()], _lifted(taps)
    narrow = [k for k, x in taps.items() if k in made and x.dtype.itemsize < 4]
    found = {}
    for bit in range(max(len(narrow) - 1, 1).bit_length()):
        for value in (0, 1):
            some = {k for i, k in enumerate(narrow) if (i >> bit) & 1 == value}
            read = {k: np.asarray(made[k][1]) if k in some else x for k, x in lifted.items()}
            for name, emulation in emulations.items():
                found[(*name, SOME, f"{bit}.{value}")] = _of(points, emulation(read, *args))
    return found


def _of(points: Collection[str], made: Made) -> dict[str, Array]:
    return _rounded({name: made[name] for name in points if name in made})


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
    if p.name not in made.exact:
        return record_of(opened, case, call, p, layer, unknown="no segment ends in it")
    step = step_of(opened.record, p, layer)
    honest = {name: step(values[p.name]) for name, values in made.honest.items() if p.name in values}
    drawn = [step(values[p.name]) for values in made.drawn]
    moved = [step(values[p.name]) for values in made.moved if p.name in values]
    if made.open and np.isnan(honest[()][np.isfinite(step(made.exact[p.name]))]).any():
        return record_of(opened, case, call, p, layer, unknown=OPEN)
    numbers = _numbers(step(whole), step(made.exact[p.name]), honest, drawn, moved)
    return record_of(opened, case, call, p, layer, **numbers)


def _numbers(
    stored: Array, exact: Array, honest: dict[tuple[str, ...], Array], drawn: list[Array], moved: Sequence[Array] = ()
) -> dict[str, Any]:
    """Return a local record's fields; arrays [rows, N]: what leads is rows, since axes are not known."""
    rows, dtype = np.arange(len(stored)), stored.dtype.name
    candidate, reference = canonical(stored, "TD"), canonical(exact, "TD")
    emulations = {name: canonical(y, "TD") for name, y in honest.items()}
    members = [canonical(y, "TD") for y in drawn]
    wide = dtype in ("float32", "float64")
    if not wide:
        members = [*emulations.values(), *members]
    u = FORMATS[dtype].unit_roundoff
    clean = np.nan_to_num(candidate, nan=0.0, posinf=0.0, neginf=0.0)
    best = min(
        emulations, key=lambda name: norm(clean - np.nan_to_num(emulations[name], nan=0.0, posinf=0.0, neginf=0.0))
    )
    deviations = [y - reference for y in members]
    if wide and moved and {INPUTS, SOME} & set(best):
        deviations = [canonical(y, "TD") for y in moved]
    shown = np.where(np.isfinite(reference), reference, 0.0)
    noise = Noise.pooled(deviations, shown, u, RECIPROCAL if wide else 0.0)
    # |A||B| of a segment is not known: where a result cancels, its row's size stands for that of its terms
    floor = noise.relative * np.sqrt(np.mean(shown**2, axis=2, keepdims=True))
    allowed = half_ulp(reference, dtype) + np.hypot(np.sqrt(noise.power), floor)
    yard = Yardstick("TD", dtype, rows, candidate, reference, noise, allowed)
    residue = yard.residue(emulations[best])
    found = sizes(stored, reference, "TD", rows)
    for name, scope in residue.scopes.items():
        found["scopes"].setdefault(name, {}).update(scope)
    error = norm(np.where(np.isfinite(candidate - reference), candidate - reference, 0.0))
    share = explained(clean, norm(clean - shown), emulations[best])
    found |= {
        "explained": {EQUATIONS: number(share)}, "unexplained": residue.unexplained, "slices": residue.slices,
        "ratio": number(ratio(error, norm(emulations[best] - shown))),
    }  # fmt: skip
    return found | ({"elided": {EQUATIONS: best}} if best else {})

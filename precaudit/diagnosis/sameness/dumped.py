"""A program held against values that another framework wrote: which of its FP64 values each tensor is (JAX)."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from precaudit.diagnosis.sameness.compared import Named, with_named_output
from precaudit.diagnosis.sameness.observed import Observed, Site, observe
from precaudit.diagnosis.sameness.records import Parting, Sameness, TensorHeld, step_text
from precaudit.errors import CannotJudge
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.numbers.arrays import Array, widen
from precaudit.progress import Advance, silent
from precaudit.recording.dumps.reading import Dump, read_dump
from precaudit.recording.programs.program import OUTPUT, Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.references.alignment.axes import Fit, nearest_order
from precaudit.references.traced.forward import NotChained
from precaudit.schema.digits import digits
from precaudit.schema.records.base import json_number, value

# Relative distance of a tensor from FP64 that its format, sums in it over layers, and constants in float32 make of it.
NEAR = {"float64": 1e-6, "float32": 1e-4}
NARROW = 0.05
ALIKE = 0.5  # of values that have something in common
FAR = 1.3  # of values that have nothing in common about √2
MASKING = 1e9  # in size, and more: what masks a key
FEWEST = 8  # numbers of a tensor that tells anything: of fewer many values are near
MOST_TRIED = 64  # values of one size that an unknown tensor is held against


@dataclass(frozen=True)
class Candidate:
    """A value of a program: a point in a call and a step of its scans, or all calls or steps of it one after another.

    ``number``: in the order in which they are made.
    """

    number: int
    point: ProgramPoint
    call: int | None
    step: tuple[int, ...]
    value: Array
    size: float

    @property
    def name(self) -> str:
        """The point, and of which layer and call."""
        call = "" if self.call is None else f" in call {self.call}"
        return f"{self.point.name}{step_text(self.step)}{call}"


def held_against_dump(named: Named, opened: Opened, case: str, dump: Dump, label: str) -> Sameness:
    """Return whether a traced program makes, in FP64, the tensors of a dump: each found by values, in any layout."""
    programs = (named.name, label)

    def unknown(why: str) -> Sameness:
        return Sameness(programs=programs, case=case, answer="unknown", says=f"cannot be compared: {why}")

    try:
        seen = observe(opened, named.program, case)[named.entry]
    except (CannotLift, NotImplementedError, NotChained) as error:
        return unknown(f"FP64 does not come through: {str(error).splitlines()[0]}")
    every = list(candidates(seen))
    floats = [t for a in dump.arrays if (t := _held(a.name, a.load(), every)) is not None]
    records = tuple(t for t, _ in floats)
    if not floats:
        return unknown("the dump holds no array of floats")
    if all(prod(t.shape) < FEWEST for t in records):
        return unknown(f"every tensor of the dump has fewer than {FEWEST} numbers, near which many values are")
    if not any(t.off is not None and value(t.off) <= ALIKE and prod(t.shape) >= FEWEST for t in records):
        return unknown("no tensor of the dump is a value of the program: other weights, or another input")
    lost = [(t, c) for t, c in floats if not t.equal]
    outputs = [c for c in every if c.point.name.startswith(OUTPUT)]
    shown = [c for t, c in floats if t.equal and c is not None]
    if any(_is_value(c, o) for c, o in product(shown, outputs)):
        said = _same_says(records)
        return Sameness(programs=programs, case=case, answer="same", says=said, tensors=records)
    if not lost:
        none = unknown(f"its output is none of the {len(records)} tensors, which are values of the program in FP64")
        return msgspec.structs.replace(none, tensors=records)
    near = [c for t, c in lost if c is not None and t.off is not None]
    parting = () if not near else (_parting(named.name, seen, min(near, key=lambda c: c.number), floats),)
    says = f"are not one formula: {len(lost)} of {len(records)} tensors are no value of the program in FP64"
    return Sameness(programs=programs, case=case, answer="other", says=says, partings=parting, tensors=records)


def same_as_dump(
    named: Named, path: Path, cases: Sequence[str] | None = None, tell: Advance = silent
) -> tuple[Sameness, ...]:
    """Return whether a program makes the tensors of a dump, of one of its cases: by default the first.

    Raises UserError where the dump is not there, cannot be read, or the program has no such case.
    """
    dump = read_dump(path)
    named = with_named_output(named)
    asked = list(cases or list(named.program.cases)[:1])
    named = replace(named, program=named.program.some(asked))
    with tempfile.TemporaryDirectory() as folder:
        opened = trace_program(named.program, Path(folder) / "run", tell=tell)
        return tuple(held_against_dump(named, opened, case, dump, path.name) for case in asked)


def write_values(opened: Opened, program: Program, case: str, path: Path) -> None:
    """Write a case's FP64 values of every point, step and call of a program's first entry point, as .npz.

    Raises CannotJudge where FP64 does not come through.
    """
    try:
        seen = observe(opened, program, case)[program.entry]
    except (CannotLift, NotImplementedError, NotChained) as error:
        raise CannotJudge(f"FP64 does not come through: {str(error).splitlines()[0]}") from None
    calls, outputs = range(len(seen.exact)), opened.record.outputs
    sites = [*seen.sites(), *(Site(c, (), p, ()) for c in calls for p in outputs if p.name in seen.exact[c])]
    each = {_candidate(0, x.point, x.call, x.step, np.zeros(0)).name: seen.value(x) for x in sites}
    np.savez(path, **cast("dict[str, Any]", each))


def candidates(seen: Observed) -> Iterator[Candidate]:
    """Yield a program's values: of every point, step and call, and of each point all steps and all calls as one."""
    number = 0
    for site in seen.sites():
        yield _candidate(number, site.point, site.call if len(seen.exact) > 1 else None, site.step, seen.value(site))
        number += 1
    calls = range(len(seen.exact))
    for p in (*seen.points, *seen.of.opened.record.outputs):
        there = [c for c in calls if p.name in seen.exact[c]]
        whole = [seen.whole(Site(c, (), p, ()), None) for c in there]
        if p.stacked or p.name.startswith(OUTPUT):
            for c, x in zip(there, whole, strict=True):
                yield _candidate(number, p, c if len(calls) > 1 else None, (), x)
        if len(whole) > 1:
            for step in (*np.ndindex(*p.stacked), *([()] if p.stacked else [])):
                yield _candidate(number, p, None, step, np.stack([x[step] for x in whole]))
        number += 1


def _candidate(number: int, p: ProgramPoint, call: int | None, step: tuple[int, ...], x: Array) -> Candidate:
    x = _unmasked(np.asarray(x, np.float64))
    return Candidate(number, p, call, step, x, float(np.linalg.norm(x)))


def _is_value(one: Candidate, other: Candidate) -> bool:
    """Whether two values are one, as a point and the output that it is."""
    alike = one.value.size == other.value.size and abs(one.size - other.size) <= NEAR["float64"] * other.size
    return alike and _order(one.value, other.value).off <= NEAR["float64"]


def _unmasked(x: Array) -> Array:
    """Return values with 0 in place of what masks a key; what is no number stays so."""
    return np.where(np.abs(x) >= MASKING, 0.0, x)


def _held(name: str, x: Array, every: Sequence[Candidate]) -> tuple[TensorHeld, Candidate | None] | None:
    """Return which value of a program a tensor is, or the nearest of its size; None of one that has no floats."""
    if x.dtype.kind in "iubSUO" or not x.size:
        return None
    y, near = widen(x), NEAR.get(x.dtype.name, NARROW)
    masked = np.abs(y) >= MASKING
    if np.isnan(y).any() or masked.all():
        return TensorHeld(tensor=name, shape=x.shape, dtype=x.dtype.name, finite=bool(masked.all())), None
    y, size = np.where(masked, np.nan, y), float(np.linalg.norm(y[~masked]))
    alike = [c for c in every if c.value.size == y.size and not np.isnan(c.size)]
    if not masked.any():  # what is masked may not be so where the program shows it
        alike.sort(key=lambda c: (abs(c.size - size), c.number))
    best: tuple[float, Candidate, str] | None = None
    for c in alike[:MOST_TRIED]:
        if best is not None and best[0] <= near and abs(c.size - size) > near * size and not masked.any():
            break
        fit = _order(c.value, y)
        if best is None or (fit.off, c.number) < (best[0], best[1].number):
            best = fit.off, c, fit.axes
    if best is None or best[0] > FAR:
        return TensorHeld(tensor=name, shape=x.shape, dtype=x.dtype.name), None
    off, c, axes = best
    equal = off <= near
    return TensorHeld(
        tensor=name,
        shape=x.shape,
        dtype=x.dtype.name,
        value=c.name,
        source=c.point.source,
        axes=axes if equal else "",
        off=json_number(off),
        equal=equal,
    ), c


def _order(x: Array, y: Array) -> Fit:
    """Return how near a value comes to one of its size, of whose axes it may hold several, or the other way round."""
    if sum(n > 1 for n in x.shape) > sum(n > 1 for n in y.shape):
        return nearest_order(_unmasked(y), x, [f"a{i}" for i in range(x.ndim)])[0]
    return nearest_order(x, y, [f"a{i}" for i in range(y.ndim)])[0]


def _same_says(tensors: Sequence[TensorHeld]) -> str:
    known = [t for t in tensors if t.equal]
    worst = max(known, key=lambda t: value(t.off or 0.0))
    few = len(known) < len(tensors)
    which = f"{len(known)} of {len(tensors)} tensors are" if few else f"each of {len(known)} tensors is"
    rest = f"; the other {len(tensors) - len(known)} are values that it does not show" if few else ""
    widest = max((t.dtype for t in known), key=lambda dtype: NEAR.get(dtype, NARROW))
    limit = NEAR.get(widest, NARROW)
    told = "" if widest == "float64" else f" to {widest}'s precision, {digits(limit, 6)}"
    off = "" if worst.off is None else f", to {digits(worst.off, 2)}"
    return f"are one formula{told}: {which} a value of the program in FP64{off}{rest}"


def _parting(
    name: str, seen: Observed, first: Candidate, floats: Sequence[tuple[TensorHeld, Candidate | None]]
) -> Parting:
    """Return where a program leaves the dump: the first value that a tensor is nearest to and is not."""
    before = [c for t, c in floats if t.equal and c is not None and c.number < first.number]
    shown = {c.point.name for c in before}
    reads = seen.graph[0].get(first.point.name.partition("#")[0], ())
    return Parting(
        program=name,
        point=first.point.name,
        source=first.point.source,
        call=first.call or 0,
        step=first.step,
        at="",
        made_of=tuple(sorted(shown & set(reads))),
        layers=(),
        before=max(before, key=lambda c: c.number).name if before else "",
    )

"""Local errors of a program's run: each segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import msgspec
import numpy as np

from precaudit.interpreters.jaxpr.opaque import KNOWN, Opaque
from precaudit.interpreters.jaxpr.shadow import CannotLift, refusal
from precaudit.interpreters.jaxpr.sites import unique_names
from precaudit.interpreters.jaxpr.stepped import ScanStep
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array
from precaudit.numbers.threads import each, one_blas_thread
from precaudit.recording.runs.program_places import index_of, recomputed_places
from precaudit.recording.runs.programs import Opened
from precaudit.references.traced.compiled import CompiledSegments, realisations
from precaudit.references.traced.judged import At, JudgedCall, Recomputed, unknown
from precaudit.references.traced.origins import Origins
from precaudit.references.traced.remade import Tapped
from precaudit.references.traced.search import Closing
from precaudit.references.traced.units import Units
from precaudit.references.traced.unrounded import Place
from precaudit.schema.limits.checks import is_far_off
from precaudit.schema.records.errors import LocalError

Begin = Callable[[], Callable[[], list[Recomputed]]]  # begins what places make, and returns what judges them


class Emulations:
    """A program's segments, compiled once: of large scans those of one step, and of all else the program's.

    ``layers``: the steps of outermost scans that are recorded. ``units``: how the device makes products, None: as they
    declare. ``opaque``: of the program that ``made`` leaves blank in part. ``flush``: whether the device makes 0 of
    subnormals. ``accum``: formats that sums of products are made in, too, each for itself.
    """

    def __init__(
        self,
        made: Tagged,
        layers: Sequence[int] | None = None,
        units: Units | None = None,
        opaque: Opaque = KNOWN,
        flush: bool = False,
        accum: Sequence[str] = (),
    ) -> None:
        # steps that are not recorded go on with what was made in them: nothing there cuts what has no FP64 meaning off
        self.opaque = opaque.segment if layers is None else opaque.whole
        self.tapped, self.layers = Tapped(made, layers, self.opaque), layers
        self.states = {n for n, s in zip(unique_names(made.states), made.states, strict=True) if s.stacked}
        self.how = realisations(made.jaxpr.jaxpr, units, flush)
        self.accum = accum
        self.whole, self.origins = CompiledSegments(self.tapped, self.how, accum), Origins(self.tapped)
        self._steps: list[tuple[ScanStep, CompiledSegments]] | None = None

    def records(
        self,
        opened: Opened,
        case: str,
        call: int,
        taps: dict[str, Array],
        args: tuple[Any, ...],
        some: Collection[Place] | None = None,
    ) -> list[Recomputed]:
        """Return a call's local records, one for every point and step of its scans, and its accum records.

        ``some``: of these places alone.
        """
        places = recomputed_places(opened.record)
        every = [(p, layer) for p, layer in places if some is None or (p.name, layer) in some]
        blank = [(p, layer, self.opaque.get(self.tapped.names.get(p.name, p.name))) for p, layer in every]
        here = JudgedCall(opened, case, call, taps)
        unmeant = [unknown(here, p, layer, why) for p, layer, why in blank if why is not None]
        known = [(p, layer) for p, layer, why in blank if why is None]
        try:
            with one_blas_thread(), jax.enable_x64(True):
                decided = replace(here, taps=self._of_point_steps(taps))
                return [*unmeant, *self._arising(decided, args, self._known_records(decided, args, known))]
        except (CannotLift, NotImplementedError) as error:
            return [*unmeant, *(here.record(p, layer, unknown=refusal(error)) for p, layer in known)]

    def _known_records(self, call: JudgedCall, args: tuple[Any, ...], every: Sequence[At]) -> list[Recomputed]:
        """Return the records of places whose segments have an FP64 meaning."""
        points = {p.name: p for p, _ in every}

        def cut(place: Place, values: Array) -> Array:
            return call.rows(points[place[0]], place[1])(values)

        steps = [(step, made) for step, made in self._compiled_steps(args) if step.has_all_taps(call.taps)]
        inside = {name for step, _ in steps for name in step.names}
        rest = [(p, layer) for p, layer in every if p.name not in inside]
        scans = [_of_steps(step, made, call, args, every) for step, made in steps]
        whole = [partial(self.whole.start, call, rest, call.taps, args, cut)] if rest else []
        made = each(_one_ahead, [(begin,) for begin in (whole, *scans) if begin])
        found: dict[tuple[str, int | None], list[Recomputed]] = {}
        for e in (e for records in made for e in records):
            found.setdefault((e.point, e.layer), []).append(e)
        return [e for p, layer in every for e in found[p.name, layer]]

    def _arising(self, call: JudgedCall, args: tuple[Any, ...], records: list[Recomputed]) -> list[Recomputed]:
        """Return records, those that are not finite with the operation that makes them so, where it can be told.

        Those that are finite, and far off, with an overflow that they are made of.
        """
        points = {p.name: p for p in call.opened.record.points}
        origins = self.origins.on(call.taps, args)

        def with_origin(e: Recomputed) -> Recomputed:
            if not isinstance(e, LocalError) or not (e.nonfinite or is_far_off(e)):
                return e
            p = points[e.point]
            find = origins.of if e.nonfinite else origins.hidden_overflow
            origin = find(p, index_of(call.opened.record, p, e.layer))
            if origin is None:
                return e
            return msgspec.structs.replace(e, origin=origin.text, fp64_too=origin.fp64_too)

        try:
            return [with_origin(e) for e in records]
        except (CannotLift, NotImplementedError):
            return records

    def _compiled_steps(self, args: tuple[Any, ...]) -> list[tuple[ScanStep, CompiledSegments]]:
        if self._steps is None:
            self._steps = [
                (step, CompiledSegments(tapped, self.how, self.accum))
                for step, tapped in self.tapped.scans_by_step(args)
            ]
        return self._steps

    def _of_point_steps(self, taps: dict[str, Array]) -> dict[str, Array]:
        """Return a call's taps; what loops decided, which is recorded at every step, at those steps that points are."""
        if self.layers is None:
            return taps
        return {n: x[[i for i in self.layers if i < len(x)]] if n in self.states else x for n, x in taps.items()}


def _of_steps(
    step: ScanStep, made: CompiledSegments, call: JudgedCall, args: tuple[Any, ...], every: Sequence[At]
) -> list[Begin]:
    """Return what begins each step of a scan."""
    closing: Closing = {}
    begin: list[Begin] = []
    for index in range(step.length):
        mine = [(p, layer) for p, layer in every if layer == index and p.name in step.names]
        given = step.values(call.taps, index), (np.int32(index), *args)
        begin += [partial(made.start, call, mine, *given, _rows, closing)] if mine else []
    return begin


def _one_ahead(begin: Sequence[Begin]) -> list[Recomputed]:
    """Return records; JAX makes the segments of the next places while some are judged."""
    found: list[Recomputed] = []
    with jax.enable_x64(True):
        ahead = begin[0]()
        for following in begin[1:]:
            now, ahead = ahead, following()
            found += now()
        return found + ahead()


def _rows(_place: Place, values: Array) -> Array:
    """Return the rows [rows, N] of a place whose point is made in one step of its scan."""
    return values.reshape(-1, values.shape[-1] if values.ndim else 1)

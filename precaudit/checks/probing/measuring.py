"""The products of one shape: their errors, what they were made of, seconds and bytes, as records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np

from precaudit.checks.probing.emulations import ScoreEmulation, emulations, name_emulation, named_integers
from precaudit.checks.probing.predicted import predict
from precaudit.checks.probing.shapes import ScoreShape, operands
from precaudit.checks.probing.timing import quartiles, time_in_rounds
from precaudit.checks.probing.ways import REFUSALS, ProductWay, first_line, product_ways
from precaudit.interpreters.tpu.target import Target, libtpu_version
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.progress import Advance
from precaudit.schema.metrics.sizes import sizes
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import Worst
from precaudit.schema.records.probe import ProbeRecord

ENOUGH = 1 << 16  # scores that say what they were made of; the errors are those of all
OF_FLOATS = ("max_ulp", "bits_lost")
LEFT_OUT = ("scopes", "dtype")


def point(way: str, target: Target | None) -> str:
    """Return the point of a record: the way, and the target it is predicted for."""
    return way if target is None else f"{way} on {target.name}"


def measure_shape(
    shape: ScoreShape, forms: Sequence[str], device: jax.Device, target: Target | None, timed: bool, advance: Advance
) -> list[ProbeRecord]:
    """Return the records of a shape: the device's, timed against each other, then the target's."""
    made: list[ProbeRecord] = []
    predicted: list[ProbeRecord] = []
    calls: dict[int, Callable[[], Any]] = {}
    for i, form in enumerate(forms):
        advance(i, len(forms) + 1, f"{shape.text} {form}")
        given = _Given.of(shape, form)
        held = [jax.device_put(x, device) for x in (given.q, given.k)]
        for way in product_ways(form):
            record, call = _run(given, way, device, held)
            if call is not None:
                calls[len(made)] = call
            made.append(record)
            if target is not None:
                predicted.append(_predict(given, way, target))
    if timed and calls:
        advance(len(forms), len(forms) + 1, f"{shape.text} timing")
        made = _time(made, calls)
    return [*made, *predicted]


@dataclass(frozen=True)
class _Given:
    """Operands of a format, the exact scores, and what a part of the scores may be made of.

    ``known``: what was said of scores before, by their bits: many ways make the same.
    """

    shape: ScoreShape
    q: Array
    k: Array
    exact: Array
    among: list[ScoreEmulation]
    part: tuple[slice, ...]
    known: dict[Any, Any]

    @classmethod
    def of(cls, shape: ScoreShape, form: str) -> "_Given":
        q, k = operands(shape, form)
        keys = min(shape.keys, ENOUGH)
        queries = min(shape.queries, max(1, ENOUGH // keys))
        heads = min(shape.heads, max(1, ENOUGH // (keys * queries)))
        rows = (slice(1), slice(heads), slice(queries))
        exact = np.matmul(widen(q), widen(k).swapaxes(-1, -2))
        among = [] if form == "int8" else emulations(q[rows], k[:1, :heads, :keys])
        return cls(shape, q, k, exact, among, (*rows, slice(keys)), {})

    def name_scores(self, scores: Array, asked: str | None) -> tuple[tuple[str, ...], str | None]:
        """Return what scores were made of, and whether that is what was asked for."""
        part = scores[self.part]
        key = (part.dtype.name, part.tobytes(), asked)
        if key not in self.known:
            form = part.dtype.name
            integers = form not in FORMATS
            exact = self.exact[self.part]
            self.known[key] = (
                named_integers(part, exact, asked) if integers else name_emulation(part, form, self.among, asked)
            )
        found: tuple[tuple[str, ...], str | None] = self.known[key]
        return found

    def record(self, way: ProductWay, candidate: str, target: Target | None, **more: Any) -> ProbeRecord:
        """Return a record of these operands."""
        version = f"jax {jax.__version__}" if target is None else f"libtpu {libtpu_version()}"
        return ProbeRecord(
            shape=self.shape.text,
            operands=self.q.dtype.name,
            way=way.name,
            candidate=candidate,
            version=version,
            asked=way.asked,
            target=target.name if target else None,
            **more,
        )

    def numbers(self, scores: Array, asked: str | None) -> dict[str, Any]:
        """Return the sizes of the error of scores [B, H, Q, S], what they were made of and whether that was asked."""
        made, honoured = self.name_scores(scores, asked)
        floats = scores.dtype.name in FORMATS
        stored = scores if floats else scores.astype(np.float64)
        rows = (-1, scores.shape[-1])
        found = sizes(stored.reshape(rows), self.exact.reshape(-1, 1, rows[1]), "TD", range(stored[..., 0].size))
        kept = {name: x for name, x in found.items() if name not in LEFT_OUT and (floats or name not in OF_FLOATS)}
        if "worst" in kept:
            kept["worst"] = self._worst(kept["worst"])
        return {**kept, "dtype": scores.dtype.name, "made": made, "honoured": honoured}

    def _worst(self, found: Worst) -> Worst:
        at = np.unravel_index(
            np.ravel_multi_index(found.index, (self.exact[..., 0].size, self.exact.shape[-1])), self.exact.shape
        )
        return msgspec.structs.replace(found, index=tuple(int(i) for i in at))


def _run(
    given: _Given, way: ProductWay, device: jax.Device, held: Sequence[Any]
) -> tuple[ProbeRecord, Callable[[], Any] | None]:
    """Return the record of a way on a device and what makes the scores again; None where it is refused."""
    kind = str(device.device_kind)
    try:
        compiled = jax.jit(way.call).lower(*held).compile()
        scores = np.asarray(compiled(*held))
    except REFUSALS as error:
        return given.record(way, kind, None, unknown=f"refused: {first_line(error)}"), None
    found = given.record(way, kind, None, memory=_memory(compiled), **given.numbers(scores, way.asked))
    return found, lambda: compiled(*held)


def _memory(compiled: Any) -> tuple[int, int, int] | None:
    m = compiled.memory_analysis()
    if m is None:
        return None
    return m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes


def _predict(given: _Given, way: ProductWay, target: Target) -> ProbeRecord:
    p = predict(target, way, given.q, given.k)
    numbers = {} if p.scores is None else given.numbers(p.scores.reshape(given.exact.shape), way.asked)
    return given.record(
        way,
        f"tpu-predicted:{target.name}",
        target,
        memory=p.memory,
        unit=p.unit,
        passes=p.passes,
        unknown=p.unknown,
        **numbers,
    )


def _time(made: Sequence[ProbeRecord], calls: dict[int, Callable[[], Any]]) -> list[ProbeRecord]:
    """Return the records with seconds, and their ratio to the first that is taken, round by round."""
    seconds = time_in_rounds(list(calls.values()))
    found = list(made)
    for column, i in enumerate(calls):
        first = found[next(iter(calls))]
        mine = seconds[:, column]
        took, ratio = (tuple(map(json_number, quartiles(x))) for x in (mine, mine / seconds[:, 0]))
        found[i] = msgspec.structs.replace(made[i], seconds=took, time=ratio, first=f"{first.operands} {first.way}")
    return found

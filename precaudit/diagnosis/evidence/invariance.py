"""Does the same text give the same numbers run another way? Other batches, padding, buckets and programs (JAX)."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from precaudit.progress import Advance, silent
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.pairs import pair_errors
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ForwardError
from precaudit.schema.selection import Selection


class OtherRun(NamedTuple):
    """Another way to run the same prompts."""

    name: str
    batch: int = 1
    pad: str = "right"
    longer: int = 0
    unrolled: bool = False
    remat: bool = False


class Invariance(NamedTuple):
    """What a way changed, at the point that changed most; ``noises``: the distance over its honest noise.

    ``status``: bit-identical, rounding, broken, or unknown where there is no noise to judge by.
    """

    way: str
    status: str
    point: str
    layer: int | None
    distance: float
    noises: float


WAYS = (
    OtherRun("the same again"),
    OtherRun("batch 3, padded right", 3),
    OtherRun("batch 3, padded left", 3, "left"),
    OtherRun("a longer neighbour: another bucket and cache", 2, "right", 300),
    OtherRun("layers unrolled", unrolled=True),
    OtherRun("layers rematerialised", remat=True),
)


def invariance(
    recorded: Recorded, subject: Subject, errors: Sequence[ErrorRecord], tell: Advance = silent
) -> list[Invariance]:
    """Run the prompts of a run in every way and compare every recorded tensor with it, bit for bit and to noise.

    ``errors``: the run's forward records, whose ``noise`` is what the policy's rounding makes there. A distance up to
    the forward limit times that noise is rounding of another order; more is broken.
    """
    noise: dict[tuple[str, int | None, str], float] = defaultdict(float)
    for e in errors:
        if isinstance(e, ForwardError) and e.noise is not None:
            key = (e.phase, e.layer, e.point)
            noise[key] = max(noise[key], value(e.noise))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i, way in enumerate(WAYS):
            tell(i, len(WAYS), way.name)
            found.append(_one(recorded, subject, way, Path(folder) / str(i), noise))
    return found


def _one(recorded: Recorded, subject: Subject, way: OtherRun, folder: Path, noise: dict[Any, float]) -> Invariance:
    asked = recorded.requested
    prompts = [
        x
        for p in recorded.run.prompts.values()
        for x in (Prompt(id=p.id, tokens=p.tokens), *_neighbours(p.id, way, recorded))
    ]
    layers = ",".join(map(str, asked.layers))
    select = Selection.parse(layers, ",".join(asked.points), ",".join(asked.phases))
    options = TraceOptions(decode_steps=asked.decode_steps, batch=way.batch, pad=way.pad)
    policy = replace(subject.policy, layers="unrolled") if way.unrolled else subject.policy
    rewritten = replace(subject, policy=policy, remat=way.remat)
    run = trace(rewritten, folder, prompts, select, options)
    again = Recorded.of(run)
    worst = Invariance(way.name, "bit-identical", "", None, 0.0, 0.0)
    compared = 0
    for e in _distances(again, recorded):
        compared += 1
        if e.nonfinite or e.rel_l2 is None:
            status = "broken" if e.nonfinite and not _nonfinite(recorded, e) else "unknown"
            if worst.status != "broken":
                worst = Invariance(way.name, status, e.point, e.layer, float("nan"), float("nan"))
            continue
        distance = value(e.rel_l2)
        key = (e.phase, e.layer, e.point)
        if key not in noise and distance and worst.status != "broken":
            worst = Invariance(way.name, "unknown", e.point, e.layer, distance, float("nan"))
            continue
        size = noise.get(key, 0.0)
        noises = distance / size if size else (0.0 if distance == 0 else float("inf"))
        if worst.status != "unknown" and not noises <= worst.noises:
            status = "rounding" if noises <= default_limits().ratio.at(1) else "broken"
            worst = Invariance(way.name, status, e.point, e.layer, distance, noises)
    return worst if compared else Invariance(way.name, "unknown", "nothing", None, float("nan"), float("nan"))


def _neighbours(name: str, way: OtherRun, recorded: Recorded) -> list[Prompt]:
    """Return what else is in a prompt's batch: sequences of other lengths, one as long as the way asks for."""
    vocab, most = recorded.config.vocab, recorded.config.context - recorded.requested.decode_steps - 1
    lengths = [way.longer or 5, 11, 17][: way.batch - 1]
    tokens = [tuple(1 + i % min(200, vocab - 1) for i in range(min(n, most))) for n in lengths]
    return [Prompt(id=f"{name}-neighbour{i}", tokens=t) for i, t in enumerate(tokens)]


def _nonfinite(recorded: Recorded, e: ErrorRecord) -> bool:
    """Whether the run itself holds NaN or infinities there."""
    held = recorded.index.get(Place.of(e))
    return held is not None and bool(held.stats.nan + held.stats.inf)


def _distances(again: Recorded, recorded: Recorded) -> Iterator[ErrorRecord]:
    """Yield pair records of all that both hold; tokens that came out otherwise end a comparison."""
    for prompt in recorded.run.prompts:
        for phase in recorded.requested.phases:
            for point in recorded.requested.points:
                if not POINTS[point].state:
                    for layer in recorded.requested.layers if POINTS[point].per_layer else (None,):
                        records = pair_errors(again, recorded, Place(prompt, phase, 0, layer, point))
                        yield from records

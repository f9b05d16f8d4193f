"""Does a mesh change more than rounding? A run's tokens on other meshes, and each point against the run's (JAX)."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from precaudit.diagnosis.evidence.across import (
    BROKEN,
    EQUAL,
    ROUNDING,
    UNKNOWN,
    WORST,
    AcrossMeshes,
    PartedSum,
    PointAcross,
)
from precaudit.errors import UserError
from precaudit.judging.rules import judge
from precaudit.progress import Advance, silent
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.comparison.pairs import agreeing, pair_error, side_of
from precaudit.schema.digits import count_text
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import default_limits
from precaudit.schema.meshes import ONE, MeshShape, recorded_mesh
from precaudit.schema.places import Place
from precaudit.schema.policies import DevicePolicy, recorded_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ForwardError
from precaudit.schema.selection import PHASES, Selection

JUDGED = ("local", "state", "sums")  # kinds of records that place a fault at an operation
SubjectOn = Callable[[MeshShape], Subject]
Known = dict[tuple[str, ...], list[ErrorRecord]]
Size = tuple[str, int | None, str]


def other_meshes(own: MeshShape, given: MeshShape | None) -> tuple[MeshShape, ...]:
    """Return the meshes that a run is held against: one device, each axis alone, and the mesh. Raises UserError."""
    mesh = given or own
    if mesh == ONE:
        raise UserError("--invariance sharding: the run is of one device; give --mesh, such as --mesh data=2,model=2")
    every = dict.fromkeys((ONE, MeshShape(data=mesh.data), MeshShape(model=mesh.model), mesh))
    return tuple(m for m in every if m != ONE or own != ONE)


def across_meshes(
    recorded: Recorded,
    errors: Sequence[ErrorRecord],
    meshes: Sequence[MeshShape],
    subject_on: SubjectOn,
    options: CompareOptions,
    tell: Advance = silent,
) -> list[AcrossMeshes]:
    """Run the tokens of a run on every mesh and hold each point against the run's: bits, rounding, or broken.

    ``errors``: the run's records. A point is broken where it is farther off than the forward limit times the noise of
    either, or where the local errors of one of both fail and those of the other do not.
    """
    found: list[AcrossMeshes] = []
    known: Known = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, mesh in enumerate(meshes):
            tell(i, len(meshes), f"mesh {mesh}")
            again = _traced(recorded, subject_on(mesh), Path(folder) / str(i))
            found.append(_held(recorded, errors, again, mesh, options, known))
    return found


def _traced(recorded: Recorded, subject: Subject, folder: Path) -> Recorded:
    """Run a run's prompts and the tokens that were fed after them on another mesh."""
    asked, prompts = recorded.requested, recorded.run.prompts
    points = ",".join((*asked.points, *(["logits:all"] if asked.every_logit else [])))
    select = Selection.parse(",".join(map(str, asked.layers)), points, ",".join(asked.phases), asked.positions)
    fed = {name: recorded.fed_tokens(name)[len(p.tokens) :] for name, p in prompts.items()}
    options = TraceOptions(
        asked.decode_steps,
        asked.batch if asked.batch % subject.mesh.data == 0 else None,
        asked.pad,
        forced=fed if asked.decode_steps else None,
    )
    same = [Prompt(id=name, tokens=p.tokens) for name, p in prompts.items()]
    return Recorded.of(trace(subject, folder, same, select, options))


def _held(
    recorded: Recorded,
    errors: Sequence[ErrorRecord],
    again: Recorded,
    mesh: MeshShape,
    options: CompareOptions,
    known: Known,
) -> AcrossMeshes:
    """Hold a run on a mesh against the run; ``known``: records of runs by their tensors' hashes, more are added."""
    both = [p for p in recorded.index if not POINTS[p.point].state]
    other = [p for p in both if p not in again.index or recorded.index[p].hash != again.index[p].hash]
    first = min(other, key=_order, default=None)
    held = tuple(x.hash for x in again.index.values())
    if other and held not in known:
        known[held] = list(compare(again.run, options=options).errors)
    made = known[held] if other else []
    told = {Place.of(e) for e in errors if e.kind in JUDGED}  # the run may be compared in part
    noise = _noise((*errors, *made))
    faults = _unlike(_faults(errors), _faults([e for e in made if Place.of(e) in told])) if other else {}
    every: dict[str, list[Place]] = defaultdict(list)
    for place in both:
        every[place.point].append(place)
    points = [
        _point(recorded, again, PointAcross(point, EQUAL, len(every[point])), other, noise, point in faults)
        for point in POINTS
        if point in every and point in recorded.requested.points  # what supports these has no noise
    ]
    sums = [] if first is None else [list(_sums(of, first)) for of in (again, recorded)]
    own = (s for i, some in enumerate(sums) for s in some if s not in sums[1 - i])
    fails = min(faults.values(), key=_order, default=None)
    return AcrossMeshes(mesh, tuple(points), first, tuple(own), fails)


def _order(p: Place) -> tuple[int, int, tuple[int, int]]:
    return (PHASES.index(p.phase), p.step, p.order)


def _unlike(one: dict[str, Place], other: dict[str, Place]) -> dict[str, Place]:
    """Return the points that one of both has and the other has not."""
    return {point: place for point, place in (one | other).items() if (point in one) != (point in other)}


def _point(
    recorded: Recorded,
    again: Recorded,
    equal: PointAcross,
    different: Sequence[Place],
    noise: dict[Size, float],
    faulty: bool,
) -> PointAcross:
    """Return the worst of a point's tensors; ``equal``: where all of them are, ``different``: tensors of any point."""
    other = [p for p in different if p.point == equal.point]
    worst = equal = replace(equal, differing=len(other))
    mine, theirs = side_of(again), side_of(recorded)
    for place in other:
        e = pair_error(mine, theirs, place, agreeing(mine, theirs, place.prompt))
        status, distance, noises, why = _judged(e, bool(_nonfinite(recorded, place)), noise)
        if (WORST.index(status), noises) > (WORST.index(worst.status), worst.noises) or worst.status == EQUAL:
            worst = replace(
                equal, status=status, layer=place.layer, phase=place.phase, distance=distance, noises=noises, why=why
            )
    if faulty:
        why = "its local errors fail on one of both and not on the other"
        worst = replace(worst, status=BROKEN, why=why)
    return worst


def _judged(e: ErrorRecord, was: bool, noise: dict[Size, float]) -> tuple[str, float, float, str]:
    """Return (status, distance, × noise, why) of a tensor against the run's; ``was``: not finite in the run, either."""
    nan = float("nan")
    if e.nonfinite and not was:
        return BROKEN, nan, nan, f"{count_text(e.nonfinite, 'element')} NaN or infinite"
    if e.rel_l2 is None or e.nonfinite:
        return UNKNOWN, nan, nan, e.missing or e.unknown or "NaN or infinities in both"
    distance, size = value(e.rel_l2), noise.get((e.phase, e.layer, e.point))
    if size is None:
        return UNKNOWN, distance, nan, "no noise to judge it by"
    noises = distance / size if size else (0.0 if distance == 0 else float("inf"))
    return (ROUNDING if noises <= default_limits().ratio.at(1) else BROKEN), distance, noises, ""


def _noise(errors: Sequence[ErrorRecord]) -> dict[Size, float]:
    """Return what honest rounding makes of each point's forward error, at most."""
    found: dict[Size, float] = {}
    for e in errors:
        if isinstance(e, ForwardError) and e.noise is not None:
            key = (e.phase, e.layer, e.point)
            found[key] = max(found.get(key, 0.0), value(e.noise))
    return found


def _faults(errors: Sequence[ErrorRecord]) -> dict[str, Place]:
    """Return the points whose own errors fail, and where each does first."""
    judged = ((e, judge(e, default_limits())) for e in errors if e.kind in JUDGED)
    failed = [Place.of(e) for e, v in judged if v is not None and v.status in ("fail", "nonfinite")]
    return {p.point: p for p in sorted(failed, key=_order, reverse=True)}


def _nonfinite(recorded: Recorded, place: Place) -> int:
    stats = recorded.index[place].stats
    return stats.nan + stats.inf


def _sums(recorded: Recorded, first: Place) -> Iterator[PartedSum]:
    """Yield the sums of parts of a run that are made until a tensor, or make it."""
    policy, width = recorded_policy(recorded.run.record), recorded_mesh(recorded.run.record.mesh).model
    if not isinstance(policy, DevicePolicy) or policy.unread:
        return
    for point, row in POINTS.items():
        if row.shares_terms and first._replace(layer=0, point=point).order <= first.order:
            ways = policy.ways(point, first.phase == "decode")
            for split in ways or (None,):
                yield PartedSum(width, point, policy.activations, split)

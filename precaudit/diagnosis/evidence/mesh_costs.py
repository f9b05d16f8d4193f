"""What a mesh costs: the error of sums that several devices make in parts, against one device's on the same inputs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.parted import WIDE
from precaudit.models.numpy_decoder.rounding import FP64, of_policy
from precaudit.numbers.arrays import rounder
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.references.textbook.units import policy_at
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.policies import DevicePolicy, recorded_policy
from precaudit.schema.records.devices import SplitSum

LOOKED_AT = 48  # operations of a sum that are made again, evenly among those that were recorded


class MeshCost(NamedTuple):
    """A sum over ``model`` devices at a point, whose parts are rounded to ``held`` and added in ``split.summed``.

    ``times``: its error over that of one device; ``wide``: that of parts in float32 over one device's; ``bytes``: what
    these exchange over what is exchanged now. ``unknown``: why that is not known; ``split`` None: no part is rounded.
    ``phases``: those it is of, where others make it otherwise.
    """

    point: str
    model: int
    held: str
    split: SplitSum | None = None
    times: float = float("nan")
    wide: float = float("nan")
    bytes: float = float("nan")
    operations: int = 0
    phases: tuple[str, ...] = ()
    unknown: str | None = None


def mesh_costs(recorded: Recorded, model: Model) -> tuple[MeshCost, ...]:
    """Return what every sum that is made in parts costs, pooled over its recorded operations; none of one device."""
    policy, width = recorded_policy(recorded.run.record), recorded.run.record.mesh.get("model", 1)
    if not isinstance(policy, DevicePolicy):
        return ()
    points = [name for name, row in POINTS.items() if row.shares_terms and name in recorded.requested.points]
    return tuple(cost for point in points for cost in _of_point(recorded, model, policy, point, width))


def _of_point(recorded: Recorded, model: Model, policy: DevicePolicy, point: str, width: int) -> Iterator[MeshCost]:
    bare = MeshCost(point, width, policy.activations)
    if policy.unread:
        yield bare._replace(unknown="the compiled program was not read")
        return
    every: dict[SplitSum | None, list[str]] = defaultdict(list)
    for phase in recorded.requested.phases:
        ways = policy.ways(point, phase == "decode")
        if len(ways) > 1:
            yield bare._replace(phases=(phase,), unknown="its programs compute it in several ways")
        else:
            every[next(iter(ways), None)].append(phase)
    for split, some in every.items():
        cost = bare._replace(split=split, phases=tuple(some) if len(every) > 1 else ())
        yield cost if split is None else _measured(cost, recorded, policy, _operations(recorded, model, point, some))


def _operations(recorded: Recorded, model: Model, point: str, phases: Sequence[str]) -> list[Operation]:
    """Return operations of a point that can be made again, at most LOOKED_AT."""
    places = dict.fromkeys(p._replace(step=0) for p in recorded.index if p.point == point and p.phase in phases)
    some = list(places)[:: -(-len(places) // LOOKED_AT) or 1]
    made = (prepare(recorded, model, place, part) for place in some for part in parts(recorded, place))
    return [o for o in made if o is not None]


def _measured(cost: MeshCost, recorded: Recorded, policy: DevicePolicy, made: Sequence[Operation]) -> MeshCost:
    if not made:
        return cost._replace(unknown="no operation's inputs were recorded")
    squares, split = np.zeros(3), cost.split
    assert split is not None
    wide = SplitSum(parts=split.parts, summed=WIDE)
    for o in made:
        base = of_policy(policy_at(recorded, policy, o.place), o.place.phase == "decode")
        ways = (
            replace(base, splits=((cost.point, split),)),
            replace(base, splits=()),
            replace(base, part=rounder(WIDE), splits=((cost.point, wide),)),
        )
        exact, *rounded = o.evaluate([FP64, *ways])
        squares += [prod(exact.shape) * ratio(norm(y - exact), norm(exact)) ** 2 for y in rounded]
    parted, one, in_float32 = np.sqrt(squares)
    bytes_now = FORMATS[split.summed].dtype.itemsize
    return cost._replace(
        times=float(parted / one) if one else float("nan"),
        wide=float(in_float32 / one) if one else float("nan"),
        bytes=FORMATS[WIDE].dtype.itemsize / bytes_now,
        operations=len(made),
    )

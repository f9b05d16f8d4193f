"""How well recorded inputs reproduce recorded outputs, with and without the compiler's excess precision."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64, of_policy
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.operations import parts, prepare
from precaudit.references.textbook.units import policy_at
from precaudit.schema.metrics.sizes import canonical, norm, ratio
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy, recorded_policy
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, LocalError

LOOKED_AT = 12  # operations of a format made again without excess precision


class Closure(NamedTuple):
    """Of one format: operations, (median, largest) of what is left in u, and the same where nothing is kept unrounded.

    ``kept``: operations reproduced best with some place unrounded; ``off`` is of up to LOOKED_AT of them, None without.
    """

    format: str
    operations: int
    on: tuple[float, float]
    kept: int
    off: tuple[float, float] | None


def closure(recorded: Recorded, model: Model, errors: Sequence[ErrorRecord]) -> list[Closure]:
    """Return the closure of local records by format of the output."""
    policy = recorded_policy(recorded.run.record)
    groups: dict[str, list[LocalError]] = defaultdict(list)
    for e in errors:
        if isinstance(e, LocalError) and e.unexplained is not None and e.dtype is not None:
            groups[e.dtype].append(e)
    found = []
    for name, records in sorted(groups.items()):
        left = [value(e.unexplained.u) for e in records if e.unexplained is not None]
        kept = [e for e in records if e.elided]
        some = kept[:: -(-len(kept) // LOOKED_AT)] if kept else []
        strict = [x for e in some if (x := _strict(recorded, model, policy, e)) is not None]
        off = (median(strict), max(strict)) if strict else None
        found.append(Closure(name, len(records), (median(left), max(left)), len(kept), off))
    return found


def _strict(recorded: Recorded, model: Model, policy: Policy, e: ErrorRecord) -> float | None:
    """Return what is left in u where every place rounds as the policy says."""
    place = Place(e.prompt, e.phase, e.step, e.layer, e.point)
    for part in parts(recorded, place):
        o = prepare(recorded, model, place, part) if e.step in [s for s, _ in part.steps] else None
        if o is not None:
            exact, made = o.evaluate([FP64, of_policy(policy_at(recorded, policy, place), e.phase == "decode")])
            stored = canonical(o.stored, o.axes)
            left = np.nan_to_num(stored - canonical(made, o.axes))
            return ratio(norm(left), norm(canonical(exact, o.axes))) / FORMATS[o.stored.dtype.name].unit_roundoff
    return None

"""Recorded values of a program beside its textbook under the policy that the program announces.

A segment is judged by the roundings that the program's own equations declare. Where a program says which formats it
means to compute in, its operations are held to that, too: made again by the textbook under that policy, as those of a
model's run are.
"""

from collections.abc import Iterator

import msgspec

from precaudit.models.numpy_decoder.model import Model
from precaudit.references.comparison.cache_state import state_errors
from precaudit.references.mapped import MappedTextbook
from precaudit.references.textbook.local import NOT_RECORDED, LocalEmulations, local_errors
from precaudit.references.viewed import AS_STORED, Viewed
from precaudit.schema.graphs.decoder import CACHES, POINTS, support
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import local_checks
from precaudit.schema.places import Place
from precaudit.schema.policies import keeps_unrounded, recorded_policy
from precaudit.schema.records.errors import LocalError, PolicyError, StateError, as_kind

NOT_SHOWN = "the names map does not show what it reads"
NOT_MADE = "the names map does not show what its inputs are computed from, which it may have read unrounded"


def announced_errors(view: Viewed, book: MappedTextbook, case: str, phase: str) -> Iterator[PolicyError]:
    """Yield a record for every pair and call of a case; of several sequences, the one that is farthest off.

    ``phase``: of the program's records. Where the run announces no policy, of caches alone: whatever their format is,
    they hold the rows that were written.
    """
    announced = view.run.record.policy["name"] != AS_STORED
    for pair, place in view.places():
        if pair not in book.pairs or not (announced or POINTS[pair.point].state):
            continue
        named = f"{book.config.family}:{'' if pair.layer is None else pair.layer}.{pair.point}"
        worst: dict[int, LocalError | StateError] = {}
        for e in policy_errors(view, book.model, place):
            call = e.step
            if call not in worst or _badness(e) > _badness(worst[call]):
                worst[call] = e
        for call, e in worst.items():
            here = Place(case, phase, call, pair.step, pair.shown.name)
            if (why := _not_judged(view, place, e)) is not None:
                yield here.record(PolicyError, e.candidate, named, skipped=why)
            else:
                yield as_kind(e, PolicyError, **here._asdict(), reference=named)


def policy_errors(view: Viewed, model: Model, place: Place) -> Iterator[LocalError | StateError]:
    """Yield the local records of a point of a phase under the view's policy, of every sequence; of a cache its state.

    A cache has to hold the rows that were written, in the policy's format, bit for bit.
    """
    emulations = LocalEmulations(recorded_policy(view.run.record), ())
    for prompt in view.requested.prompts:
        here = place._replace(prompt=prompt)
        if POINTS[place.point].state:
            for e in state_errors(view, here):  # what is not finite and was written so is so where it was made
                yield msgspec.structs.replace(e, nonfinite=0) if e.mismatched == 0 else e
        elif POINTS[place.point].inputs:
            found = local_errors(view, model, True, emulations, here)
            yield from (e for e in found if isinstance(e, LocalError))


def _not_judged(view: Viewed, place: Place, e: LocalError | StateError) -> str | None:
    """Return why a record says nothing of the policy; None where it does.

    A compiler may hand an operation its inputs as they were before they were rounded (docs/numerics.md, fact 2). Where
    the map does not show what made them, only a record that closes without it tells.
    """
    if e.unknown == NOT_RECORDED:
        return NOT_SHOWN
    wanted = {*support((place.point,), (), view.config.sparse, fused=True)} - {*CACHES.values()}
    shown = {name for _, name in view.pairs}
    return (
        NOT_MADE
        if _badness(e) > 1 and not wanted <= shown and keeps_unrounded(recorded_policy(view.run.record))
        else None
    )


def _badness(e: LocalError | StateError) -> float:
    """Return how far a record is beyond its limits; infinite where it holds what is not finite."""
    if isinstance(e, StateError):
        return float("inf") if e.nonfinite or e.mismatched else 0.0
    if e.nonfinite:
        return float("inf")
    return max((found / limit for _, _, found, limit, _ in local_checks(e, default_limits().local(e.dtype))), default=0)

"""What a program's record says by itself of its cause: whole numbers that are others, sums in a narrow format."""

from typing import NamedTuple

from precaudit.recording.runs.programs import ProgramPoint
from precaudit.schema.digits import digits
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import EmulatedError


class StatedCause(NamedTuple):
    """A finding's kind, cause and words."""

    kind: str
    cause: str
    says: str


def lost_text(e: EmulatedError, dtype: str) -> str:
    """Return which whole numbers a format does not hold, how far off the others are, and how many collide."""
    which = f"{e.lost:,} of {e.n:,} whole numbers are stored as others"
    if e.lost_between is not None:
        least, most = (value(x) for x in e.lost_between)
        which += f", {digits(least, 6)} to {digits(most, 6)}" if least < most else f", {digits(least, 6)}"
    off = "" if e.max_diff is None else f", by up to {digits(value(e.max_diff), 6)}"
    collide = f", and {e.collisions:,} collide" if e.collisions else ""
    return f"{which}{off}{collide}: {dtype} does not have them"


def held_cause(e: EmulatedError, p: ProgramPoint) -> StatedCause | None:
    """Return what a local record of a point tells of its cause; None where it tells nothing."""
    at = f"{p.name} ({p.source})"
    if e.lost:
        says = f"{lost_text(e, p.dtype)}; {at}"
        return StatedCause("format", f"whole numbers in {p.dtype}", says)
    if e.narrow is not None:  # the textbook makes these values so, which is more than that a sum closes
        return StatedCause("format", e.narrow.cause, f"{e.narrow.says}; {at}")
    if e.summed is not None:
        # the error over that of the honest emulation, which sums in float32 and rounds once
        gain = "" if e.ratio is None else f"; preferred_element_type=float32: × {digits(e.ratio)} less error"
        off = "" if e.rel_l2 is None else f", error {digits(e.rel_l2)}"
        return StatedCause(
            "format", f"XLA sums this product in {e.summed}", f"the backend sums {at} in {e.summed}{off}{gain}"
        )
    return None

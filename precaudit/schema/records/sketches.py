"""A line of sketches.jsonl: what two runs without tensors say of one value."""

from precaudit.schema.records.base import Count, Index, Number, Record


class SketchRecord(Record, frozen=True, omit_defaults=False):
    """One value in two runs of sketches: the candidate's and the reference's.

    ``equal``: all bits; ``differing`` of ``rows`` have other bits. ``rel_l2``: the size of the difference over the
    reference's, estimated from projections to within ``within`` of itself at 95 %; None where it is not known, and
    ``unknown`` says why. ``largest``: the largest size in each, exact; ``nonfinite``: how many are NaN or infinite.
    The reference's are None where nothing is compared with it. ``row``, ``head``: where the largest sizes or the sums
    are farthest apart.
    """

    case: str
    phase: str
    call: Index
    layer: Index | None
    point: str
    equal: bool
    rows: Count
    differing: Count
    largest: tuple[Number, Number | None]
    nonfinite: tuple[Count, Count | None]
    rel_l2: Number | None = None
    within: Number | None = None
    unknown: str = ""
    row: Index | None = None
    head: Index | None = None

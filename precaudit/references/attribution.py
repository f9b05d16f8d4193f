"""Which emulation explains a local error: the name, or that none does. Whether it is a fault the limits say."""

from dataclasses import dataclass

from precaudit.references.closing import badness
from precaudit.schema.emulations import of_policy_alone
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, LocalError

EXPLAINS = 0.9  # share of the error an emulation must reproduce to be named
CLEARLY = 0.99  # a policy that reproduces this much is not second-guessed


@dataclass(frozen=True)
class Attribution:
    """``name``: ``exact``, an emulation, or ``none of these``; ``share``: what it explains; ``left_u``: what is left.

    ``passes``: the default limits of the gate hold; ``inherits``: where they do not, the recorded point between inputs
    and result from which it closes, so that what fails is before it.
    """

    name: str
    share: float
    left_u: float
    passes: bool
    inherits: str | None = None

    @property
    def fails(self) -> bool:
        """Whether this operation itself is more than rounding."""
        return not self.passes and self.inherits is None


def attribute(record: ErrorRecord) -> Attribution | None:
    """Name the emulation that explains a local record best; None where there is none to judge.

    The declared policy is named when it reproduces 99 % of the error, or 90 % and the record passes; otherwise whatever
    reproduces most, if that is 90 % at least.
    """
    if not isinstance(record, LocalError) or record.explained is None or record.unexplained is None:
        return None
    shares = {name: value(share) for name, share in record.explained.items()}
    own = of_policy_alone(shares)
    assert own is not None
    policy = own[0]
    left, passes = value(record.unexplained.u), not record.nonfinite and badness(record) <= 1
    if record.nonfinite:
        return Attribution("none of these", shares[policy], float("inf"), False)
    if record.max_diff == 0:
        return Attribution("exact", 1.0, left, passes)
    known = shares[policy] >= (EXPLAINS if passes else CLEARLY)
    best = policy if known else max(shares, key=lambda name: shares[name])
    name, inherits = best if shares[best] >= EXPLAINS else "none of these", None if passes else record.inherits
    return Attribution(name, shares[best], left, passes, inherits)


def first_failing(errors: list[ErrorRecord]) -> ErrorRecord | None:
    """Return the first record, by layer and then point order, whose local error rounding does not account for."""
    order = {name: i for i, name in enumerate(POINTS)}
    found = [e for e in errors if (a := attribute(e)) is not None and not a.passes]
    last = 1 << 30
    return min(found, key=lambda e: (last if e.layer is None else e.layer, order[e.point]), default=None)

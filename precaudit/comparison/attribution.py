"""Which emulation explains a local error: the name, or that none does."""

from dataclasses import dataclass

from precaudit.points import POINTS
from precaudit.records import ErrorRecord, value

EXPLAINS = 0.9  # share of the error an emulation must reproduce to be named
CLEARLY = 0.99  # a policy that reproduces this much is not second-guessed
# What an honest operation leaves, in unit roundoffs of its output: below it nothing is worth naming. On SmolLM2 and
# tiny in bf16 at most 0.29 u was left (`precaudit compare RUN -v`); a foreign rounding in the operation leaves 0.7 or
# more. The sums of a float32 result are rounded in an order the emulation does not know: √n u of random walk.
HONEST_U = 0.5
# mlp_norm may have read a residual that was never rounded; unless its summands were recorded, 0.7 u are left.
FUSED_U = 1.0
FLOAT32_U = 64.0


@dataclass(frozen=True)
class Attribution:
    """``name``: ``exact``, an emulation, or ``none of these``; ``share``: what it explains; ``left_u``: what is left.

    ``small``: what is left is below what an honest operation leaves.
    """

    name: str
    share: float
    left_u: float
    small: bool

    @property
    def unexplained(self) -> bool:
        """Whether an error is left that rounding does not account for."""
        return self.name == "none of these" and not self.small


def attribute(record: ErrorRecord) -> Attribution | None:
    """Name the emulation that explains a local record best; None where there is none to judge.

    The declared policy is named when it reproduces 99 % of the error; otherwise whatever reproduces most, if that is
    90 % at least. An error below what the summation order of float32 leaves is small, whatever explains it.
    """
    if record.kind != "local" or record.explained is None or record.unexplained is None:
        return None
    shares = {name: value(share) for name, share in record.explained.items()}
    policy = next(name for name in shares if name.startswith("policy:") and "+accum:" not in name)
    left = value(record.unexplained.u)
    if record.nonfinite:
        return Attribution("none of these", shares[policy], float("inf"), False)
    if record.max_diff == 0:
        return Attribution("exact", 1.0, left, True)
    limit = FLOAT32_U if record.dtype == "float32" else FUSED_U if record.point == "mlp_norm" else HONEST_U
    best = policy if shares[policy] >= CLEARLY else max(shares, key=lambda name: shares[name])
    if shares[best] >= EXPLAINS:
        return Attribution(best, shares[best], left, left <= limit)
    return Attribution("none of these", shares[best], left, left <= limit)


def first_unexplained(errors: list[ErrorRecord]) -> ErrorRecord | None:
    """Return the first record, by layer and then point order, whose local error rounding does not account for."""
    order = {name: i for i, name in enumerate(POINTS)}
    found = []
    for e in errors:
        a = attribute(e)
        if a is not None and a.unexplained:
            found.append(e)
    last = 1 << 30
    return min(found, key=lambda e: (last if e.layer is None else e.layer, order[e.point]), default=None)

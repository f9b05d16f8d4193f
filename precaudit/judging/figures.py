"""The few figures that a run is chosen by, from its error records: what a sweep has in a row, and a bisection tests."""

from collections.abc import Iterable, Sequence
from math import isnan
from typing import TypeVar

from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.records.base import Number, json_number, value
from precaudit.schema.records.errors import ErrorRecord, ForwardError, LocalError, PairError

L = TypeVar("L", bound=ForwardError | PairError)
OUTPUTS = "outputs."  # before the name of a program's output


def forward_logits(errors: Iterable[ErrorRecord], kind: type[L]) -> list[L]:
    """Return the records of logits that have numbers, of a model's run or of a program's."""
    names = (LOGITS, OUTPUTS + LOGITS)
    return [e for e in errors if isinstance(e, kind) and e.point in names and e.numberless is None]


def logits_figures(logits: Sequence[ForwardError | PairError]) -> dict[str, Number]:
    """Return of records of logits the largest error and KL, and of how many positions top-1 is another.

    Only what is there: of records without distributions the error alone.
    """
    spread = [e.distribution for e in logits if e.distribution is not None]
    found = {
        "logits": largest(["nan" if e.nonfinite else e.rel_l2 for e in logits]),
        "kl": largest([x for d in spread for x in d.kl]),
    }
    counts: dict[str, Number] = {
        "flips": sum(not x >= 1 for d in spread for x in d.top1),
        "positions": sum(len(d.top1) for d in spread),
    }
    return {name: x for name, x in found.items() if x is not None} | (counts if spread else {})


def error_figures(
    errors: Sequence[ErrorRecord], kind: type[ForwardError] | type[PairError] = ForwardError
) -> dict[str, Number]:
    """Return the largest error of every point, as ``forward@POINT`` and ``local@POINT``, and the figures of logits.

    ``kind``: of which records forward errors are; ``PairError`` for a run that is compared with another.
    """
    found = logits_figures(forward_logits(errors, kind))
    sizes: dict[str, list[Number | None]] = {}
    for e in errors:
        if isinstance(e, kind | LocalError) and e.numberless is None:
            name = LocalError if isinstance(e, LocalError) else ForwardError
            sizes.setdefault(f"{name.kind}@{e.point}", []).append("nan" if e.nonfinite else e.rel_l2)
    return found | {name: x for name, every in sizes.items() if (x := largest(every)) is not None}


def rank_number(x: Number | None) -> float:
    """Return a number to find the largest by: what is not one counts as infinite."""
    size = value(x)
    return float("inf") if isnan(size) else size


def largest(numbers: Iterable[Number | None]) -> Number | None:
    """Return the largest number, NaN where one is; None where there is none."""
    worst = max((x for x in numbers if x is not None), key=rank_number, default=None)
    return None if worst is None else json_number(value(worst))

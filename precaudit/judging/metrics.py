"""The numbers of error records that budgets limit, by name."""

from math import isnan, nan
from typing import Any

from precaudit.schema.limits.checks import narrow_checks
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import KINDS, Distribution, EmulatedError, ErrorRecord, ForwardError

# What a distribution holds a position of: the worst position counts.
OF_POSITIONS = tuple(n for n in Distribution.__struct_fields__ if n not in ("positions", "kl_noise", "gap"))
METRICS = (
    "rel_l2",
    "mae",
    "max_diff",
    "cosine",
    "max_ulp",
    "bits_lost",
    "snr",
    "gain",
    "mean",
    "ratio",
    "excess",
    "componentwise",
    "mismatched",
    "price",
    *OF_POSITIONS,
)
AT_LEAST = ("cosine", "snr", "top1", "top5", "top50")  # larger is better
# Those that are parts of a field.
HOLDERS = {
    **dict.fromkeys(OF_POSITIONS, "distribution"),
    "excess": "unexplained",
    "componentwise": "unexplained",
    "price": "narrow",
}


def metrics_of(kind: str) -> tuple[str, ...]:
    """Return the metrics that records of a kind have."""
    fields = KINDS[kind].__struct_fields__
    return tuple(m for m in METRICS if HOLDERS.get(m, m) in fields)


def metric_of(e: ErrorRecord, metric: str, scope: str) -> tuple[float, Any] | None:
    """Return (value, index) of a metric at a scope of a record; None where the record has none."""
    if scope != "tensor":
        found = (e.scopes or {}).get(scope, {}).get(metric)
        return None if found is None else (value(found[0]), found[1])
    if metric in OF_POSITIONS:
        return _worst_position(getattr(e, "distribution", None), metric)
    if metric in ("excess", "componentwise"):
        part = getattr(getattr(e, "unexplained", None), metric, None)
        return None if part is None else (value(part[0]), part[1]) if metric == "componentwise" else (value(part), None)
    if metric == "price":
        checks = narrow_checks(e) if isinstance(e, EmulatedError | ForwardError) else ()
        return next(((found, index) for _, _, found, _, index in checks), None)
    number = getattr(e, metric, None)
    size = None if number is None else value(number)
    return None if size is None else (abs(size) if metric in ("gain", "mean") else size, None)


def _worst_position(found: Distribution | None, metric: str) -> tuple[float, Any] | None:
    """Return the worst position's number of a distribution: NaN where one is; None where it holds none."""
    numbers = [] if found is None else [value(x) for x in getattr(found, metric)]
    if not numbers:
        return None
    if any(map(isnan, numbers)):
        return nan, None
    return (min(numbers) if metric in AT_LEAST else max(map(abs, numbers))), None


def keeps_limit(metric: str, found: float, limit: float) -> bool:
    """Whether a value keeps a limit; NaN keeps none."""
    return found >= limit if metric in AT_LEAST else found <= limit

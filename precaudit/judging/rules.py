"""The verdict rule: one record in, one verdict out (docs/numerics.md, verdict)."""

from collections.abc import Sequence

import msgspec

from precaudit.judging.verdicts import HASHED, OVERFLOW, PASS, Verdict
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import Limits, default_limits
from precaudit.schema.limits.checks import (
    FAR_OFF,
    SAME,
    Check,
    farthest_formula,
    farthest_token,
    forward_checks,
    local_checks,
    narrow_checks,
    sum_checks,
)
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import (
    AccumulationError,
    EmulatedError,
    ErrorRecord,
    FormulaError,
    ForwardError,
    LocalError,
    PairError,
    PolicyError,
    StateError,
    SumError,
    WeightError,
)
from precaudit.schema.records.runs import is_call


def judge(e: ErrorRecord, limits: Limits) -> Verdict | None:
    """Judge an error record by the default rule; None for kinds that only inform (accum, weights, pair).

    A product has no limit but those that budgets state: it passes here where it is finite.
    """
    if isinstance(e, AccumulationError | WeightError | PairError):
        return None
    if e.missing is not None:
        return Verdict.of(e, "missing", text=e.missing)
    if e.skipped is not None:
        return Verdict.of(e, "not run", text=e.skipped)
    if e.nonfinite:
        return Verdict.of(e, "nonfinite", metric="nonfinite", value=float(e.nonfinite), limit=0.0, text=_origin(e))
    if e.unknown is not None:
        return Verdict.of(e, "unknown", text=e.unknown)
    if "nan" in (e.mae, e.max_diff, e.rel_l2):
        return Verdict.of(e, "nonfinite", text="mae, max_diff or rel_l2 is NaN")
    match e:
        case StateError():
            return _state(e)
        case PolicyError() if e.mismatched is not None:
            return _state(e)
        case FormulaError():
            return _formula(e)
        case EmulatedError():
            return _emulated(e, limits)
        case SumError():
            return _within(e, list(sum_checks(e, limits)))
        case ForwardError():
            return _priced(e, list(forward_checks(e, limits)))
    return PASS  # a product


def _origin(e: ErrorRecord) -> str:
    if not isinstance(e, EmulatedError) or e.origin is None:
        return ""
    return f"{e.origin}, in FP64, too" if e.fp64_too else e.origin


def _emulated(e: EmulatedError, limits: Limits) -> Verdict:
    """Judge what an emulation of rounding leaves."""
    if e.origin and isinstance(e, LocalError):
        size, index = farthest_token(e)
        at = {"scope": "token", "value": size, "limit": FAR_OFF, "index": index}
        return Verdict.of(e, "fail", metric=OVERFLOW, text=e.origin, **at)
    if e.lost:
        return Verdict.of(e, "fail", metric="lost", scope="element", value=float(e.lost), limit=0.0)
    if scope := _lacking(e):
        return Verdict.of(e, "unknown", text=f"the record has no excess at scope {scope}")
    return _priced(e, list(local_checks(e, limits.local(e.dtype))))


def _priced(e: EmulatedError | ForwardError, checks: list[Check]) -> Verdict:
    """Judge numbers beside their limits, and the price of a narrow format inside, if there are any numbers."""
    found = _within(e, checks + list(narrow_checks(e)) if checks else [])
    if found.metric == "price" and e.narrow is not None:
        return msgspec.structs.replace(found, text=e.narrow.says)
    return found


def _within(e: ErrorRecord, checks: Sequence[Check]) -> Verdict:
    """Return the verdict on numbers beside their limits: on the one that is farthest beyond its own."""
    if not checks:
        return Verdict.of(e, "unknown", text="the record holds nothing to judge by")
    broken = [c for c in checks if not c[2] <= c[3]]  # NaN is not within a limit
    if not broken:
        return PASS
    metric, scope, found, limit, index = max(broken, key=lambda c: c[2] / c[3])
    return Verdict.of(e, "fail", metric=metric, scope=scope, value=found, limit=limit, index=index)


def _state(e: StateError | PolicyError) -> Verdict:
    if e.mismatched is None:
        return Verdict.of(e, "unknown", text="the caches were not compared")
    if not e.mismatched:
        return Verdict.of(e, "pass")
    index = e.rows[0][0] if e.rows else (e.scopes or {}).get("token", {}).get("max_diff", (0.0, None))[1]
    metric = "mismatched" if e.dtype != "uint32" else HASHED
    return Verdict.of(e, "fail", metric=metric, scope="token", value=float(e.mismatched), limit=0.0, index=index)


def _formula(e: FormulaError) -> Verdict:
    """Judge the distance of the program's FP64 shadow from the reference: no rounding is in it."""
    if e.rel_l2 is None:
        return Verdict.of(e, "unknown", text="the record holds nothing to judge by")
    size, scope, index = farthest_formula(e)
    if size <= SAME:
        return PASS
    token = (e.scopes or {}).get("token", {}).get("rel_l2", (0.0, None))[1]
    row = (e.scopes or {}).get("row", {}).get("rel_l2", (0.0, None))[1]
    at = f"position {token}" if row is None else f"row {row}, position {token}"
    text = f"in FP64 the program differs from the reference, most at {at}"
    return Verdict.of(e, "fail", metric="rel_l2", scope=scope, value=size, limit=SAME, index=index, text=text)


def _lacking(e: EmulatedError) -> str | None:
    """Return a scope every local record of its point has, and this one lacks."""
    heads = not is_call(e.phase) and e.point in POINTS and POINTS[e.point].heads
    expected = ("token", "head") if heads else ("token",)
    return next((s for s in expected if "excess" not in (e.scopes or {}).get(s, {})), None)


def parts_beyond_rounding(p: PrefillDecodeRecord) -> bool:
    """Whether the KL of two views of one position is more than rounding of both makes."""
    return p.kl_ratio is not None and not p.kl_ratio <= default_limits().kl.value


def judge_pair(p: PrefillDecodeRecord) -> Verdict:
    """Judge two views of one position: their top-1 and FP64's agree, or are near ties there, and KL is rounding's."""
    if not p.finite:
        return Verdict.of_pair(p, "fail", text="logits are NaN or infinite: there is no top-1")
    if p.f64_apart is not None:
        apart = f"FP64 logits of {p.view} differ from those of {p.against} by {digits(p.f64_apart, 2)}"
        return Verdict.of_pair(p, "fail", text=f"{apart}: they are not one function", value=value(p.f64_apart))
    if parts_beyond_rounding(p):
        text = f"KL of {digits(p.kl, 2)} nats at position {p.position}, {digits(p.kl_ratio)} × that of rounding"
        limit = default_limits().kl.value * value(p.kl_noise)
        return Verdict.of_pair(p, "fail", metric="kl", text=text, value=value(p.kl), limit=limit)
    if p.agree:
        return Verdict.of_pair(p, "pass", text="" if p.match else "each as FP64 is with its own lengths in RoPE")
    if p.near_tie:
        return Verdict.of_pair(p, "pass", text="near tie")
    if p.near_tie is None or p.f64_match is None:
        return Verdict.of_pair(p, "unknown", text="no FP64 reference")
    tokens = f"{p.against} says {p.prefill_top1}, {p.view} {p.decode_top1}, FP64 {p.f64_top1}"
    return Verdict.of_pair(p, "fail", text=f"{tokens}; FP64's gap is no near tie", value=value(p.f64_gap))

"""What a record is judged by: every number beside its limit."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.limits import Limits, Local
from precaudit.schema.records.base import Number, value
from precaudit.schema.records.errors import (
    EmulatedError,
    ErrorRecord,
    FormulaError,
    ForwardError,
    LocalError,
    Signed,
    SumError,
)
from precaudit.schema.records.runs import Neutrality

# Of a formula: constants a program holds in float32, such as 1/√K or epsilon, leave up to 1e-7 after many layers.
SAME = 1e-6
# Of a token, and of a tensor: what is finite and farther from FP64 is asked for overflows that it is made of. A token
# may be far off by itself where it is small beside others, such as a gate in float16 that is 0 for 6e-6.
FAR_OFF, NOTICED = 0.5, 0.01
# Of a narrow format inside an operation: how many times the error that float32 inside leaves is still its rounding.
PRICE = 2.0
# A check: metric, scope, value, limit, index
Check = tuple[str, str, float, float, Any]


def local_checks(e: EmulatedError, limits: Local) -> Iterator[Check]:
    """Yield what a local record is judged by, each beside its limit; nothing where the record lacks any of it."""
    u = e.unexplained
    if u is None or u.excess is None or u.gain is None or u.mean is None or u.componentwise is None:
        return
    slices = e.slices or {}
    yield "excess", "tensor", value(u.excess), limits.tensor.at(1), None
    yield "gain", "tensor", units(u.gain), limits.gain.at(1), None
    yield "mean", "tensor", units(u.mean), limits.mean.at(1), None
    yield "componentwise", "element", value(u.componentwise[0]), limits.componentwise.at(e.n), u.componentwise[1]
    scopes = e.scopes or {}
    for scope in ("token", "head", "channel"):
        if "excess" in scopes.get(scope, {}):
            found, index = scopes[scope]["excess"]
            yield "excess", scope, value(found), getattr(limits, scope).at(slices.get(scope, 1)), index
    for metric in ("gain", "mean"):
        if metric in scopes.get("head", {}):
            found, index = scopes["head"][metric]
            yield metric, "head", value(found), getattr(limits, f"head_{metric}").at(slices.get("head", 1)), index


def narrow_checks(e: EmulatedError | ForwardError) -> Iterator[Check]:
    """Yield how many times the error of float32 inside a narrow format inside an operation makes, beside its limit."""
    if e.narrow is not None:
        error, wide = value(e.narrow.error), value(e.narrow.wide)
        yield "price", "tensor", error / wide if wide else float("inf") if error else 0.0, PRICE, None


def units(x: Signed) -> float:
    """Return |value| in units of its noise; noise that is negative or NaN is no unit of anything: NaN."""
    size, noise = abs(value(x.value)), value(x.noise)
    if not noise >= 0:
        return float("nan")
    return 0.0 if size == 0 else size / noise if noise else float("inf")


def forward_checks(e: ForwardError, limits: Limits) -> Iterator[Check]:
    """Yield what a forward record is judged by, each beside its limit."""
    if e.ratio is not None:
        yield "ratio", "tensor", value(e.ratio), limits.ratio.at(1), None
    for scope in ("token", "head"):
        if "ratio" in (e.scopes or {}).get(scope, {}):
            found, index = (e.scopes or {})[scope]["ratio"]
            yield "ratio", scope, value(found), getattr(limits, scope).at((e.slices or {}).get(scope, 1)), index
    d = e.distribution
    if d is not None and d.kl_noise is not None:
        sizes = [kl_over_noise(k, n) for k, n in zip(d.kl, d.kl_noise, strict=True)]
        if sizes:
            worst = max(range(len(sizes)), key=lambda i: float("inf") if sizes[i] != sizes[i] else sizes[i])
            yield "kl", "token", sizes[worst], limits.kl.at(len(sizes)), d.positions[worst]


def sum_checks(e: SumError, limits: Limits) -> Iterator[Check]:
    """Yield what sums of rows are judged by: root mean square and largest, in units of what rounding leaves."""
    if e.ratio is None or "ratio" not in (e.scopes or {}).get("token", {}):
        return
    found, index = (e.scopes or {})["token"]["ratio"]
    sums = (e.slices or {}).get("token", 1)
    yield "sums", "tensor", value(e.ratio), limits.sums.at(sums), None
    yield "sums", "token", value(found), limits.token_sums.at(sums), index


def kl_over_noise(found: Number, noise: Number) -> float:
    """Return KL over its noise; both vanish together where logits are exact. Negative noise is none: NaN."""
    if not value(noise) >= 0:
        return float("nan")
    return 0.0 if value(found) <= 0 else value(found) / value(noise) if value(noise) else float("inf")


def logit_noise(errors: Iterable[ErrorRecord]) -> dict[tuple[str, str, int], float]:
    """Return the forward noise of logits relative to them, {(prompt, phase, step): ‖noise‖ / ‖reference‖}."""
    return {
        (e.prompt, e.phase, e.step): value(e.noise)
        for e in errors
        if isinstance(e, ForwardError) and e.point == LOGITS and e.noise is not None
    }


def disturbance(n: Neutrality, noise: Mapping[tuple[str, str, int], float]) -> float:
    """Return by how much capturing changed logits, the largest of its prompts, in units of their forward noise.

    Infinite where it is not known: no noise, or a run that tells no change of each prompt.
    """
    if n.bitwise:
        return 0.0
    each = [kl_over_noise(a, noise.get((p, n.phase, n.step), 0.0)) for p, a in zip(n.prompts, n.apart, strict=False)]
    known = len(n.apart) == len(n.prompts) > 0 and all(x == x for x in each)
    return max(each) if known else float("inf")


def farthest_formula(e: FormulaError) -> tuple[float, str, int | None]:
    """Return a formula record's largest relative distance (NaN is), its scope, tensor or token, and its index."""
    whole: tuple[str, Number | None, int | None] = ("tensor", e.rel_l2, None)
    tokens = (e.scopes or {}).get("token", {})
    found = [whole, ("token", *tokens["rel_l2"])] if "rel_l2" in tokens else [whole]
    sizes = [(float("nan") if x is None else value(x), scope, index) for scope, x, index in found]
    return max(sizes, key=lambda x: x[0] if x[0] == x[0] else float("inf"))


def farthest_token(e: LocalError) -> tuple[float, int | None]:
    """Return the largest relative error of a token of a local record, and which: 0 where none is known."""
    size, index = (e.scopes or {}).get("token", {}).get("rel_l2", (0.0, None))
    return value(size), index


def is_far_off(e: LocalError) -> bool:
    """Whether a token of a local record is so far from FP64 that rounding alone is no word for it."""
    return farthest_token(e)[0] >= FAR_OFF and value(e.rel_l2) >= NOTICED

"""Faults of the exam: each a change of a tensor [T, H, K] that a program or a file can suffer, at a median target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from precaudit.numbers.formats import FORMATS

Array = Any


@dataclass(frozen=True)
class Target:
    """What a fault hits: the token, head, channel and element of median magnitude."""

    token: int
    other: int
    head: int
    second: int
    element: tuple[int, int, int]

    @classmethod
    def of(cls, x: Array) -> "Target":
        """Choose targets in a canonical tensor [T, H, K] in FP64."""
        tokens, heads = np.square(x).sum(axis=(1, 2)), np.square(x).sum(axis=(0, 2))
        token = int(np.argsort(tokens, kind="stable")[len(tokens) // 2])
        head = int(np.argsort(heads, kind="stable")[len(heads) // 2])
        row = np.abs(x[token, head])
        alive = np.flatnonzero(row)
        k = int(alive[np.argsort(row[alive], kind="stable")[len(alive) // 2]]) if len(alive) else 0
        return cls(token, (token + 1) % len(tokens), head, (head + 1) % len(heads), (token, head, k))


@dataclass(frozen=True)
class Fault:
    """``change(x, target, xp, dtype)`` of FP32 values; ``scope``: where its size counts; ``nonfinite``: NaN or inf."""

    name: str
    change: Callable[..., Array]
    scope: str
    nonfinite: bool = False
    heads: bool = False


def _mask(x: Array, xp: Any, t: int | None = None, h: int | None = None, k: int | None = None) -> Array:
    found = xp.ones(x.shape, bool)
    for axis, i in enumerate((t, h, k)):
        if i is not None:
            shape = [1, 1, 1]
            shape[axis] = x.shape[axis]
            found = found & (xp.arange(x.shape[axis]) == i).reshape(shape)
    return found


def _swap(x: Array, xp: Any, axis: int, a: int, b: int) -> Array:
    order = np.arange(x.shape[axis])
    order[[a, b]] = order[[b, a]]
    return xp.take(x, order, axis=axis)


def _element(value: Callable[[Array], Array]) -> Callable[..., Array]:
    return lambda x, g, xp, _d: xp.where(_mask(x, xp, *g.element), value(x), x)


def _offset(x: Array, g: Target, xp: Any, dtype: str) -> Array:
    ulp = 2.0 * FORMATS[dtype].unit_roundoff * xp.exp2(xp.frexp(x)[1].astype(x.dtype) - 1.0)
    return xp.where(_mask(x, xp, h=g.head), x + 4.0 * ulp, x)


FAULTS = (
    Fault("one NaN", _element(lambda x: x * np.float32("nan")), "element", nonfinite=True),
    Fault("all NaN", lambda x, *_: x * np.float32("nan"), "tensor", nonfinite=True),
    Fault("one inf", _element(lambda x: abs(x) * 0 + np.float32("inf")), "element", nonfinite=True),
    Fault("token zeroed", lambda x, g, xp, _d: xp.where(_mask(x, xp, g.token), 0.0, x), "token"),
    Fault("token × 0.5", lambda x, g, xp, _d: xp.where(_mask(x, xp, g.token), 0.5 * x, x), "token"),
    Fault("element × 1000", _element(lambda x: 1000.0 * x), "element"),
    Fault("scale 1.02", lambda x, *_: 1.02 * x, "tensor"),
    Fault("scale 1.04", lambda x, *_: 1.04 * x, "tensor"),
    Fault("scale 0.99", lambda x, *_: 0.99 * x, "tensor"),
    Fault("head zeroed", lambda x, g, xp, _d: xp.where(_mask(x, xp, h=g.head), 0.0, x), "head", heads=True),
    Fault("heads swapped", lambda x, g, xp, _d: _swap(x, xp, 1, g.head, g.second), "tensor", heads=True),
    Fault("tokens swapped", lambda x, g, xp, _d: _swap(x, xp, 0, g.token, g.other), "token"),
    Fault("channel's sign", lambda x, g, xp, _d: xp.where(_mask(x, xp, h=g.head, k=g.element[2]), -x, x), "channel"),
    Fault("4 ulp in one head", _offset, "head", heads=True),
)


def size(fault: Fault, changed: Array, honest: Array, reference: Array, g: Target) -> float:
    """Return ‖what the fault changed‖ over the honest error, both over the slice it hits (element: rms error)."""
    with np.errstate(invalid="ignore"):
        change, error = changed - honest, honest - reference
    t, h, k = g.element
    where: Any = {
        "tensor": (), "token": (g.token,), "head": (slice(None), g.head), "channel": (slice(None), h, k),
        "element": (t, h, k),
    }[fault.scope]  # fmt: skip
    if fault.nonfinite:
        return float("inf")
    top = np.sqrt(np.mean(change[where] ** 2))
    bottom = np.sqrt(np.mean(error**2 if fault.scope == "element" else error[where] ** 2))
    return float(top / bottom) if bottom else float("inf") if top else 0.0

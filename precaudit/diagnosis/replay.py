"""Which of the variants made a recorded tensor: each is run on the operation's recorded inputs."""

from dataclasses import dataclass

import numpy as np

from precaudit.comparison.operations import Operation
from precaudit.diagnosis.forms import Inputs, plain
from precaudit.diagnosis.variants import Variant, variants
from precaudit.formats import Array
from precaudit.metrics.sizes import canonical
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import FP64, elisions, of_policy
from precaudit.points import POINTS
from precaudit.policies import Policy

ENOUGH = 0.9  # share of the error a variant must reproduce to be named
ROWS = 64  # query rows replayed: the last ones of the prompt


@dataclass(frozen=True)
class Tried:
    """One variant's answer: the share of the error it reproduces, and the share of elements it gives bit for bit."""

    variant: Variant
    explained: float
    equal: float


@dataclass(frozen=True)
class Replay:
    """All answers for one operation, best first."""

    tried: tuple[Tried, ...]
    announced: Tried

    @property
    def best(self) -> Tried:
        """The variant that reproduces most; the announced policy where it reproduces as much."""
        return self.tried[0]

    @property
    def second(self) -> Tried | None:
        """The next best."""
        return self.tried[1] if len(self.tried) > 1 else None

    @property
    def named(self) -> Tried | None:
        """The best variant if it reproduces ENOUGH; None: none reproduces it."""
        return self.best if self.best.explained >= ENOUGH else None


def replay(o: Operation, model: Model, policy: Policy) -> Replay:
    """Try every variant of an operation on its recorded inputs."""
    inputs, axes = _last_rows(o, model), POINTS[o.place.point].axes
    candidate = canonical(o.stored, axes)[-ROWS:]
    truth = canonical(plain(inputs, FP64), axes)
    base = of_policy(policy, o.place.phase == "decode")
    roundings = [base.eliding(places) for places in elisions(o.place.point, model.config, policy)]
    found: list[Tried] = []
    for variant in variants(o.place.point, policy, model.config, o.place.layer):
        if variant.name.startswith("weights of") and max(t.explained for t in found) >= ENOUGH:
            continue
        outs = (canonical(variant.form(inputs, variant.change(r)), axes) for r in roundings)
        found.append(max((_answer(variant, candidate, truth, y) for y in outs), key=lambda t: t.explained))
    announced = found[0]
    ordered = sorted(found, key=lambda t: (-t.explained, t is not announced))
    return Replay(tuple(ordered), announced)


def _last_rows(o: Operation, model: Model) -> Inputs:
    """Return the operation's inputs for its last ROWS rows; keys and values stay whole."""
    keyed = o.place.point in ("scores", "attn_out")
    if o.place.point == "probs":
        values = tuple(x[:, -ROWS:] for x in o.inputs)
    elif keyed:
        values = (o.inputs[0][-ROWS:], *o.inputs[1:])
    else:
        values = tuple(x[-ROWS:] for x in o.inputs)
    return Inputs(model, o.place.layer, o.place.point, np.asarray(o.positions)[-ROWS:], values)


def _answer(variant: Variant, candidate: Array, truth: Array, y: Array) -> Tried:
    """Return the share of candidate − truth that y reproduces, over elements finite in all; NaN must fall together."""
    c = candidate
    same = np.isfinite(c) == np.isfinite(y)
    if not same.all():
        return Tried(variant, -float(np.mean(~same)), 0.0)
    fit = np.isfinite(c) & np.isfinite(truth)
    error = float(np.sum((c - truth)[fit] ** 2))
    left = float(np.sum((c - y)[fit] ** 2))
    if not fit.all() and error == 0:
        return Tried(variant, 1.0 if left == 0 else 0.0, float(np.mean(c[fit] == y[fit])) if fit.any() else 1.0)
    share = 1.0 - left / error if error else 1.0 if left == 0 else 0.0
    return Tried(variant, share, float(np.mean((c == y)[fit])) if fit.any() else 1.0)

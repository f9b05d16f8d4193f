"""Does it matter? The share every operation's own error has in a change of logits, by the FP64 gradient (JAX)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.comparison.recorded import Recorded
from precaudit.diagnosis.shadowed import exact_tables
from precaudit.formats import Array, widen
from precaudit.points import POINTS
from precaudit.records import Share, Shares, number
from precaudit.tracing.subject import Subject
from precaudit.transforms import plant

PLANTED = tuple(p for p in POINTS if "S" not in POINTS[p].axes and p not in ("resid_in", "logits"))


def shares(recorded: Recorded, subject: Subject, prompt: str, objective: str = "margin") -> Shares:
    """Return the signed share of every recorded operation's own error in what an objective of the last row changed.

    ``objective``: ``margin`` (top-1 minus top-2 logit of FP64), ``logprob`` (of the token FP64 prefers) or ``kl``
    (FP64 ‖ candidate). A share is ⟨gradient, error⟩, the gradient taken half-way between FP64 and the candidate: the
    midpoint rule is exact to second order. Raises CannotLift for a program without FP64 meaning.
    """
    tokens = np.asarray(recorded.run.prompts[prompt].tokens, np.int32)
    n, layers = len(tokens), subject.config.layers
    values = {p: v for p in PLANTED if (v := _stacked(recorded, prompt, p, layers, n)) is not None}
    candidate = recorded.tensor(prompt, "prefill", 0, None, "logits")
    given = partial(Shares, run="", prompt=prompt, objective=objective)
    if candidate is None or not values:
        why = "prefill was not recorded whole"
        return given(fp64=0.0, change=0.0, explained=0.0, absolute=0.0, shares=(), unknown=why)
    with jax.enable_x64(True):
        args = (
            subject.parameters, exact_tables(subject, n), tokens[None], np.zeros(1, np.int32),
            np.asarray([[n - 1]], np.int32),
        )  # fmt: skip

        def program(*a: Any) -> Any:
            params, tables, *rest = a
            return subject.decoder.prefill(params, tables, rest[0], rest[1], rest[2], None)[0]

        _, errors = jax.jit(plant(program, "force"))(values, *args)
        add = plant(program, "add")
        zero = jax.tree.map(jnp.zeros_like, errors)
        exact = np.asarray(jax.jit(add)(zero, *args)[0])[0, 0]
        last = widen(candidate)[-1]

        def goal(d: Any, e: Any, *a: Any) -> Any:
            return _objective(objective, exact, add(d, *a)[0][0, 0] + e)

        made = np.asarray(jax.jit(add)(errors, *args)[0])[0, 0]
        own = last - made  # the error of the output matrix, the last operation
        half = jax.tree.map(lambda x: x / 2, errors)
        by_tap, by_logit = jax.jit(jax.grad(goal, argnums=(0, 1)))(half, jnp.asarray(own / 2), *args)
        change = float(_objective(objective, exact, last) - _objective(objective, exact, exact))
        found = [Share(layer=None, point="logits", share=number(float(by_logit @ own)))]
        for point, e in errors.items():
            product = np.asarray(by_tap[point] * e)
            if POINTS[point].per_layer:
                each = product.reshape(layers, -1).sum(axis=1)
                found += [Share(layer=i, point=point, share=number(float(x))) for i, x in enumerate(each)]
            else:
                found.append(Share(layer=None, point=point, share=number(float(product.sum()))))
    total = sum(float(s.share) for s in found)
    return given(
        fp64=number(float(_objective(objective, exact, exact))), change=number(change), explained=number(total),
        absolute=number(sum(abs(float(s.share)) for s in found)),
        shares=tuple(sorted(found, key=lambda s: -abs(float(s.share)))),
    )  # fmt: skip


def _objective(name: str, exact: Any, logits: Any) -> Any:
    """Return the objective of one row of logits [V]."""
    order = np.argsort(-np.asarray(exact), kind="stable")
    if name == "margin":
        return logits[int(order[0])] - logits[int(order[1])]
    log_q = jax.nn.log_softmax(jnp.asarray(logits))
    if name == "logprob":
        return log_q[int(order[0])]
    log_p = jax.nn.log_softmax(jnp.asarray(exact))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def _stacked(recorded: Recorded, prompt: str, point: str, layers: int, n: int) -> Array | None:
    """Return a point's rows of prefill in FP64 as a tap gives them, [L, 1, T, …] or [1, T, …]; None unless whole."""
    found = []
    for layer in range(layers) if POINTS[point].per_layer else (None,):
        rows = recorded.rows(prompt, "prefill", layer, point)
        if rows is None or len(rows.positions) != n:
            return None
        found.append(widen(rows.values)[None])
    return np.stack(found) if POINTS[point].per_layer else found[0]

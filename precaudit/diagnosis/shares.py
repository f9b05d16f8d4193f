"""Does it matter? The share every operation's own error has in a change of logits, by the FP64 gradient (JAX)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.arrays import Array, widen
from precaudit.comparison.recorded import Recorded
from precaudit.diagnosis.records import Share, Shares
from precaudit.graphs.decoder import LOGITS, POINTS, present
from precaudit.metrics.sizes import norm, ratio
from precaudit.records import number
from precaudit.tracing.programs import Capture, bucket, jitted, prefill_program
from precaudit.tracing.shadowed import exact_tables
from precaudit.tracing.subject import Subject
from precaudit.transforms import plant, shadow

NODES = (0.5 - 3**-0.5 / 2, 0.5 + 3**-0.5 / 2)
PLANTED = tuple(p.name for p in POINTS.values() if p.kind not in ("stream", "cache", "head") and p.within is None)


def shares(recorded: Recorded, subject: Subject, prompt: str, objective: str = "margin") -> Shares:
    """Return the signed share of every recorded operation's own error in what an objective of the last row changed.

    ``objective``: ``margin`` (top-1 minus top-2 logit of FP64), ``logprob`` (of the token FP64 prefers; ``logprob:7``
    of token 7) or ``kl`` (FP64 ‖ candidate). A share is ⟨gradient, error⟩, the gradient averaged over two points
    between FP64 and the candidate (Gauss-Legendre: exact to fourth order). Raises CannotLift for a program without
    FP64 meaning.
    """
    tokens = np.asarray(recorded.run.prompts[prompt].tokens, np.int32)
    layers, n = subject.config.layers, len(tokens)
    values = {p: v for p in PLANTED if (v := _stacked(recorded, prompt, p, layers, n)) is not None}
    candidate = recorded.tensor(prompt, "prefill", 0, None, LOGITS)
    lacking = [p for p in PLANTED if p in present(subject.config.sparse) and p not in values]
    if candidate is None or lacking:
        why = f"shares need every operation of prefill ({lacking[0] if lacking else LOGITS} is not whole): --points all"
        return unknown_shares(prompt, why, objective)
    if not np.isfinite(widen(candidate)[-1]).all():
        return unknown_shares(prompt, f"the logits of {prompt} are not finite", objective)
    with jax.enable_x64(True):
        program, args = _prefill(subject, tokens)
        errors = _forced(program, subject)(values, *args)
        del values
        add = plant(program, "add", subject.lift)
        exact = np.asarray(jitted(shadow(program, subject.lift), subject.platform)(*args))[0, 0]
        made = np.asarray(jitted(add, subject.platform)(errors, *args)[0])[0, 0]
        last = widen(candidate)[-1]
        own = last - made  # the error of the output matrix, the last operation

        def goal(d: Any, e: Any, *a: Any) -> Any:
            return _objective(objective, exact, add(d, *a)[0][0, 0] + e)

        def at(t: Any, d: Any, e: Any, *a: Any) -> Any:
            """Sums of gradient · error over each layer of each point, at the fraction t of the errors."""
            by_tap, by_logit = jax.grad(goal, argnums=(0, 1))(jax.tree.map(lambda x: t * x, d), t * e, *a)
            return {k: _per_step(k, by_tap[k] * d[k]) for k in d}, by_logit @ e

        rule = jitted(at, subject.platform)
        found = [rule(t, errors, own, *args) for t in NODES]
        sums = {k: np.mean([np.asarray(taps[k]) for taps, _ in found], axis=0) for k in errors}
        parts = [Share(layer=None, point=LOGITS, share=number(float(np.mean([float(x) for _, x in found]))))]
        for point, each in sums.items():
            for i, x in enumerate(np.atleast_1d(each)):
                parts.append(Share(layer=i if POINTS[point].per_layer else None, point=point, share=number(float(x))))
        change = float(_objective(objective, exact, last) - _objective(objective, exact, exact))
        start = float(_objective(objective, exact, exact))
    total = sum(float(s.share) for s in parts)
    return Shares(
        run="", prompt=prompt, objective=objective, fp64=number(start), change=number(change), explained=number(total),
        absolute=number(sum(abs(float(s.share)) for s in parts)),
        shares=tuple(sorted(parts, key=lambda s: -abs(float(s.share)))),
    )  # fmt: skip


def _prefill(subject: Subject, tokens: Array) -> tuple[Any, tuple[Any, ...]]:
    """Return prefill of one prompt without padding as a function of its last row's logits [1, 1, V], and arguments."""
    n = len(tokens)

    def program(*a: Any) -> Any:
        params, tables, *rest = a
        return subject.decoder.prefill(params, tables, rest[0], rest[1], rest[2], None)[0]

    rows = np.asarray([[n - 1]], np.int32)
    return program, (subject.parameters, exact_tables(subject, n), tokens[None], np.zeros(1, np.int32), rows)


def own_errors(subject: Subject, tokens: Array) -> dict[str, float]:
    """Return every point's relative own error in prefill of one prompt, over all layers, in the program as it runs."""
    n = len(tokens)
    capture = Capture(frozenset(PLANTED), tuple(range(subject.config.layers)))
    padded = np.zeros((1, bucket(n)), np.int32)
    padded[0, :n] = tokens
    taps = prefill_program(subject, capture)(
        subject.parameters, subject.tables(bucket(n)), padded, np.zeros(1, np.int32), np.asarray([[n - 1]], np.int32),
        None, None,
    )[2]  # fmt: skip
    values = {p: np.asarray(x)[(slice(None),) * POINTS[p].per_layer + (slice(0, 1), slice(0, n))]
              for p, x in taps.items()}  # fmt: skip
    del taps
    with jax.enable_x64(True):
        program, args = _prefill(subject, tokens)
        errors = _forced(program, subject)(values, *args)
    return {p: ratio(norm(np.asarray(e)), norm(widen(values[p]) - np.asarray(e))) for p, e in errors.items()}


def _forced(program: Any, subject: Subject) -> Any:
    """Return the compiled own errors of a program's taps; its outputs are left out, and so is the output matrix."""
    planted = plant(program, "force", subject.lift)
    return jitted(lambda values, *args: planted(values, *args)[1], subject.platform)


def unknown_shares(prompt: str, why: str, objective: str = "margin") -> Shares:
    """Return that the shares could not be told."""
    return Shares(
        run="", prompt=prompt, objective=objective, fp64="nan", change="nan", explained="nan", absolute="nan",
        shares=(), unknown=why,
    )  # fmt: skip


def _per_step(point: str, x: Any) -> Any:
    """Sum a product over everything but layers."""
    return x.reshape(x.shape[0], -1).sum(axis=1) if POINTS[point].per_layer else x.sum()


def _objective(name: str, exact: Any, logits: Any) -> Any:
    """Return the objective of one row of logits [V]."""
    order = np.argsort(-np.asarray(exact), kind="stable")
    if name == "margin":
        return logits[int(order[0])] - logits[int(order[1])]
    log_q = jax.nn.log_softmax(jnp.asarray(logits))
    if name.startswith("logprob"):
        token = name.partition(":")[2]
        return log_q[int(token) if token else int(order[0])]
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

"""Does it matter? The share every operation's own error has in a change of logits, by the FP64 gradient (JAX)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.diagnosis.evidence.records import Share, Shares
from precaudit.interpreters.jaxpr import plant, shadow
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.programs import Capture, jit_program, prefill_program
from precaudit.recording.tracing.shadowed import exact_tables
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import LOGITS, POINTS, present
from precaudit.schema.lengths import bucket
from precaudit.schema.metrics.logits import is_distribution
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records.base import json_number

NODES = (0.5 - 3**-0.5 / 2, 0.5 + 3**-0.5 / 2)
Goal = Callable[[Any], Any]  # a number of a program's output

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
    values = {p: v for p in PLANTED if (v := _stack_rows(recorded, prompt, p, layers, n)) is not None}
    candidate = recorded.tensor(prompt, "prefill", 0, None, LOGITS)
    lacking = [p for p in PLANTED if p in present(subject.config.sparse) and p not in values]
    if candidate is None or lacking:
        why = f"shares need every operation of prefill ({lacking[0] if lacking else LOGITS} is not whole): --points all"
        return unknown_shares(prompt, why, objective)
    if not is_distribution(widen(candidate)[-1]):
        return unknown_shares(prompt, f"the logits of {prompt} are not finite", objective)
    with jax.enable_x64(True):
        program, args = prefill_to_logits(subject, tokens, np.full((1, n), n))
        lifted = LiftedProgram(program, subject.lift, lambda f: jit_program(f, subject.platform))
        taps = RecordedTaps(values, {p: layers for p in values if POINTS[p].per_layer})
        found = split_change(lifted, args, taps, widen(candidate)[-1], lambda exact: goal_of(objective, exact))
    return found.record(prompt, objective, LOGITS)


class ChangeSplit(NamedTuple):
    """What changed a number of a program's output, in the order of program and steps: {point: share of each step}.

    ``start`` and ``change``: that number in FP64, and what the candidate's is more; ``last``: the share of what no
    point comes after, the output's own error. ``stepped``: points that are in a loop over steps.
    """

    start: float
    change: float
    last: float
    shares: dict[str, Array]
    stepped: frozenset[str]

    def record(self, prompt: str, objective: str, output: str) -> Shares:
        """Return a line of shares.jsonl, largest first."""
        parts = [Share(layer=None, point=output, share=json_number(self.last))]
        for point, each in self.shares.items():
            for i, x in enumerate(each):
                parts.append(
                    Share(layer=i if point in self.stepped else None, point=point, share=json_number(float(x)))
                )
        return Shares(
            run="",
            prompt=prompt,
            objective=objective,
            fp64=json_number(self.start),
            change=json_number(self.change),
            explained=json_number(sum(float(s.share) for s in parts)),
            absolute=json_number(sum(abs(float(s.share)) for s in parts)),
            shares=tuple(sorted(parts, key=lambda s: -abs(float(s.share)))),
        )


@dataclass(frozen=True)
class LiftedProgram:
    """A function, the FP64 meanings of primitives in it, and how functions of it are compiled."""

    call: Callable[..., Any]
    lift: Mapping[str, Any] | None = None
    compiled: Callable[..., Any] = jax.jit


@dataclass(frozen=True)
class RecordedTaps:
    """Every tap as recorded.

    ``steps``: how many steps the taps inside scans have, those that are told one by one; ``held``: what was decided by
    loops, which FP64 goes on with.
    """

    values: dict[str, Array]
    steps: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, Array] = field(default_factory=dict)


def split_change(
    of: LiftedProgram, args: tuple[Any, ...], taps: RecordedTaps, recorded: Array, goal: Callable[[Array], Goal]
) -> ChangeSplit:
    """Return the shares of every tap's own error in ``goal(FP64's output)`` of what a program returns, [N].

    ``recorded``: the output [N] in FP64. All own errors together turn FP64 into what was recorded, so nothing but the
    curvature of the goal is left over. The taps' values are let go. Under ``jax.enable_x64(True)``.
    """
    program, lift, compiled = of.call, of.lift, of.compiled
    values, steps, held = taps.values, taps.steps, dict(taps.held)
    planted, adding = plant(program, "force", lift), plant(program, "add", lift)

    def add(d: Any, *a: Any) -> Any:
        return adding({**d, **held}, *a)

    errors = compiled(lambda planted_values, *a: planted({**planted_values, **held}, *a)[1])(values, *args)
    values.clear()
    exact = np.asarray(compiled(lambda *a: add({}, *a)[0] if held else shadow(program, lift)(*a))(*args))
    made = np.asarray(compiled(add)(errors, *args)[0])
    own = np.subtract(recorded, made, out=np.zeros_like(made), where=recorded != made)  # equal infinities are no error
    number_of = goal(exact)

    def each(d: Any, e: jax.Array, *a: Any) -> Any:
        return number_of(add(d, *a)[0] + e)

    def at(t: jax.Array, d: Any, e: jax.Array, *a: Any) -> Any:
        """Sums of gradient · error over each step of each point, at the fraction t of the errors."""
        by_tap, by_output = jax.grad(each, argnums=(0, 1))(jax.tree.map(lambda x: t * x, d), t * e, *a)
        return {k: (by_tap[k] * d[k]).reshape(steps.get(k, 1), -1).sum(axis=1) for k in d}, by_output @ e

    rule = compiled(at)
    found = [rule(t, errors, own, *args) for t in NODES]
    start = float(number_of(exact))
    return ChangeSplit(
        start,
        float(number_of(recorded)) - start,
        float(np.mean([float(x) for _, x in found])),
        {k: np.mean([np.asarray(by_tap[k]) for by_tap, _ in found], axis=0) for k in errors},
        frozenset(steps),
    )


def prefill_to_logits(subject: Subject, tokens: Array, lengths: Array) -> tuple[Any, tuple[Any, ...]]:
    """Return prefill of tokens [T] without padding as a function of its last row's logits [V], and arguments.

    ``lengths`` [1, T]: as ``Subject.tables`` takes them.
    """
    n = len(tokens)

    def program(*a: Any) -> Any:
        params, tables, *rest = a
        return subject.decoder.prefill(params, tables, rest[0], rest[1], rest[2], None)[0][0, 0]

    rows = np.asarray([[n - 1]], np.int32)
    return program, (
        subject.parameters,
        exact_tables(subject, n, lengths),
        tokens[None],
        np.zeros(1, np.int32),
        rows,
    )


def own_errors(subject: Subject, tokens: Array) -> dict[str, float]:
    """Return every point's relative own error in prefill of one prompt, over all layers, in the program as it runs."""
    n = len(tokens)
    capture = Capture(frozenset(PLANTED), tuple(range(subject.config.layers)))
    padded = np.zeros((1, bucket(n)), np.int32)
    padded[0, :n] = tokens
    taps = prefill_program(subject, capture)(
        subject.parameters,
        subject.tables(bucket(n), np.full((1, bucket(n)), n)),
        padded,
        np.zeros(1, np.int32),
        np.asarray([[n - 1]], np.int32),
        None,
        None,
    )[2]
    values = {
        p: np.asarray(x)[(slice(None),) * POINTS[p].per_layer + (slice(0, 1), slice(0, n))] for p, x in taps.items()
    }
    del taps
    with jax.enable_x64(True):
        program, args = prefill_to_logits(subject, tokens, np.full((1, n), n))
        errors = _own_errors(program, subject)(values, *args)
    return {p: ratio(norm(np.asarray(e)), norm(widen(values[p]) - np.asarray(e))) for p, e in errors.items()}


def _own_errors(program: Any, subject: Subject) -> Any:
    """Return the compiled own errors of a program's taps; its outputs are left out, and so is the output matrix."""
    planted = plant(program, "force", subject.lift)
    return jit_program(lambda values, *args: planted(values, *args)[1], subject.platform)


def unknown_shares(prompt: str, why: str, objective: str = "margin") -> Shares:
    """Return that the shares could not be told."""
    return Shares(
        run="",
        prompt=prompt,
        objective=objective,
        fp64="nan",
        change="nan",
        explained="nan",
        absolute="nan",
        shares=(),
        unknown=why,
    )


def goal_of(name: str, exact: Any) -> Goal:
    """Return the objective as a function of one row of logits [V]; ``exact``: FP64's."""
    order = np.argsort(-np.asarray(exact), kind="stable")
    if name == "margin":
        return lambda logits: logits[int(order[0])] - logits[int(order[1])]
    if name.startswith("logprob"):
        token = name.partition(":")[2]
        chosen = int(token) if token else int(order[0])
        return lambda logits: jax.nn.log_softmax(jnp.asarray(logits))[chosen]
    log_p = jax.nn.log_softmax(jnp.asarray(exact))

    def divergence(logits: Any) -> Any:
        d = log_p - jax.nn.log_softmax(jnp.asarray(logits))
        return jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0.0, d))  # a token that cannot be adds nothing

    return divergence


def _stack_rows(recorded: Recorded, prompt: str, point: str, layers: int, n: int) -> Array | None:
    """Return a point's rows of prefill in FP64 as a tap gives them, [L, 1, T, …] or [1, T, …]; None unless whole."""
    found = []
    for layer in range(layers) if POINTS[point].per_layer else (None,):
        rows = recorded.rows(prompt, "prefill", layer, point)
        if rows is None or len(rows.positions) != n:
            return None
        found.append(widen(rows.values)[None])
    return np.stack(found) if POINTS[point].per_layer else found[0]

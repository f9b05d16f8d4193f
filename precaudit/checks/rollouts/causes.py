"""What makes a drawn token's log-probability differ between rollout and trainer: each operation's share, and a verdict.

The worst tokens' sequences are recorded again, fed the tokens that were drawn: decode as the rollout made it, rescore
as a trainer's prefill makes it. Each view's values, put into one FP64 prefill of the sequence, give every operation's
own error and its share of what the view's log-probability is off from FP64's (evidence/shares.py); the mismatch is the
difference of the two. Whether rounding explains the errors, or state or formula is wrong, the gate says of that run.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import jax
import numpy as np
from msgspec.structs import replace

from precaudit.checks.rollouts.limits import ENGINE
from precaudit.checks.rollouts.parity import Parity
from precaudit.checks.rollouts.reading import Rollout
from precaudit.diagnosis.evidence.records import Share
from precaudit.diagnosis.evidence.shares import (
    PLANTED,
    ChangeSplit,
    Goal,
    LiftedProgram,
    RecordedTaps,
    goal_of,
    prefill_to_logits,
    split_change,
)
from precaudit.interpreters.jaxpr import CannotLift
from precaudit.judging.gate import judge_found
from precaudit.numbers.arrays import Array, widen
from precaudit.progress import Advance, Progress, silent
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison
from precaudit.recording.tracing.programs import jit_program
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.graphs.decoder import LOGITS, POINTS, present
from precaudit.schema.lengths import row_lengths
from precaudit.schema.places import Place
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import Count, Index, Number, Record, json_number, value
from precaudit.schema.selection import Selection

View = Literal["decode", "rescore"]
MOST = 12  # shares that are kept, largest first


class TokenCause(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="cause"):
    """Why a token's log-probability in decode is not rescore's under one policy.

    ``index``: of the drawn token ``token`` in sequence ``id``; ``engine``: what it was drawn with, less the trainer's;
    ``change``: log p of decode less that of rescore, nats; ``decode``, ``rescore``: what each is off from FP64.
    ``shares``: of operations' own errors in the change, largest first, ``explained`` their sum, all of them.
    ``points``: for each operation the sum of its shares over layers, and of their sizes: shares cancel.
    ``verdict``: of the run that was recorded: rounding (all errors are explained), or the worst kind of record that is
    not. ``unknown``: why there are no shares.
    """

    id: str
    policy: str
    index: Index
    token: Index
    engine: Number
    change: Number = "nan"
    decode: Number = "nan"
    rescore: Number = "nan"
    explained: Number = "nan"
    shares: tuple[Share, ...] = ()
    points: tuple[tuple[str, Number, Number], ...] = ()
    verdict: str = "unknown"
    records: Count = 0
    unknown: str | None = None


class WorstToken(NamedTuple):
    """A rollout, the index of the token farthest from its trainer's log-probability, and by how much, nats."""

    rollout: Rollout
    at: int
    apart: float


def worst_of(found: Parity, rollouts: Sequence[Rollout], count: int) -> list[WorstToken]:
    """Return the worst token against the policy's own prefill, of the ``count`` sequences where it is worst."""
    by_id = {r.id: r for r in rollouts}
    told = [
        WorstToken(by_id[e.id], e.worst[0], value(e.worst[2]) - value(e.worst[3]))
        for e in found.each
        if (e.rollout, e.trainer) == (ENGINE, "policy") and e.worst is not None and e.id is not None
    ]
    return sorted(told, key=lambda w: -abs(w.apart))[:count]


def causes(
    subject: Subject, chosen: Sequence[WorstToken], cache: Path, temperature: float = 1.0, tell: Advance = silent
) -> list[TokenCause]:
    """Return why the chosen tokens' log-probabilities differ between decode and rescore of ``subject``.

    ``cache``: where FP64 references are kept; ``temperature``: what logits are divided by before softmax.
    """
    return [_cause(subject, w, cache, temperature, tell) for w in chosen]


def _cause(subject: Subject, w: WorstToken, cache: Path, temperature: float, tell: Advance) -> TokenCause:
    r, policy = w.rollout, subject.policy.name
    with TemporaryDirectory() as folder:
        options = TraceOptions(w.at, forced={r.id: r.tokens}, command="precaudit rollout --explain")
        prompts = [Prompt(id=r.id, tokens=r.prompt)]
        progress, select = Progress(advance=tell), Selection.parse(points="all")
        run = trace(subject, Path(folder) / "run", prompts, select, options, progress)
        found = compare(run, options=CompareOptions(accum=(), cache=cache), tell=tell)
        verdict, records = _verdict(found)
        cause = TokenCause(
            id=r.id,
            policy=policy,
            index=w.at,
            token=r.tokens[w.at],
            engine=json_number(w.apart),
            verdict=verdict,
            records=records,
        )
        tell(0, 1, "shares of the mismatch")
        try:
            return _with_shares(cause, subject, Recorded.of(run), temperature)
        except CannotLift as error:
            return replace(cause, unknown=str(error))


def _verdict(found: Comparison[Run]) -> tuple[str, int]:
    """Return whether rounding explains a run's errors, or the kind of the first record that fails, and the records."""
    judged = judge_found(found)
    if judged.exit_code == 0:
        return "rounding", sum(judged.counts.values())
    bad = [v for v in judged.verdicts if v.status in ("fail", "nonfinite")] or list(judged.verdicts)
    return (bad[0].kind if bad else "unknown"), sum(judged.counts.values())


def _with_shares(cause: TokenCause, subject: Subject, recorded: Recorded, temperature: float) -> TokenCause:
    lacking = [p for p in PLANTED if p in present(subject.config.sparse) and p not in recorded.requested.points]
    if lacking:
        return replace(cause, unknown=f"the program shows no {lacking[0]}")
    views: tuple[View, View] = ("decode", "rescore")
    decode, rescore = (_split_of(subject, recorded, cause, v, temperature) for v in views)
    change = decode.change - rescore.change
    parts = [Share(layer=None, point=LOGITS, share=json_number(decode.last - rescore.last))]
    for point, each in decode.shares.items():
        for i, x in enumerate(each - rescore.shares[point]):
            parts.append(Share(layer=i if point in decode.stepped else None, point=point, share=json_number(float(x))))
    sums: dict[str, list[float]] = {}
    for s in parts:
        sums.setdefault(s.point, []).append(float(s.share))
    points = [(name, sum(each), sum(map(abs, each))) for name, each in sums.items()]
    return replace(
        cause,
        change=json_number(change),
        decode=json_number(decode.change),
        rescore=json_number(rescore.change),
        explained=json_number(sum(x for _, x, _ in points)),
        shares=tuple(sorted(parts, key=lambda s: -abs(float(s.share)))[:MOST]),
        points=tuple(
            (name, json_number(x), json_number(size)) for name, x, size in sorted(points, key=lambda p: -p[2])
        ),
    )


def _split_of(subject: Subject, recorded: Recorded, cause: TokenCause, view: View, temperature: float) -> ChangeSplit:
    """Return every operation's share in what a view's log-probability of the token is off from FP64's."""
    prompt, step = cause.id, cause.index

    def goal(exact: Array) -> Goal:
        of = goal_of(f"logprob:{cause.token}", exact)
        return lambda logits: of(logits / temperature)

    first = len(recorded.run.prompts[prompt].tokens)
    n, fed = first + step, np.asarray(recorded.fed_tokens(prompt), np.int32)
    layers = subject.config.layers
    points = [p for p in PLANTED if p in present(subject.config.sparse)]
    values = {p: _stack_rows(recorded, prompt, view, p, layers, n) for p in points}
    call = step if view == "decode" else 0
    logits = _at(recorded, Place(prompt, view, call, None, LOGITS), np.array([n - 1]), n)[0]
    lengths = row_lengths("rescore" if view == "rescore" else "prefill", first, len(fed), n)
    with jax.enable_x64(True):
        program, args = prefill_to_logits(subject, fed[:n], lengths[None])
        lifted = LiftedProgram(program, subject.lift, lambda f: jit_program(f, subject.platform))
        taps = RecordedTaps(values, {p: layers for p in points if POINTS[p].per_layer})
        return split_change(lifted, args, taps, logits, goal)


def _stack_rows(recorded: Recorded, prompt: str, view: View, point: str, layers: int, n: int) -> Array:
    """Return a point's rows of the first n positions in FP64 as a tap of prefill gives them, a layer each."""
    per_layer = POINTS[point].per_layer
    found = [_rows(recorded, prompt, view, point, i, n)[None] for i in (range(layers) if per_layer else (None,))]
    return np.stack(found) if per_layer else found[0]


def _rows(recorded: Recorded, prompt: str, view: View, point: str, layer: int | None, n: int) -> Array:
    """Return a view's rows of a point: prefill's up to the last of the prompt, and the view's own from there."""
    first = len(recorded.run.prompts[prompt].tokens) - 1
    parts = [_at(recorded, Place(prompt, "prefill", 0, layer, point), np.arange(first), n)]
    if view == "decode":
        parts += [
            _at(recorded, Place(prompt, view, p - first, layer, point), np.array([p]), n) for p in range(first, n)
        ]
    else:
        parts.append(_at(recorded, Place(prompt, view, 0, layer, point), np.arange(first, n), n))
    return np.concatenate(parts, axis=POINTS[point].axes.index("T"))


def _at(recorded: Recorded, place: Place, positions: Array, n: int) -> Array:
    """Return recorded rows at positions, in FP64; where they are over keys, of n keys, those not seen 0."""
    values, held, point = recorded.tensor(*place), recorded.rows_of(*place), place.point
    assert values is not None, place
    assert held is not None, place
    x = widen(np.take(values, np.searchsorted(held, positions), axis=POINTS[point].axes.index("T")))
    if "S" not in POINTS[point].axes:
        return x
    width = x.shape[-1]
    return x[..., :n] if width >= n else np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n - width)])

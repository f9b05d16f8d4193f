"""Log-probabilities of given tokens: as a policy's prefill makes them, and in FP64. No [B, T, V] is kept."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.checks.rollouts.reading import Rollout
from precaudit.errors import UserError
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.models.jax_decoder.decoder import RowReduction
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.recording.tracing.programs import jit_program
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.lengths import bucket
from precaudit.schema.metrics.logits import log_softmax
from precaudit.schema.prompts import check_tokens

BATCH = 8
ROWS = 32  # logits rows of a sequence that are there at once
ELEMENTS = 1 << 25  # FP64 logits that are there at once: 256 MiB


def check_rollout_tokens(subject: Subject, rollouts: Sequence[Rollout]) -> None:
    """Raise UserError where a rollout's tokens are not of the model's vocabulary or exceed its context."""
    for r in rollouts:
        try:
            check_tokens(r.id, (*r.prompt, *r.tokens), 0, subject.config.vocab, subject.config.context)
        except UserError as error:
            raise UserError(str(error).replace("prompt ", "rollout ", 1)) from None


def check_scoring(subject: Subject) -> None:
    """Raise UserError where the subject's mesh does not divide what is scored together."""
    if BATCH % subject.mesh.data:
        raise UserError(
            f"--mesh {subject.mesh}: data={subject.mesh.data} does not divide {BATCH}, the sequences scored together"
        )


def pad_rows(values: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Return [sequences, tokens] in FP64, padded with 0, and the mask of what is there."""
    out = np.zeros((len(values), max(map(len, values), default=0)))
    mask = np.zeros(out.shape, bool)
    for i, x in enumerate(values):
        out[i, : len(x)], mask[i, : len(x)] = x, True
    return out, mask


def by_policy(subject: Subject, rollouts: Sequence[Rollout], temperature: float, tell: Advance) -> list[Array]:
    """Return log-probabilities [T] in FP64 of each rollout's tokens, by one prefill under the subject's policy.

    The logits, rounded to the policy's format, are divided by ``temperature`` in float32, and log softmax is taken in
    float32: a trainer's view. Raises UserError as ``check_scoring``.
    """
    check_scoring(subject)
    found: list[Array] = [np.zeros(0)] * len(rollouts)
    score = _program(subject.decoder, tuple(compiler_options(subject.policy).items()), subject.platform)
    done, total = 0, sum(bool(r.tokens) for r in rollouts)
    for length, rows, chosen in _batches(rollouts):
        tokens, at, next_ = (np.zeros((BATCH, n), np.int32) for n in (length, rows, rows))
        turned = np.zeros(tokens.shape, np.int64)  # a trainer's prefill has the last token, too
        for b, i in enumerate(chosen):
            r = rollouts[i]
            whole, n = (*r.prompt, *r.tokens), len(r.tokens)
            tokens[b, : len(whole) - 1], next_[b, :n] = whole[:-1], r.tokens
            turned[b] = len(whole)
            at[b, :n] = np.arange(len(r.prompt) - 1, len(whole) - 1)
        given = subject.put_by_prompt((tokens, np.zeros(BATCH, np.int32), at, next_))
        *where, ids = given
        targets = Targets(ids, jnp.float32(temperature))
        made = score(subject.parameters, subject.tables(length, turned), *where, targets)
        values = np.asarray(made, np.float64)
        for b, i in enumerate(chosen):
            found[i] = values[b, : len(rollouts[i].tokens)]
        done += len(chosen)
        tell(done, total, "scoring under the policy")
    return found


def _batches(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (padded length, padded logits rows, which rollouts) of rollouts that have tokens, like with like."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, r in enumerate(rollouts):
        if r.tokens:
            groups.setdefault(buckets_of(r), []).append(i)
    for (length, rows), members in sorted(groups.items()):
        yield from ((length, rows, members[k : k + BATCH]) for k in range(0, len(members), BATCH))


def buckets_of(r: Rollout) -> tuple[int, int]:
    """Return the lengths that a rollout, and what was drawn of it, are padded to."""
    return bucket(len(r.prompt) + len(r.tokens)), bucket(len(r.tokens))


class Targets(NamedTuple):
    """The tokens [B, R] that log-probabilities are of, and what logits are divided by."""

    ids: jax.Array
    temperature: jax.Array


@lru_cache(maxsize=4)
def _program(decoder: Any, options: tuple[Any, ...], platform: str) -> Callable[..., Any]:
    """Return jitted (params, tables, tokens [B, T], starts, rows [B, R], targets) → [B, R]."""

    def score(
        params: Mapping[str, Any],
        tables: tuple[Any, ...],
        tokens: jax.Array,
        starts: jax.Array,
        rows: jax.Array,
        targets: Targets,
    ) -> Any:
        def block(logits: jax.Array, ids: jax.Array) -> Any:
            shares = jax.nn.log_softmax(logits.astype(jnp.float32) / targets.temperature, axis=-1)
            return jnp.take_along_axis(shares, ids[..., None], axis=-1)[..., 0]

        return decoder.of_rows(params, tables, tokens, starts, rows, RowReduction(targets.ids, block, ROWS))

    return jit_program(score, platform, compiler_options=dict(options) or None)


def by_fp64(model: Model, rollouts: Sequence[Rollout], temperature: float, tell: Advance) -> list[Array]:
    """Return log-probabilities [T] of each rollout's tokens by the FP64 reference."""
    return [x[0] for x in by_rounded_fp64(model, rollouts, temperature, (None,), tell)]


def by_rounded_fp64(
    model: Model, rollouts: Sequence[Rollout], temperature: float, formats: Sequence[Any], tell: Advance
) -> list[Array]:
    """Return the same [formats, T] of FP64's logits rounded to each dtype of ``formats``; None: not rounded."""
    found: list[Array] = [np.zeros((len(formats), 0))] * len(rollouts)
    most = max(1, ELEMENTS // model.config.vocab)
    waiting = [i for i, r in enumerate(rollouts) if r.tokens]
    total = len(waiting)
    while waiting:
        group = [waiting.pop(0)]
        held = len(rollouts[group[0]].tokens)
        while waiting and held + len(rollouts[waiting[0]].tokens) <= most:
            held += len(rollouts[waiting[0]].tokens)
            group.append(waiting.pop(0))
        chosen = [rollouts[i] for i in group]
        sequences = [np.array((*r.prompt, *r.tokens)[:-1]) for r in chosen]
        rows = [np.arange(len(r.prompt) - 1, len(s)) for r, s in zip(chosen, sequences, strict=True)]

        def emit(i: int, _layer: int | None, _point: str, logits: Array, group: Sequence[int] = group) -> None:
            ids = np.array(rollouts[group[i]].tokens)
            ways = (logits if f is None else logits.astype(f).astype(np.float64) for f in formats)
            found[group[i]] = np.stack([log_softmax(x / temperature)[np.arange(len(ids)), ids] for x in ways])

        turned = [np.full(len(s), len(s) + 1) for s in sequences]
        forward(model, Sequences(sequences, turned), [FP64], Wanted({LOGITS}, (), rows), emit)
        tell(total - len(waiting), total, "scoring in FP64")
    return found

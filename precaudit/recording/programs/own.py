"""The shipped decoder as a ``Program``: what audits anybody's program audits ours."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from precaudit.numbers.arrays import Array
from precaudit.recording.programs.program import Program
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.lengths import row_lengths


def prefill_of(subject: Subject, cases: Mapping[str, Sequence[int] | Array]) -> Program:
    """Return prefill of token ids of one length, without padding: call(params, tokens [T]) → logits [T, V].

    Of cases [B, T] all are [B, …]. The program announces the subject's policy.
    """
    given = {name: (jnp.asarray(tokens, jnp.int32),) for name, tokens in cases.items()}
    ((first,), *_) = given.values()
    n = first.shape[-1]

    def call(params: Any, tokens: Any) -> Any:
        (weights, tables), ids = params, jnp.atleast_2d(tokens)
        rows = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), ids.shape)
        logits, _ = subject.decoder.prefill(weights, tables, ids, jnp.zeros(len(ids), jnp.int32), rows, None)
        return logits.reshape(*tokens.shape, -1)

    tables = subject.tables(n, row_lengths("prefill", n, n, n)[None])
    return Program(
        call, (subject.parameters, tables), given, outputs=LOGITS, policy=subject.policy, weights=subject.reference
    )


def decode_of(subject: Subject, cases: Mapping[str, Sequence[int] | Array]) -> Program:
    """Return decode of given token ids from an empty cache: call(params, tokens, slot, ids, cache) → logits, cache.

    Tokens are one, or [B, 1] of cases [B, T]. The program announces the subject's policy.
    """
    ids = {name: jnp.asarray(tokens, jnp.int32) for name, tokens in cases.items()}
    first = next(iter(ids.values()))
    n = first.shape[-1]

    def call(params: Any, tokens: Any, slot: Any, _ids: Any, cache: Any) -> Any:
        (weights, tables), now = params, tokens.reshape(-1)
        starts = jnp.zeros(len(now), jnp.int32)
        logits, cache = subject.decoder.decode(weights, tables, now, starts, jnp.full(len(now), slot), cache)
        return logits.reshape(*(tokens.shape or (1,)), -1), cache

    def advance(inputs: Any, outputs: Any) -> Any:
        _, slot, ids, _ = inputs
        return token(ids, slot + 1), slot + 1, ids, outputs[1]

    def token(ids: Any, slot: Any) -> Any:
        return ids[slot] if ids.ndim == 1 else ids[:, slot][:, None]

    cache = subject.decoder.init_cache(len(jnp.atleast_2d(first)), n)
    given = {name: (token(x, 0), jnp.int32(0), x, cache) for name, x in ids.items()}
    tables = subject.tables(n, row_lengths("prefill", 1, n, n)[None])
    made = Program(call, (subject.parameters, tables), given, n - 1, advance, outputs=(LOGITS, "cache"))
    return _announced(subject, made)


def _announced(subject: Subject, program: Program) -> Program:
    return replace(program, policy=subject.policy, weights=subject.reference)

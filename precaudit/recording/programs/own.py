"""The shipped decoder as a ``Program``: what audits anybody's program audits ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from precaudit.recording.programs.program import Program
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.lengths import row_lengths


def prefill_of(subject: Subject, cases: Mapping[str, Sequence[int]]) -> Program:
    """Return prefill of token ids of one length, without padding: call(params, tokens [T]) → logits [T, V]."""
    n = len(next(iter(cases.values())))

    def call(params: Any, tokens: Any) -> Any:
        (weights, tables), rows = params, jnp.arange(n, dtype=jnp.int32)[None]
        logits, _ = subject.decoder.prefill(weights, tables, tokens[None], jnp.zeros(1, jnp.int32), rows, None)
        return logits[0]

    given = {name: (jnp.asarray(tokens, jnp.int32),) for name, tokens in cases.items()}
    tables = subject.tables(n, row_lengths("prefill", n, n, n)[None])
    return Program(call, (subject.parameters, tables), given, outputs=LOGITS)


def decode_of(subject: Subject, cases: Mapping[str, Sequence[int]]) -> Program:
    """Return decode of given token ids from an empty cache: call(params, token, slot, ids, cache) → logits, cache."""
    n = len(next(iter(cases.values())))

    def call(params: Any, token: Any, slot: Any, _ids: Any, cache: Any) -> Any:
        weights, tables = params
        logits, cache = subject.decoder.decode(weights, tables, token[None], jnp.zeros(1, jnp.int32), slot[None], cache)
        return logits[0], cache

    def advance(inputs: Any, outputs: Any) -> Any:
        _, slot, ids, _ = inputs
        return ids[slot + 1], slot + 1, ids, outputs[1]

    cache = subject.decoder.init_cache(1, n)
    ids = {name: jnp.asarray(tokens, jnp.int32) for name, tokens in cases.items()}
    given = {name: (x[0], jnp.int32(0), x, cache) for name, x in ids.items()}
    tables = subject.tables(n, row_lengths("prefill", 1, n, n)[None])
    return Program(call, (subject.parameters, tables), given, n - 1, advance, outputs=(LOGITS, "cache"))

"""The shipped decoder as a ``Program``: what audits anybody's program audits ours."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from precaudit.numbers.arrays import Array
from precaudit.recording.programs.program import Entry, Program
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.lengths import row_lengths

if TYPE_CHECKING:
    from precaudit.recording.tracing.subject import Subject


def prefill_call(subject: "Subject", cases: Mapping[str, Sequence[int] | Array]) -> Program:
    """Return prefill of token ids of one length, without padding: call(params, tokens [T]) → logits [T, V].

    Of cases [B, T] all are [B, …]. The program announces the subject's policy.
    """
    given = {name: (jnp.asarray(tokens, jnp.int32),) for name, tokens in cases.items()}
    ((first,), *_) = given.values()
    n = first.shape[-1]

    def call(params: tuple[Any, Any], tokens: jax.Array) -> Any:
        (weights, tables), ids = params, jnp.atleast_2d(tokens)
        rows = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), ids.shape)
        logits, _ = subject.decoder.prefill(weights, tables, ids, jnp.zeros(len(ids), jnp.int32), rows, None)
        return logits.reshape(*tokens.shape, -1)

    tables = subject.tables(n, row_lengths("prefill", n, n, n)[None])
    return Program(
        call, (subject.parameters, tables), given, outputs=LOGITS, policy=subject.policy, weights=subject.reference
    )


def decode_of(subject: "Subject", cases: Mapping[str, Sequence[int] | Array]) -> Program:
    """Return decode of given token ids from an empty cache: call(params, tokens, slot, ids, cache) → logits, cache.

    Tokens are one, or [B, 1] of cases [B, T]. The program announces the subject's policy.
    """
    ids = {name: jnp.asarray(tokens, jnp.int32) for name, tokens in cases.items()}
    first = next(iter(ids.values()))
    n = first.shape[-1]

    def call(params: tuple[Any, Any], tokens: jax.Array, slot: jax.Array, _ids: jax.Array, cache: Any) -> Any:
        (weights, tables), now = params, tokens.reshape(-1)
        starts = jnp.zeros(len(now), jnp.int32)
        logits, cache = subject.decoder.decode(weights, tables, now, starts, jnp.full(len(now), slot), cache)
        return logits.reshape(*(tokens.shape or (1,)), -1), cache

    def advance(inputs: Any, outputs: Any) -> Any:
        _, slot, ids, _ = inputs
        return token(ids, slot + 1), slot + 1, ids, outputs[1]

    def token(ids: jax.Array, slot: jax.Array) -> Any:
        return ids[slot] if ids.ndim == 1 else ids[:, slot][:, None]

    cache = subject.decoder.init_cache(len(jnp.atleast_2d(first)), n)
    given = {name: (token(x, 0), jnp.int32(0), x, cache) for name, x in ids.items()}
    tables = subject.tables(n, row_lengths("prefill", 1, n, n)[None])
    made = Program(call, (subject.parameters, tables), given, n - 1, advance, outputs=(LOGITS, "cache"))
    return _announce_policy(subject, made)


def served_of(subject: "Subject", cases: Mapping[str, Sequence[int]], steps: int) -> Program:
    """Return prefill of token ids [T] of one length, decode after it, greedy, and rescore of all tokens in one call.

    Decode begins with the last token of the prompt, at its position, from prefill's cache without that row: its first
    logits are prefill's last ones by another way, as in a model's run. ``steps`` more tokens follow. The program
    announces the subject's policy.
    """
    given = {name: (jnp.asarray(tokens, jnp.int32),) for name, tokens in cases.items()}
    ((first,), *_) = given.values()
    n, slots = len(first), len(first) + steps
    none = jnp.zeros(1, jnp.int32)

    def prefill(params: tuple[Any, Any], tokens: jax.Array) -> Any:
        weights, tables = params
        rows = jnp.arange(len(tokens), dtype=jnp.int32)[None]
        held = subject.decoder.init_cache(1, slots) if len(tokens) == n else None
        logits, cache = subject.decoder.prefill(weights, tables, tokens[None], none, rows, held)
        return logits[0], cache

    def decode(params: tuple[Any, Any], token: jax.Array, slot: jax.Array, cache: Any, ids: jax.Array) -> Any:
        weights, tables = params
        logits, cache = subject.decoder.decode(weights, tables, token[None], none, slot[None], cache)
        return logits[0], cache, ids

    def begin(inputs: Any, outputs: Any) -> Any:
        (tokens,), (logits, cache) = inputs, outputs
        ids = jnp.zeros(slots + 1, jnp.int32).at[:n].set(tokens).at[n].set(jnp.argmax(logits[-1]).astype(jnp.int32))
        held = jax.tree.map(lambda x: x.at[:, :, n - 1].set(0), cache)
        return tokens[-1], jnp.int32(n - 1), held, ids

    def advance(inputs: Any, outputs: Any) -> Any:
        (_, slot, _, ids), (logits, cache, _) = inputs, outputs
        chosen = ids.at[slot + 1].set(jnp.argmax(logits).astype(jnp.int32))
        ids = jnp.where(slot == n - 1, ids, chosen)  # the first token after the prompt is prefill's
        return ids[slot + 1], slot + 1, cache, ids

    def again(_inputs: Any, outputs: Any) -> Any:
        return (outputs[2][:slots],)

    tables = subject.tables(slots, row_lengths("prefill", n, slots, slots)[None])
    outputs = (LOGITS, "cache")
    then = {
        "decode": Entry(decode, begin, steps, advance, (*outputs, "ids"), tokens=0, start=1),
        "rescore": Entry(prefill, again, outputs=outputs, tokens=0),
    }
    made = Program(prefill, (subject.parameters, tables), given, outputs=outputs, tokens=0, entry="prefill", then=then)
    return _announce_policy(subject, made)


def _announce_policy(subject: "Subject", program: Program) -> Program:
    return replace(program, policy=subject.policy, weights=subject.reference)

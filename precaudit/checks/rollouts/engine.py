"""An engine of rollouts judged against FP64, by the formats that it computes in, and what explains the rest (JAX)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from precaudit.checks.rollouts.engine_rounding import EngineRounding, engine_noise, explain_engine, judge_engine
from precaudit.checks.rollouts.samples import Scored, open_tokenizer, samples_of
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.progress import Advance
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.policies import Policy, apply_settings, load_policy


def engine_rounding(
    engine: Subject, scored: Scored, rounded: Sequence[Array], model: Model, tell: Advance
) -> EngineRounding:
    """Return whether rounding in the engine's formats explains its log-probabilities, and if not, what does.

    ``rounded``: log-probabilities [sequences, tokens] by a prefill of ``engine`` and, where it may leave logits in 16
    bits, of FP64's logits rounded so. ``model``: the model in FP64.
    """
    values, exact = scored.sides["engine"], scored.sides["fp64"]
    there = np.isfinite(values) & (values <= 0) & np.isfinite(exact)
    where = scored.mask & (there | ~scored.mask).all(axis=1, keepdims=True)
    noise = engine_noise(exact, rounded, where) if where.any() else 0.0
    found = judge_engine(engine.policy.name, scored.rollouts, values, exact, noise, where)
    if found.status != "fail":
        return found
    apart = np.subtract(values, exact, out=np.full(exact.shape, np.nan), where=where)
    samples = samples_of(model, open_tokenizer(engine), scored, apart, tell)
    tell(0, 1, "what explains the engine's values")
    return explain_engine(found, samples)


def engine_policy(policy: Policy) -> Policy:
    """Return the formats that an engine is taken to compute in: the policy's, or bf16 where that is wider."""
    if FORMATS[policy.activations].itemsize <= 2:
        return policy
    return apply_settings(load_policy("bf16"), {"weights": policy.weights})


def narrow_logits(policy: Policy) -> Any:
    """Return the dtype of 16 bits that an engine of a policy may leave logits in; None where it keeps more."""
    return FORMATS[policy.activations].dtype if FORMATS[policy.activations].itemsize == 2 else None

"""FP64's logits around tokens of rollouts, and log-probabilities after other prompts: what mistakes are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from precaudit.checks.rollouts.hypotheses import Sample
from precaudit.checks.rollouts.limits import Side
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.scoring import ELEMENTS, by_fp64
from precaudit.errors import UserError
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.schema.graphs.decoder import LOGITS

TOKENS = 192  # of the sequences that are farthest off: mistakes are told apart by them, at FP64's price for each


@dataclass(frozen=True)
class Scored:
    """Rollouts with log-probabilities [sequences, tokens] of each side, and where there is a token.

    ``temperature``: what the engine is said to divide its logits by.
    """

    rollouts: Sequence[Rollout]
    sides: Mapping[Side, Array]
    mask: Array
    temperature: float


def samples_of(model: Model, tokenizer: Any, scored: Scored, apart: Array, tell: Advance) -> list[Sample]:
    """Return the tokens that are farthest from FP64, whole sequences of them, until they are enough.

    ``apart``: δ [sequences, tokens], NaN where nothing can be judged. ``tokenizer``: None where there is none.
    """
    others = {"the trainer": scored.sides["trainer"]} if "trainer" in scored.sides else {}
    rollouts, temperature = scored.rollouts, scored.temperature
    worst = np.nan_to_num(np.abs(apart)).max(axis=1, initial=0.0)
    most, held = min(TOKENS, max(1, ELEMENTS // (4 * model.config.vocab))), 0
    found: list[Sample] = []
    for i in np.argsort(-worst, kind="stable"):
        r = rollouts[int(i)]
        if not r.tokens or np.isnan(apart[i, : len(r.tokens)]).all() or (found and held >= most):
            continue
        kept = min(len(r.tokens), max(most - held, 8))
        cut = replace(r, tokens=r.tokens[:kept], logprobs=r.logprobs[:kept])
        changed = {what: replace(cut, prompt=p) for what, p in other_prompts(r.prompt, tokenizer).items()}
        values = by_fp64(model, list(changed.values()), temperature, tell)
        theirs = {name: x[i, :kept] for name, x in others.items()}
        found.append(_sample(model, cut, temperature, dict(zip(changed, values, strict=True)), theirs))
        held += kept
    return found


def _sample(
    model: Model, r: Rollout, temperature: float, prompts: dict[str, Array], others: dict[str, Array]
) -> Sample:
    whole, first, n = np.array((*r.prompt, *r.tokens)), len(r.prompt) - 1, len(r.tokens)
    rows = np.arange(max(first - 1, 0), len(whole))
    held: list[Array] = []
    forward(
        model,
        Sequences([whole]),
        [FP64],
        Wanted({LOGITS}, (), [rows]),
        lambda *given: held.append(given[-1]),
    )
    (logits,) = held
    before = logits[: n if first else n - 1]
    if not first:
        before = np.concatenate([np.full((1, logits.shape[1]), np.nan), before])
    at = first - int(rows[0])
    return Sample(
        np.array(r.logprobs),
        np.array(r.tokens),
        logits[at : at + n],
        before,
        logits[at + 1 : at + 1 + n],
        temperature,
        prompts,
        others,
    )


def other_prompts(prompt: tuple[int, ...], tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return what an engine may have read instead of a prompt, by what was done to it."""
    found = {"its first token is missing": prompt[1:], "its last token is missing": prompt[:-1]}
    if tokenizer is not None:
        plain = [t for t in prompt if not _is_special(tokenizer, t)]
        if len(plain) < len(prompt):
            found["its special tokens are missing"] = tuple(plain)
        if begins := _begins(tokenizer):
            twice = " twice" if prompt[: len(begins)] == begins else ""
            found[f"the tokenizer's first special tokens stand before it{twice}"] = (*begins, *prompt)
    every = {what: ids for what, ids in found.items() if ids}
    return {what: ids for i, (what, ids) in enumerate(every.items()) if ids not in list(every.values())[:i]}


def open_tokenizer(subject: Any) -> Any:
    """Return a model's tokenizer; None where it has none."""
    try:
        return subject.tokenizer
    except UserError:
        return None


def _is_special(tokenizer: Any, token: int) -> bool:
    """Whether a token is one that texts leave out."""
    return bool(tokenizer.decode([token])) and not tokenizer.decode([token], skip_special_tokens=True)


def _begins(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer puts before every text."""
    whole, bare = (tuple(tokenizer.encode("a", add_special_tokens=flag)) for flag in (True, False))
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:at]

"""Where two policies that draw by the same keys part, and whether FP64 holds the two tokens for a near tie."""

from collections.abc import Sequence

import numpy as np

from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.sampling import Sampling, noise
from precaudit.models.configs import with_window
from precaudit.models.numpy_decoder.forward import Decoding, Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64, of_policy
from precaudit.numbers.arrays import Array
from precaudit.recording.tracing.subject import Subject
from precaudit.references.comparison.prefill_decode import NEAR
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.policies import on_device
from precaudit.schema.records.base import Number, Record, json_number


class Divergence(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="divergence"):
    """The first token of a sequence that ``policy`` drew otherwise than ``against``: its index, and both ids.

    ``gap``: FP64's logit of the first id less that of the second, of drawn tokens with the temperature times the noise
    that both were drawn with: positive where FP64 takes the policy's token. ``sigma``: rms logit error of the emulated
    policy there, of the two that which errs more. ``near``: the gap's size is at most 4 sigma (docs/numerics.md: near
    tie); None: not known without FP64, or where top k or top p cut.
    """

    id: str
    policy: str
    against: str
    index: int
    tokens: tuple[int, int]
    gap: Number | None = None
    sigma: Number | None = None
    near: bool | None = None


def first_divergences(
    policy: str, against: str, drawn: Sequence[Rollout], before: Sequence[Rollout]
) -> list[Divergence]:
    """Return the first token of every sequence that is another; where both drew the same there is none."""
    found = []
    for a, b in zip(drawn, before, strict=True):
        pairs = zip(a.tokens, b.tokens, strict=False)
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if at is not None:
            both = (a.tokens[at], b.tokens[at])
            found.append(Divergence(id=a.id, policy=policy, against=against, index=at, tokens=both))
    return found


def judge_divergences(
    found: Sequence[Divergence],
    drawn: Sequence[tuple[int, Rollout]],
    subjects: tuple[Subject, Subject],
    sampling: Sampling,
) -> list[Divergence]:
    """Return the divergences with FP64's gap, sigma, and whether they are near ties.

    ``drawn``: (number, rollout) of every sequence; ``subjects``: those of ``policy`` and ``against``, whose weights are
    FP64's.
    """
    by_id = {r.id: (n, r) for n, r in drawn}
    chosen = [by_id[d.id] for d in found]
    if not chosen:
        return []
    sequences = [np.array((*r.prompt, *r.tokens[: d.index])) for d, (_, r) in zip(found, chosen, strict=True)]
    rows, errors = _rows(sequences, [len(r.prompt) for _, r in chosen], subjects)
    sigma = max(float(np.sqrt(np.mean(np.square(e)))) for e in errors)
    made = []
    for d, (n, _), logits, sequence in zip(found, chosen, rows, sequences, strict=True):
        scores = _scores(logits, sampling, n, len(sequence))
        gap = float(scores[d.tokens[0]] - scores[d.tokens[1]])
        near = None if sampling.kind == "cut" else abs(gap) <= NEAR * sigma
        made.append(
            Divergence(
                id=d.id,
                policy=d.policy,
                against=d.against,
                index=d.index,
                tokens=d.tokens,
                gap=json_number(gap),
                sigma=json_number(sigma),
                near=near,
            )
        )
    return made


def _rows(
    sequences: Sequence[Array], prompts: Sequence[int], subjects: tuple[Subject, Subject]
) -> tuple[list[Array], list[Array]]:
    """Return FP64's logits [V] after each sequence, and each policy's emulated errors [sequences, V].

    What was drawn came of decoding from a cache, but for a sequence's first token. FP64 is of the model, and a policy
    attends as its mask says.
    """
    policies = [on_device(s.policy, s.platform) for s in subjects]
    roundings = [FP64, *(of_policy(p) for p in policies)]
    decoding = [FP64, *(of_policy(p, decode=True) for p in policies)]
    own, read = subjects[1].config, subjects[1].checkpoint.tensors.read_tensor
    configs = [own, *(with_window(own, p) for p in policies)]
    last = [np.array([len(s) - 1]) for s in sequences]
    made: list[dict[int, Array]] = [{} for _ in sequences]
    for config in dict.fromkeys(configs):
        chosen = [k for k, other in enumerate(configs) if other == config]

        def emit(i: int, _layer: int | None, _point: str, logits: Array, chosen: Sequence[int] = chosen) -> None:
            made[i][next(k for k in chosen if k not in made[i])] = logits[0]

        some, cached = [roundings[k] for k in chosen], Decoding(prompts, [decoding[k] for k in chosen])
        forward(Model(config, read), Sequences(sequences, decoding=cached), some, Wanted({LOGITS}, (), last), emit)
    return [m[0] for m in made], [np.array([m[k] - m[0] for m in made]) for k in (1, 2)]


def _scores(logits: Array, sampling: Sampling, number_: int, position: int) -> Array:
    """Return what the largest of was drawn: FP64 logits [V], plus the temperature times the token's noise."""
    if sampling.kind == "greedy":
        return logits
    knobs = sampling.knobs(len(logits), 1)
    drawn = noise(knobs, np.uint32(number_), np.int32(position), len(logits))
    return np.asarray(logits + sampling.temperature * np.asarray(drawn, np.float64))

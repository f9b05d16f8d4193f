"""An engine's log-probabilities against our policy's prefill and FP64, on the same tokens, and limits on both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from precaudit.checks.rollouts.budgets import LimitOutcome, RolloutBudget, outcomes
from precaudit.checks.rollouts.engine import engine_rounding, narrow_logits
from precaudit.checks.rollouts.engine_rounding import EngineRounding
from precaudit.checks.rollouts.limits import ENGINE, RolloutRecord, Side
from precaudit.checks.rollouts.mismatch import mismatch
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.samples import Scored
from precaudit.checks.rollouts.scoring import by_policy, by_rounded_fp64, check_rollout_tokens, pad_rows
from precaudit.errors import CannotJudge
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance, silent
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.records.base import Number, json_number


@dataclass(frozen=True)
class Parity:
    """Records of the whole, then of each sequence; what the limits say; what the policy and the model are called.

    ``rounding``: whether rounding explains what the engine wrote, where that was asked for.
    ``sides``: log-probabilities [sequences, tokens] in FP64, of each side; ``mask``: where there is a token.
    """

    model: str
    policy: str
    whole: tuple[RolloutRecord, ...]
    each: tuple[RolloutRecord, ...]
    held: tuple[LimitOutcome, ...]
    rounding: EngineRounding | None = None
    sides: Mapping[Side, Array] = field(default_factory=dict, compare=False, repr=False)
    mask: Array = field(default_factory=lambda: np.zeros((0, 0), bool), compare=False, repr=False)

    def apart(self, rollout: Side, trainer: Side) -> Array:
        """Return δ = log π_trainer − log π_rollout [sequences, tokens]; NaN where there is no token, or a fault."""
        a, b = self.sides[trainer], self.sides[rollout]
        fault = (~np.isfinite(a) | ~np.isfinite(b) | (a > 0) | (b > 0)) & self.mask
        judged = self.mask & ~fault.any(axis=1, keepdims=True)
        return np.subtract(a, b, out=np.full(self.mask.shape, np.nan), where=judged)

    @property
    def faults(self) -> dict[str, int]:
        """{side: kind: tokens} of what is no log-probability, each side's once."""
        found: dict[str, int] = {}
        for r in self.whole:
            names = {"trainer": r.trainer, "rollout": r.rollout}
            for key, count in r.mismatch.faults.items():
                side, _, what = key.partition(": ")
                found[f"{names[side]}: {what}"] = count
        return found

    @property
    def exit_code(self) -> int:
        """1 for a broken limit, a value that is no log-probability or an engine that is off beyond rounding.

        3 where a limit's metric is not defined, or no token of an engine can be judged.
        """
        beyond = self.rounding is not None and self.rounding.status == "fail"
        if self.faults or beyond or any(h.status in ("fail", "nonfinite") for h in self.held):
            return 1
        unknown = self.rounding is not None and self.rounding.status == "unknown"
        return 3 if unknown or any(h.status == "unknown" for h in self.held) else 0


@dataclass(frozen=True)
class Checks:
    """What rollouts are held to: the policy's own prefill, ``trainer``'s, FP64's (``exact``), and limits."""

    trainer: Subject | None = None
    exact: bool = True
    limits: tuple[RolloutBudget, ...] = ()


def score_parity(
    subject: Subject,
    rollouts: Sequence[Rollout],
    checks: Checks = Checks(),
    temperature: float = 1.0,
    tell: Advance = silent,
    engine: Subject | None = None,
) -> Parity:
    """Score the rollouts' tokens and return the Parity.

    ``engine``: the model in the formats that an engine computes in, which is judged against FP64 (None: it is not).
    ``temperature``: what the engine's log-probabilities were divided by before its softmax. Raises UserError for tokens
    that are not the model's, or the trainer's, CannotJudge where no rollout has a token.
    """
    trainer, exact = checks.trainer, checks.exact
    for scoring in (subject,) if trainer is None else (subject, trainer):
        check_rollout_tokens(scoring, rollouts)
    if not any(r.tokens for r in rollouts):
        raise CannotJudge(f"none of the {len(rollouts)} rollouts has a token")
    sides: dict[Side, Array] = {}
    sides["engine"], mask = pad_rows([r.logprobs for r in rollouts])
    sides["policy"], _ = pad_rows([x.tolist() for x in by_policy(subject, rollouts, temperature, tell)])
    if trainer is not None:
        sides["trainer"], _ = pad_rows([x.tolist() for x in by_policy(trainer, rollouts, temperature, tell)])
    rounding = None
    if exact:
        model = Model(subject.config, subject.checkpoint.tensors.read_tensor)
        own = None if engine is None else narrow_logits(engine.policy)
        scored = by_rounded_fp64(model, rollouts, temperature, (None,) if own is None else (None, own), tell)
        (sides["fp64"], _), *more = (pad_rows([x[i].tolist() for x in scored]) for i in range(len(scored[0])))
        if engine is not None:
            if engine is subject:
                made = sides["policy"]
            else:
                made, _ = pad_rows([x.tolist() for x in by_policy(engine, rollouts, temperature, tell)])
            given = Scored(rollouts, sides, mask, temperature)
            rounding = engine_rounding(engine, given, (made, *(x for x, _ in more)), model, tell)
    pairs: list[tuple[Side, Side]] = [("engine", side) for side in sides if side != ENGINE]
    pairs += [(side, "fp64") for side in sides if exact and side not in (ENGINE, "fp64")]
    name, whole, each = subject.policy.name, [], []
    for rollout, against in pairs:
        a, b = sides[against], sides[rollout]
        found = mismatch(a, b, mask)
        whole.append(RolloutRecord(id=None, policy=name, rollout=rollout, trainer=against, mismatch=found))
        for i, r in enumerate(rollouts):
            alone = mismatch(a[i : i + 1], b[i : i + 1], mask[i : i + 1])
            worst = _worst(r, a[i], b[i])
            each.append(
                RolloutRecord(id=r.id, policy=name, rollout=rollout, trainer=against, mismatch=alone, worst=worst)
            )
    held = [h for r in whole for h in outcomes(r, checks.limits)]
    return Parity(
        subject.checkpoint.name, subject.policy.name, tuple(whole), tuple(each), tuple(held), rounding, sides, mask
    )


def _worst(r: Rollout, trainer: Array, rollout: Array) -> tuple[int, int, Number, Number] | None:
    n = len(r.tokens)
    if not n or not (np.isfinite(trainer[:n]).all() and np.isfinite(rollout[:n]).all()):
        return None
    at = int(np.argmax(np.abs(trainer[:n] - rollout[:n])))
    return at, r.tokens[at], json_number(rollout[at]), json_number(trainer[at])

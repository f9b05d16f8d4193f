"""What rounding a model's weights to integers adds: a run's logits against FP64 of the weights as they are stored."""

from itertools import product

import numpy as np

from precaudit.models.checkpoints import Checkpoint
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array, widen
from precaudit.progress import Advance, silent
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.whole import Sequenced, sequence_of
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.metrics.logits import kl


def stored_kl(recorded: Recorded, checkpoint: Checkpoint, tell: Advance = silent) -> float | None:
    """Return the largest KL of a run's logits from FP64 of ``checkpoint``, nats; None where no logits are recorded.

    ``checkpoint``: the weights as they are stored, where the run's policy has integers of them.
    """
    asked = recorded.requested
    held = [
        (sequence_of(recorded, prompt, phase), x, recorded.rows_of(prompt, phase, step, None, LOGITS))
        for prompt, phase in product(asked.prompts, asked.phases)
        for step in recorded.steps(phase)
        if (x := recorded.tensor(prompt, phase, step, None, LOGITS)) is not None
    ]
    if not held:
        return None
    exact = _exact_logits(recorded, checkpoint, list(dict.fromkeys(s for s, *_ in held)), tell)
    found = []
    for sequence, logits, rows in held:
        assert rows is not None
        at = np.searchsorted(recorded.logit_rows(sequence.prompt), rows)
        found += [kl(p, q) for p, q in zip(exact[sequence][at], widen(logits), strict=True)]
    return float(np.max(found))  # NaN where one is


def _exact_logits(
    recorded: Recorded, checkpoint: Checkpoint, sequences: list[Sequenced], tell: Advance
) -> dict[Sequenced, Array]:
    """Return FP64 logits [R, V] of the recorded rows of every sequence."""
    found: dict[Sequenced, Array] = {}

    def emit(i: int, _layer: int | None, _point: str, logits: Array) -> None:
        found[sequences[i]] = logits

    tell(0, 1, "FP64 of the weights as they are stored")
    rows = [recorded.logit_rows(s.prompt) for s in sequences]
    forward(
        Model(recorded.config, checkpoint.tensors.read_tensor),
        Sequences([np.asarray(s.tokens) for s in sequences], [s.lengths for s in sequences]),
        [FP64],
        Wanted({LOGITS}, (), rows),
        emit,
    )
    return found

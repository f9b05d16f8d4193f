"""The emulated policy over the whole model: the size of its errors, pooled over draws of their rounding."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.forward import Decoding, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.passes import with_sums
from precaudit.models.numpy_decoder.rounding import FP64, of_policy, redrawn
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.whole import Energies, Sequenced, Whole
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.metrics.logits import expected_kl, kl, roundoff_kl
from precaudit.schema.metrics.rows import unseen
from precaudit.schema.metrics.sizes import canonical
from precaudit.schema.policies import Policy

RUNS = 8  # draws of the emulated rounding errors that forward noise is pooled over
ROWS = 8  # logits rows of a prompt whose errors are kept, to pool the noise of KL over
KEPT = 1 << 28  # bytes of them in all
Dot = Callable[[Array, Array], Array]


def emulate(whole: Whole, model: Model, recorded: Recorded, policy: Policy, dot: Dot, tell: Advance) -> None:
    """Pool the emulated policy's errors over RUNS draws, and once more where decode rounds otherwise than prefill.

    ``dot``: how its products are summed. What was pooled before is forgotten.
    """
    n, sequences = model.config.layers, [np.asarray(s.tokens) for s in whole.distinct]
    turned = [s.lengths for s in whole.distinct]
    for pooled in (whole.noise, whole.decoded, whole.kl, whole.decoded_kl, whole.about, whole.decoded_about):
        pooled.clear()
    if model.config != recorded.config and not whole.meant:
        logits = Wanted({LOGITS}, (), whole.wanted.logit_rows)
        forward(
            model,
            sequences,
            [FP64],
            logits,
            lambda i, _, __, x: whole.meant.update({whole.distinct[i]: x}),
            layers_told(tell, "FP64 with the policy's mask", n),
            lengths=turned,
        )
    declared = (of_policy(policy, d) for d in (False, True))
    plain, decode = (replace(r, dot=with_sums(r.dot, dot)) for r in declared)
    draws = [redrawn(plain, seed) for seed in range(RUNS)]
    passes: list[tuple[LogitsPool, Decoding | None]] = [
        (LogitsPool(whole, recorded.config, whole.noise, whole.kl, whole.about), None)
    ]
    if "decode" in recorded.requested.phases and cached_otherwise(policy):
        first = [len(recorded.run.prompts[s.prompt].tokens) - 1 for s in whole.distinct]
        decoding = Decoding(first, [redrawn(decode, seed) for seed in range(RUNS)])
        pool = LogitsPool(whole, recorded.config, whole.decoded, whole.decoded_kl, whole.decoded_about)
        passes.append((pool, decoding))
    for pool, rows in passes:
        what = "emulated policy" if rows is None else "emulated policy of decode"
        forward(model, sequences, draws, whole.wanted, pool.add, layers_told(tell, what, n), rows, turned)
        pool.finish()
    whole.sigma = whole.spread()


def cached_otherwise(policy: Policy) -> bool:
    """Whether decode's attention rounds otherwise than prefill's: a cache of another format, or float32 attention."""
    return policy.kv_cache != policy.activations or policy.decode_attention == "float32"


def layers_told(tell: Advance, what: str, n: int) -> Callable[[int], None]:
    """Return what is told of each layer that is done; the first begins now. Layers are counted from 1, as of ``n``."""

    def advance(layer: int) -> None:
        tell(layer + 1, n, f"{what}, layer {min(layer + 2, n)} of {n}")

    advance(-1)
    return advance


@dataclass
class LogitsPool:
    """Adds up what draws of the emulated policy leave; ``errors``: of the sampled logits rows of a prompt [S, V].

    ``apart``: mean KL of a mask's rows [R] themselves: what a mask does is the same in every draw, and another row's
    error is no draw of it.
    """

    whole: Whole
    config: DecoderConfig
    noise: Energies
    kl: dict[Sequenced, Array]
    about: Energies = field(default_factory=dict)
    errors: dict[Sequenced, list[Array]] = field(default_factory=dict)
    apart: dict[Sequenced, Array] = field(default_factory=dict)

    @cached_property
    def sequences(self) -> list[Sequenced]:
        """The distinct sequences, in the order in which they run."""
        return self.whole.distinct

    def add(self, i: int, layer: int | None, point: str, values: Array) -> None:
        """Add one draw's error at one point."""
        sequence = self.sequences[i]
        reference = self.whole.of(sequence, layer, point)
        assert reference is not None
        error = canonical(values - reference, POINTS[point].axes)
        if POINTS[point].over_keys:
            hidden = unseen(np.arange(len(error)), error.shape[2], self.config.window_of(layer))
            error = np.where(hidden[:, None], 0.0, error)
        key = (sequence, layer, point)
        self.noise[key] = self.noise.get(key, 0.0) + np.einsum("thk,thk->th", error, error) / RUNS
        if point == LOGITS and sequence in self.whole.meant:
            off = values - self.whole.meant[sequence]
            self.about[key] = self.about.get(key, 0.0) + np.einsum("tv,tv->t", off, off)[:, None] / RUNS
            apart = [kl(r, x) for r, x in zip(np.asarray(reference), values, strict=True)]
            self.apart[sequence] = self.apart.get(sequence, 0.0) + np.asarray(apart) / RUNS
        if point == LOGITS:
            self.errors.setdefault(sequence, []).append(error[self.sampled_rows(len(error)), 0].astype(np.float32))

    def sampled_rows(self, rows: int) -> Array:
        """Return the logits rows whose errors are kept: fewer where many prompts or a large vocabulary hold much."""
        each = 4 * RUNS * self.config.vocab * len(self.sequences)
        n = max(1, min(ROWS, KEPT // each))
        return np.unique(np.linspace(0, rows - 1, n).astype(int)) if rows else np.zeros(0, int)

    def finish(self) -> None:
        """Pool the noise of KL over draws and rows: an error of another row, brought to a row's rms, is one more."""
        for sequence, kept in self.errors.items():
            logits = self.whole.of(sequence, None, LOGITS)
            assert logits is not None
            size = np.sqrt(self.noise[sequence, None, LOGITS][:, 0])
            if not len(size):  # a run that was cut off before its first step
                self.kl[sequence] = size
                continue
            own = size[self.sampled_rows(len(size))]
            scale = np.divide(1.0, own, out=np.zeros_like(own), where=own > 0)[:, None]
            made = expected_kl(np.asarray(logits), (x * scale for x in kept))
            self.kl[sequence] = size**2 * made + roundoff_kl(np.asarray(logits))
            if sequence in self.apart:
                self.kl[sequence] = np.maximum(self.kl[sequence], self.apart[sequence])
        self.errors.clear()

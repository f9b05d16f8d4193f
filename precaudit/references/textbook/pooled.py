"""The emulated policy over the whole model: the size of its errors, pooled over draws of their rounding."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np

from precaudit.errors import UserError
from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.forward import Decoding, Wanted, forward
from precaudit.models.numpy_decoder.honest import honest_forms
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.passes import with_sums
from precaudit.models.numpy_decoder.rounding import FP64, of_policy, redrawn, single_precision_dot
from precaudit.models.numpy_decoder.routing import ExactRouting, Routing, TurnedRouting
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.pieces import (
    ExactPieces,
    Execution,
    divide_forward,
    exact_logits,
    fed_sequences,
    layers_told,
    some_wanted,
)
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


@dataclass(frozen=True)
class MemberPieces:
    """What pieces of the emulated policy share.

    ``first``: from which row on attention reads the cache, of every sequence; None where it does not round otherwise.
    ``sums``: how products are summed, as ``sums_of`` names it; ``config``: as the run recorded it.
    """

    model: Model
    config: DecoderConfig
    policy: Policy
    sums: str | None
    whole: Whole
    first: Sequence[int] | None


@dataclass(frozen=True)
class MemberPiece:
    """Some sequences under some draws."""

    some: range
    seeds: range


@dataclass
class MemberErrors:
    """What draws of the emulated policy add up to, the mean over RUNS of them.

    ``errors``: of the sampled logits rows of a sequence [S, V], of every draw. ``apart``: mean KL of a mask's rows [R]
    themselves: what a mask does is the same in every draw, and another row's error is no draw of it.
    """

    noise: Energies = field(default_factory=dict)
    about: Energies = field(default_factory=dict)
    apart: dict[Sequenced, Array] = field(default_factory=dict)
    errors: dict[Sequenced, list[Array]] = field(default_factory=dict)

    def add(self, later: "MemberErrors") -> None:
        """Add those of later draws."""
        for mine, its in ((self.noise, later.noise), (self.about, later.about)):
            for key, x in its.items():
                mine[key] = mine.get(key, 0.0) + x
        for sequence, x in later.apart.items():
            self.apart[sequence] = self.apart.get(sequence, 0.0) + x
        for sequence, kept in later.errors.items():
            self.errors.setdefault(sequence, []).extend(kept)


def emulate(
    whole: Whole, model: Model, recorded: Recorded, policy: Policy, sums: str | None, execution: Execution
) -> None:
    """Pool the emulated policy's errors over RUNS draws, and once more where decode rounds otherwise than prefill.

    ``sums``: how its products are summed (None: as NumPy sums in float32). What was pooled before is forgotten.
    """
    for pooled in (whole.noise, whole.decoded, whole.kl, whole.decoded_kl, whole.about, whole.decoded_about):
        pooled.clear()
    if model.config != recorded.config and not whole.meant:
        whole.meant.update(_meant(whole, model, execution))
    shared = MemberPieces(model, recorded.config, policy, sums, whole.for_members(), None)
    whole.noise, whole.about, whole.kl = _pool(whole, shared, execution)
    if "decode" in recorded.requested.phases and cached_otherwise(policy):
        first = [len(recorded.run.prompts[s.prompt].tokens) - 1 for s in whole.distinct]
        whole.decoded, whole.decoded_about, whole.decoded_kl = _pool(whole, replace(shared, first=first), execution)
    whole.sigma = whole.spread()


def _meant(whole: Whole, model: Model, execution: Execution) -> dict[Sequenced, Array]:
    """Return FP64 logits with the mask of a policy that has one."""
    logits = Wanted({LOGITS}, (), whole.wanted.logit_rows)
    shared = ExactPieces(model, whole.distinct, logits, {}, "FP64 with the policy's mask")
    executor = execution.executor
    pieces = divide_forward(whole.distinct, executor.slots)
    made = executor.map(exact_logits, shared, pieces, execution.tell, shared.what)
    return dict(zip(whole.distinct, (x for found in made for x in found), strict=True))


def _pool(
    whole: Whole, shared: MemberPieces, execution: Execution
) -> tuple[Energies, Energies, dict[Sequenced, Array]]:
    """Return noise, noise about what a mask means, and KL's noise, of all draws."""
    executor, total = execution.executor, MemberErrors()
    pieces = divide_members(whole.distinct, executor.slots)
    for made in executor.map(add_members, shared, pieces, execution.tell, _what(shared)):
        for later in made:
            total.add(later)
    return total.noise, total.about, _noise_of_kl(whole, total)


def divide_members(sequences: Sequence[Sequenced], slots: int) -> list[MemberPiece]:
    """Return pieces: of sequences, and of draws where there are more slots than groups of these."""
    groups = divide_forward(sequences, slots)
    parts = min(RUNS, -(-slots // len(groups))) if groups else 1
    seeds = [range(a, b) for a, b in pairwise(RUNS * i // parts for i in range(parts + 1))]
    return [MemberPiece(some, draws) for some, draws in product(groups, seeds)]


def _what(shared: MemberPieces) -> str:
    return "emulated policy" if shared.first is None else "emulated policy of decode"


def add_members(shared: MemberPieces, piece: MemberPiece, tell: Advance) -> list[MemberErrors]:
    """Return what draws leave: all of them added up, or each of some, which is added where all are known."""
    distinct, some = shared.whole.distinct, piece.some
    mine = distinct[some.start : some.stop]
    declared = (of_policy(shared.policy, d) for d in (False, True))
    plain, decode = (replace(r, dot=with_sums(r.dot, sums_of(shared.sums))) for r in declared)
    fed = fed_sequences(mine)
    routings = _routings(shared.model.config, sum(map(len, fed.ids)), piece.seeds)
    decoding = None
    if shared.first is not None:
        first = shared.first[some.start : some.stop]
        decoding = Decoding(first, [FP64] * bool(routings) + [redrawn(decode, seed) for seed in piece.seeds])
    drawn = [redrawn(plain, seed) for seed in piece.seeds]
    if routings:
        drawn = [replace(r, routing=routing) for r, routing in zip((FP64, *drawn), routings, strict=True)]
    found = [MemberErrors() for _ in range(1 if len(piece.seeds) == RUNS else len(piece.seeds))]
    forward(
        shared.model,
        replace(fed, decoding=decoding),
        drawn,
        some_wanted(shared.whole.wanted, some),
        Adder(shared.whole, shared.config, mine, found, bool(routings)).add,
        layers_told(tell, _what(shared), shared.model.config.layers),
    )
    return found


def _routings(config: DecoderConfig, rows: int, seeds: range) -> list[Routing]:
    """Return which experts FP64 and each draw use, where a model has experts: each near tie is turned in one draw."""
    if not config.sparse:
        return []
    exact = ExactRouting(rows)
    exact.prepare(config.experts, config.experts_used)
    return [exact, *(TurnedRouting(exact, seed, RUNS) for seed in seeds)]


def sums_of(name: str | None) -> Dot:
    """Return how products are summed, by the name of an honest form; None: as NumPy sums in float32."""
    return single_precision_dot if name is None else named_sums()[name]


def named_sums() -> dict[str, Dot]:
    """Return how else products may be summed in float32, by name."""
    return {f.name: f.dot for f in honest_forms(POINTS[LOGITS], "float32") if f.dot is not None}


def cached_otherwise(policy: Policy) -> bool:
    """Whether decode's attention rounds otherwise than prefill's: a cache of another format, or float32 attention."""
    return policy.kv_cache != policy.activations or policy.decode_attention == "float32"


def sampled_rows(rows: int, sequences: int, vocab: int) -> Array:
    """Return the logits rows whose errors are kept: fewer where many prompts or a large vocabulary hold much."""
    n = max(1, min(ROWS, KEPT // (4 * RUNS * vocab * sequences)))
    return np.unique(np.linspace(0, rows - 1, n).astype(int)) if rows else np.zeros(0, int)


@dataclass(frozen=True)
class Adder:
    """Adds up what draws of the emulated policy leave, into one of ``found``, or each into its own.

    ``exact_first``: whether FP64 goes before the draws.
    """

    whole: Whole
    config: DecoderConfig
    sequences: Sequence[Sequenced]
    found: Sequence[MemberErrors]
    exact_first: bool
    seen: Counter[tuple[int, int | None, str]] = field(default_factory=Counter)

    def add(self, i: int, layer: int | None, point: str, values: Array) -> None:
        """Add one draw's error at one point."""
        sequence, draw = self.sequences[i], self.seen[i, layer, point] - self.exact_first
        self.seen[i, layer, point] += 1
        if draw < 0:
            return
        into = self.found[min(draw, len(self.found) - 1)]
        reference = self.whole.of(sequence, layer, point)
        if reference is None:
            where = self.whole.places[sequence].folder
            raise UserError(f"{where}: FP64 of a prompt is not there; all workers need one PRECAUDIT_CACHE")
        difference = values - reference
        if np.isinf(reference).any():
            difference = np.where(values == reference, 0.0, difference)  # equal infinities are no error
        error = canonical(difference, POINTS[point].axes)
        if POINTS[point].over_keys:
            hidden = unseen(np.arange(len(error)), error.shape[2], self.config.window_of(layer))
            error = np.where(hidden[:, None], 0.0, error)
        key = (sequence, layer, point)
        into.noise[key] = into.noise.get(key, 0.0) + np.einsum("thk,thk->th", error, error) / RUNS
        if point == LOGITS and sequence in self.whole.meant:
            off = values - self.whole.meant[sequence]
            into.about[key] = into.about.get(key, 0.0) + np.einsum("tv,tv->t", off, off)[:, None] / RUNS
            apart = [kl(r, x) for r, x in zip(np.asarray(reference), values, strict=True)]
            into.apart[sequence] = into.apart.get(sequence, 0.0) + np.asarray(apart) / RUNS
        if point == LOGITS:
            rows = sampled_rows(len(error), len(self.whole.distinct), self.config.vocab)
            into.errors.setdefault(sequence, []).append(error[rows, 0].astype(np.float32))


def _noise_of_kl(whole: Whole, total: MemberErrors) -> dict[Sequenced, Array]:
    """Return the noise of KL, pooled over draws and rows: an error of another row, brought to a row's rms, is one."""
    found: dict[Sequenced, Array] = {}
    for sequence, kept in total.errors.items():
        logits = whole.of(sequence, None, LOGITS)
        assert logits is not None
        size = np.sqrt(total.noise[sequence, None, LOGITS][:, 0])
        if not len(size):  # a run that was cut off before its first step
            found[sequence] = size
            continue
        own = size[sampled_rows(len(size), len(whole.distinct), whole.vocab)]
        scale = np.divide(1.0, own, out=np.zeros_like(own), where=own > 0)[:, None]
        made = expected_kl(np.asarray(logits), (x * scale for x in kept))
        found[sequence] = size**2 * made + roundoff_kl(np.asarray(logits))
        if sequence in total.apart:
            found[sequence] = np.maximum(found[sequence], total.apart[sequence])
    return found

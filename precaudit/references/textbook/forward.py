"""Forward errors: the candidate against FP64 of the whole model on the same tokens, and an emulated policy's size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precaudit.arrays import Array, widen
from precaudit.caching import prune
from precaudit.configs import DecoderConfig
from precaudit.graphs.decoder import LOGITS, POINTS
from precaudit.lengths import View, row_lengths, telling, view_of
from precaudit.metrics.logits import distribution, expected_kl, kl, roundoff_kl
from precaudit.metrics.rows import measured, unseen
from precaudit.metrics.sizes import Difference, canonical, norm, ratio
from precaudit.numpy_decoder.forward import Decoding, Wanted, forward, seconds_for
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.passes import summed
from precaudit.numpy_decoder.rounding import FP64, of_policy, redrawn, single_precision_dot
from precaudit.places import Place
from precaudit.policies import Policy
from precaudit.progress import Advance
from precaudit.records import ErrorRecord, Selected, number
from precaudit.references.cache import References
from precaudit.runs.recorded import Recorded
from precaudit.selection import PHASES

OPEN = 256
RUNS = 8  # draws of the emulated rounding errors that forward noise is pooled over
ROWS = 8  # logits rows of a prompt whose errors are kept, to pool the noise of KL over
KEPT = 1 << 28  # bytes of them in all
Dot = Callable[[Array, Array], Array]


class Sequenced(NamedTuple):
    """A sequence of FP64: its prompt, the tokens fed to it, and whose lengths turn its rows (precaudit/lengths.py)."""

    prompt: str
    tokens: tuple[int, ...]
    first: int
    view: View

    @property
    def lengths(self) -> Array:
        """By how many tokens each row was turned; ``first`` of them are the prompt's."""
        return row_lengths(self.view, self.first, len(self.tokens), len(self.tokens))

    def place(self, root: Path, weights: str, config: DecoderConfig) -> References:
        """Return where its values are kept."""
        return References.of(root, weights, config, self.tokens, telling(config, self.lengths))


def sequence_of(recorded: Recorded, prompt: str, phase: str) -> Sequenced:
    """Return the sequence whose rows a phase of a prompt has; of a phase that was not run, prefill's."""
    tokens, ran = recorded.fed_tokens(prompt), phase in recorded.requested.phases
    view = view_of(recorded.config, phase if ran else "prefill", len(tokens))
    return Sequenced(prompt, tokens, len(recorded.run.prompts[prompt].tokens), view)


Energies = dict[tuple[Sequenced, int | None, str], Array]


@dataclass
class Whole:
    """FP64 values of every prompt's sequence, and what the emulated policy's rounding does to them.

    ``noise``: squared error of the emulated policy, the mean over RUNS draws of its rounding errors, {(sequence, layer,
    point): [T, H]}, H 1 where a point has no heads; ``decoded``: the same where attention reads the cache, if it
    rounds otherwise there. ``kl``, ``decoded_kl``: KL(FP64 ‖ emulated) in nats of every logits row, pooled. ``wanted``:
    what was asked for. ``alike``: {(prompt, phase): the first sequence of the same tokens, rows and lengths}, which
    stands for it: a phase's rows are another sequence's where RoPE turned them by another length.
    ``meant``: FP64 logits [R, V] with the mask of a policy that has one; ``about``, ``decoded_about``: noise there.
    """

    places: dict[Sequenced, References]
    rows: dict[str, Array]
    vocab: int
    alike: dict[tuple[str, str], Sequenced] = field(default_factory=dict)
    noise: Energies = field(default_factory=dict)
    decoded: Energies = field(default_factory=dict)
    kl: dict[Sequenced, Array] = field(default_factory=dict)
    decoded_kl: dict[Sequenced, Array] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=lambda: Wanted((), (), ()))
    meant: dict[Sequenced, Array] = field(default_factory=dict)
    about: Energies = field(default_factory=dict)
    decoded_about: Energies = field(default_factory=dict)
    _open: dict[tuple[Sequenced, int | None, str], Array] = field(default_factory=dict)

    @property
    def distinct(self) -> list[Sequenced]:
        """The sequences that stand for all."""
        return list(dict.fromkeys(self.alike.values()))

    @property
    def said(self) -> list[str]:
        """What a reader should know of the cache."""
        return list(dict.fromkeys(text for place in self.places.values() for text in place.said))

    def values(self, prompt: str, phase: str, layer: int | None, point: str) -> Array | None:
        """Return FP64 values of the whole sequence as a phase runs it (logits: of the recorded rows)."""
        return self.of(self.alike[prompt, phase], layer, point)

    def of(self, sequence: Sequenced, layer: int | None, point: str) -> Array | None:
        """Return FP64 values of one of the distinct sequences."""
        key = (sequence, layer, point)
        if key not in self._open:
            if len(self._open) >= OPEN:
                self._open.clear()  # every map holds a file descriptor
            found = self.places[sequence].load(layer, point, self.rows[sequence.prompt])
            if found is None:
                return None
            self._open[key] = found
            return found
        return self._open[key]

    def logits(self, prompt: str, phase: str, position: int) -> Array | None:
        """Return the FP64 logits [V] at a position, as a phase runs the sequence; with the mask that a policy means."""
        values, at = self.meant.get(self.alike[prompt, phase]), np.flatnonzero(self.rows[prompt] == position)
        values = self.values(prompt, phase, None, LOGITS) if values is None else values
        return None if values is None or not len(at) else values[int(at[0])]

    def energy(self, place: Place) -> tuple[Array, Array | None]:
        """Return (noise [T, H], KL's [R] for logits) of a place's phase."""
        sequence = self.alike[place.prompt, place.phase]
        key = (sequence, place.layer, place.point)
        decoded = place.phase == "decode" and bool(self.decoded)
        kinds = (self.decoded, self.decoded_kl) if decoded else (self.noise, self.kl)
        return kinds[0][key], kinds[1].get(sequence) if place.point == LOGITS else None

    @cached_property
    def sigma(self) -> float:
        """Rms of the emulated policy's logit error over all recorded rows (docs/design.md §1: near tie).

        Where decode rounds otherwise than prefill, that of the two which errs more. A mask is no rounding: of a policy
        that has one it is the error from FP64 with that mask.
        """
        kinds = (self.about, self.decoded_about) if self.meant else (self.noise, self.decoded)
        sizes = [self._rms(kind) for kind in kinds if kind]
        return max(sizes, default=float("nan"))

    def _rms(self, kind: Energies) -> float:
        of_prompts = dict.fromkeys((prompt, sequence) for (prompt, _), sequence in self.alike.items())
        rows = [kind[sequence, None, LOGITS] for _, sequence in of_prompts]
        n = sum(len(e) for e in rows) * self.vocab
        return float(np.sqrt(sum(e.sum() for e in rows) / n)) if n else float("nan")


def establish(
    recorded: Recorded,
    model: Model,
    weights: str,
    policy: Policy,
    selected: Selected,
    root: Path,
    tell: Advance,
) -> Whole:
    """Compute, or find in the cache, FP64 values of a selection's prompts, and emulate the policy over the whole model.

    ``model`` attends as the policy's mask says, and is emulated so; FP64 values are of the recorded configuration.
    ``weights`` identifies the tensors' values; ``root``: where references are kept.
    """
    exact = model if model.config == recorded.config else Model(recorded.config, model.read)
    layers, rows = selected.layers, {p: recorded.logit_rows(p) for p in selected.prompts}
    whole = Whole({}, rows, exact.config.vocab)
    first: dict[tuple[Any, ...], Sequenced] = {}
    for prompt, phase in product(selected.prompts, PHASES):
        own = sequence_of(recorded, prompt, phase)
        told = telling(exact.config, own.lengths)
        same = (own.tokens, rows[prompt].tobytes(), None if told is None else told.tobytes())
        sequence = whole.alike[prompt, phase] = first.setdefault(same, own)
        if sequence not in whole.places:
            whole.places[sequence] = own.place(root, weights, exact.config)
    wanted = [p for p in selected.points if not POINTS[p].state]
    wanted += [] if LOGITS in wanted else [LOGITS]
    names = [(at, p) for p in wanted for at in (layers if POINTS[p].per_layer else (None,))]
    absent = [s for s in whole.distinct if any(whole.of(s, at, name) is None for at, name in names)]

    def save(i: int, layer: int | None, point: str, values: Array) -> None:
        whole.places[absent[i]].save(layer, point, rows[absent[i].prompt], values)

    def want(chosen: list[Sequenced]) -> Wanted:
        return Wanted(set(wanted), set(layers), [rows[s.prompt] for s in chosen])

    n = exact.config.layers
    if absent:
        sequences, turned = [np.asarray(s.tokens) for s in absent], [s.lengths for s in absent]
        fed = sum(map(len, sequences))
        seconds = seconds_for(exact.config, 1000)
        takes = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        what = f"FP64 reference of {fed:,} tokens (about {takes} per 1,000)"
        forward(exact, sequences, [FP64], want(absent), save, _telling(tell, what, n), lengths=turned)
    for place in whole.places.values():
        place.touch()

    whole.wanted = want(whole.distinct)
    emulate(whole, model, recorded, policy, single_precision_dot, tell)
    prune(root, {p.folder for p in whole.places.values()})
    return whole


def _telling(tell: Advance, what: str, n: int) -> Callable[[int], None]:
    """Return what is told of each layer that is done; the first begins now. Layers are counted from 1, as of ``n``."""

    def done(layer: int) -> None:
        tell(layer + 1, n, f"{what}, layer {min(layer + 2, n)} of {n}")

    done(-1)
    return done


def emulate(whole: Whole, model: Model, recorded: Recorded, policy: Policy, dot: Dot, tell: Advance) -> None:
    """Pool the emulated policy's errors over RUNS draws, and once more where decode rounds otherwise than prefill.

    ``dot``: how its products are summed. What was pooled before is forgotten.
    """
    n, sequences = model.config.layers, [np.asarray(s.tokens) for s in whole.distinct]
    turned = [s.lengths for s in whole.distinct]
    for pooled in (whole.noise, whole.decoded, whole.kl, whole.decoded_kl, whole.about, whole.decoded_about):
        pooled.clear()
    vars(whole).pop("sigma", None)
    if model.config != recorded.config and not whole.meant:
        logits = Wanted({LOGITS}, (), whole.wanted.logit_rows)
        forward(
            model, sequences, [FP64], logits, lambda i, _, __, x: whole.meant.update({whole.distinct[i]: x}),
            _telling(tell, "FP64 with the policy's mask", n), lengths=turned,
        )  # fmt: skip
    declared = (of_policy(policy, d) for d in (False, True))
    plain, decode = (replace(r, dot=summed(r.dot, dot)) for r in declared)
    draws = [redrawn(plain, seed) for seed in range(RUNS)]
    passes: list[tuple[Pool, Decoding | None]] = [
        (Pool(whole, recorded.config, whole.noise, whole.kl, whole.about), None)
    ]
    if "decode" in recorded.requested.phases and cached_otherwise(policy):
        first = [len(recorded.run.prompts[s.prompt].tokens) - 1 for s in whole.distinct]
        decoding = Decoding(first, [redrawn(decode, seed) for seed in range(RUNS)])
        pool = Pool(whole, recorded.config, whole.decoded, whole.decoded_kl, whole.decoded_about)
        passes.append((pool, decoding))
    for pool, rows in passes:
        what = "emulated policy" if rows is None else "emulated policy of decode"
        forward(model, sequences, draws, whole.wanted, pool.add, _telling(tell, what, n), rows, turned)
        pool.finish()


def cached_otherwise(policy: Policy) -> bool:
    """Whether decode's attention rounds otherwise than prefill's: a cache of another format, or float32 attention."""
    return policy.kv_cache != policy.activations or policy.decode_attention == "float32"


@dataclass
class Pool:
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
        if POINTS[point].keyed:
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
            self.errors.setdefault(sequence, []).append(error[self.sampled(len(error)), 0].astype(np.float32))

    def sampled(self, rows: int) -> Array:
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
            own = size[self.sampled(len(size))]
            scale = np.divide(1.0, own, out=np.zeros_like(own), where=own > 0)[:, None]
            made = expected_kl(np.asarray(logits), (x * scale for x in kept))
            self.kl[sequence] = size**2 * made + roundoff_kl(np.asarray(logits))
            if sequence in self.apart:
                self.kl[sequence] = np.maximum(self.kl[sequence], self.apart[sequence])
        self.errors.clear()


def forward_errors(recorded: Recorded, whole: Whole, place: Place) -> Iterator[ErrorRecord]:
    """Yield the forward records of one point of one phase (all its steps)."""
    run = recorded.run.record.id
    reference = whole.values(place.prompt, place.phase, place.layer, place.point)
    for step in recorded.steps(place.phase):
        stored = recorded.tensor(place.prompt, place.phase, step, place.layer, place.point)
        if stored is None or reference is None:
            continue
        here = place._replace(step=step)
        rows = _rows(recorded, here)
        known = whole.rows[place.prompt] if place.point == LOGITS else np.arange(_length(reference, place.point))
        if not np.isin(rows, known).all():
            yield here.record("forward", run, "fp64", missing="steps.jsonl lacks the tokens fed up to here")
            continue
        index = np.searchsorted(whole.rows[place.prompt], rows) if place.point == LOGITS else rows
        if POINTS[place.point].keyed:
            values = np.asarray(reference[:, rows, : stored.shape[2]])
        else:
            values = np.asarray(reference[index])
        d, numbers = measured(stored, values, place.point, rows, recorded.config.window_of(place.layer))
        energy, chances = whole.energy(place)
        emulated = float(np.sqrt(energy[index].sum()))
        numbers |= {
            "ratio": number(ratio(norm(d.error), emulated)),
            "noise": number(ratio(emulated, norm(d.reference))),
        }
        numbers["slices"] = _scopes(numbers["scopes"], d, energy[index], rows, place.point)
        if chances is not None:
            numbers["distribution"] = distribution(widen(stored), values, rows, chances[index])
        yield here.record("forward", run, "fp64", **numbers)


def _scopes(scopes: dict[str, Any], d: Difference, energy: Array, rows: Any, point: str) -> dict[str, int]:
    """Add the worst token's and head's ratio to a record's scopes; return how many there are.

    Noise of a slice is that of the draws there and, as they are few, the tensor's relative noise: √(e + (ρ‖r‖)²).
    """
    error, power = (np.einsum("thk,thk->th", x, x) for x in (d.error, d.reference))
    rho = ratio(float(energy.sum()), float(power.sum())) if power.any() else 0.0
    slices = {}
    for name, axis in (("token", 1), ("head", 0)):
        if name == "head" and not POINTS[point].heads:
            continue
        top, noise = error.sum(axis=axis), energy.sum(axis=axis) + rho * power.sum(axis=axis)
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes = np.where(top == 0, 0.0, np.sqrt(top / noise))
        if sizes.size:
            i = int(np.argmax(sizes))
            scopes.setdefault(name, {})["ratio"] = (number(sizes[i]), int(rows[i]) if name == "token" else i)
            slices[name] = sizes.size
    return slices


def _length(reference: Array, point: str) -> int:
    return reference.shape[POINTS[point].axes.index("T")]


def _rows(recorded: Recorded, place: Place) -> Any:
    from precaudit.store import unpack_positions

    return unpack_positions(recorded.index[place])

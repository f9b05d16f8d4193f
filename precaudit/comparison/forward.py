"""Forward errors: the candidate against FP64 of the whole model on the same tokens, and an emulated policy's size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.comparison.recorded import Recorded
from precaudit.comparison.reference_cache import References, prune
from precaudit.comparison.rows import Place, measured, unseen
from precaudit.configs import DecoderConfig
from precaudit.formats import Array, widen
from precaudit.metrics.logits import distribution, kl
from precaudit.metrics.sizes import norm, ratio
from precaudit.numpy_decoder.forward import Wanted, forward
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import FP64, of_policy, redrawn, single_precision_dot
from precaudit.points import POINTS
from precaudit.policies import Policy
from precaudit.records import ErrorRecord, Look, number

OPEN = 256
RUNS = 8  # draws of the emulated rounding errors that forward noise is pooled over
Tell = Callable[[int, int, str], None]


@dataclass
class Truth:
    """FP64 values of every prompt's sequence, and what the emulated policy's rounding does to them.

    ``energy``: squared error of the emulated policy at every position, the mean over RUNS draws of its rounding errors;
    ``kl``: KL(FP64 ‖ emulated) in nats of every logits row, the same mean.
    """

    prompts: tuple[str, ...]
    places: dict[str, References]
    rows: dict[str, Array]
    vocab: int
    energy: dict[tuple[str, int | None, str], Array] = field(default_factory=dict)
    kl: dict[str, Array] = field(default_factory=dict)
    _open: dict[tuple[str, int | None, str], Array] = field(default_factory=dict)

    def values(self, prompt: str, layer: int | None, point: str) -> Array | None:
        """Return FP64 values of the whole sequence (logits: of the recorded rows)."""
        key = (prompt, layer, point)
        if key not in self._open:
            if len(self._open) >= OPEN:
                self._open.clear()  # every map holds a file descriptor
            found = self.places[prompt].load(layer, point, self.rows[prompt])
            if found is None:
                return None
            self._open[key] = found
            return found
        return self._open[key]

    def logits(self, prompt: str, position: int) -> Array | None:
        """Return the FP64 logits [V] at a position."""
        values, at = self.values(prompt, None, "logits"), np.flatnonzero(self.rows[prompt] == position)
        return None if values is None or not len(at) else values[int(at[0])]

    @property
    def sigma(self) -> float:
        """Rms of the emulated policy's logit error over all recorded rows (docs/design.md §1: near tie)."""
        rows = [self.energy[p, None, "logits"] for p in self.prompts]
        n = sum(len(e) for e in rows) * self.vocab
        return float(np.sqrt(sum(e.sum() for e in rows) / n)) if n else float("nan")


def establish(
    recorded: Recorded,
    model: Model,
    weights: str,
    policy: Policy,
    look: Look,
    root: Path,
    tell: Tell,
) -> Truth:
    """Compute, or find in the cache, FP64 values of a look's prompts, and emulate the policy over the whole model.

    ``weights`` identifies the tensors' values; ``root``: where references are kept.
    """
    prompts, layers = look.prompts, look.layers
    tokens = {p: recorded.fed_tokens(p) for p in prompts}
    places = {p: References.of(root, weights, model.config, tokens[p]) for p in prompts}
    truth = Truth(prompts, places, {p: recorded.logit_rows(p) for p in prompts}, model.config.vocab)
    wanted = [p for p in look.points if not POINTS[p].state]
    wanted += [] if "logits" in wanted else ["logits"]
    names = [(at, p) for p in wanted for at in (layers if POINTS[p].per_layer else (None,))]
    absent = [p for p in prompts if any(truth.values(p, at, name) is None for at, name in names)]

    def save(i: int, layer: int | None, point: str, values: Array) -> None:
        places[absent[i]].save(layer, point, truth.rows[absent[i]], values)

    def want(chosen: list[str] | tuple[str, ...]) -> Wanted:
        return Wanted(set(wanted), set(layers), [truth.rows[p] for p in chosen])

    n = model.config.layers
    if absent:
        sequences = [np.asarray(tokens[p]) for p in absent]
        forward(model, sequences, [FP64], want(absent), save, lambda at: tell(at + 1, n, "FP64 reference"))
    for place in places.values():
        place.touch()

    rounding = replace(of_policy(policy), dot=single_precision_dot)
    sequences = [np.asarray(tokens[p]) for p in prompts]
    draws = [redrawn(rounding, seed) for seed in range(RUNS)]
    weigh = partial(_weigh, truth, model.config)
    forward(model, sequences, draws, want(prompts), weigh, lambda at: tell(at + 1, n, "emulated policy"))
    prune(root, {p.folder for p in places.values()})
    return truth


def _weigh(truth: Truth, config: DecoderConfig, i: int, layer: int | None, point: str, values: Array) -> None:
    """Add one draw's error at one point to the pooled noise."""
    prompt = truth.prompts[i]
    reference = truth.values(prompt, layer, point)
    assert reference is not None
    error = values - reference
    if POINTS[point].axes == "HTS":
        keys = ~unseen(np.arange(error.shape[1]), error.shape[2], config.window_of(layer))
        rows = np.einsum("hts,hts,ts->t", error, error, keys)
    else:
        flat = error.reshape(len(error), int(np.prod(error.shape[1:])))
        rows = np.einsum("tk,tk->t", flat, flat)
    key = (prompt, layer, point)
    truth.energy[key] = truth.energy.get(key, 0.0) + rows / RUNS
    if point == "logits":
        here = np.array([kl(a, b) for a, b in zip(reference, values, strict=True)])
        truth.kl[prompt] = truth.kl.get(prompt, 0.0) + here / RUNS


def forward_errors(recorded: Recorded, truth: Truth, place: Place) -> Iterator[ErrorRecord]:
    """Yield the forward records of one point of one phase (all its steps)."""
    run = recorded.run.record.id
    reference = truth.values(place.prompt, place.layer, place.point)
    for step in recorded.steps(place.phase):
        stored = recorded.tensor(place.prompt, place.phase, step, place.layer, place.point)
        if stored is None or reference is None:
            continue
        here = replace(place, step=step)
        rows = _rows(recorded, here)
        known = truth.rows[place.prompt] if place.point == "logits" else np.arange(_length(reference, place.point))
        if not np.isin(rows, known).all():
            yield here.record("forward", run, "fp64", missing="steps.jsonl lacks the tokens fed up to here")
            continue
        index = np.searchsorted(truth.rows[place.prompt], rows) if place.point == "logits" else rows
        if POINTS[place.point].axes == "HTS":
            values = np.asarray(reference[:, rows, : stored.shape[2]])
        else:
            values = np.asarray(reference[index])
        d, numbers = measured(stored, values, place.point, rows, recorded.config.window_of(place.layer))
        emulated = float(np.sqrt(truth.energy[place.prompt, place.layer, place.point][index].sum()))
        numbers |= {
            "ratio": number(ratio(norm(d.error), emulated)),
            "noise": number(ratio(emulated, norm(d.reference))),
        }
        if place.point == "logits":
            chances = truth.kl[place.prompt][index]
            numbers["distribution"] = distribution(widen(stored), values, rows, chances)
        yield here.record("forward", run, "fp64", **numbers)


def _length(reference: Array, point: str) -> int:
    return reference.shape[POINTS[point].axes.index("T")]


def _rows(recorded: Recorded, place: Place) -> Any:
    from precaudit.store import unpack_positions

    key = (place.prompt, place.phase, place.step, place.layer, place.point)
    return unpack_positions(recorded.index[key])

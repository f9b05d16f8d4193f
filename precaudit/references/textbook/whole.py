"""FP64 values of every prompt's sequence, and what an emulated policy's rounding does to them."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.forward import Wanted
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.cache import References
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.lengths import View, row_lengths, telling, view_of
from precaudit.schema.places import Place

OPEN = 256
T = TypeVar("T")


class Sequenced(NamedTuple):
    """A sequence of FP64: its prompt, the tokens fed to it, and whose lengths turn its rows (schema/lengths.py)."""

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
    ``sigma``: rms of the emulated policy's logit error (docs/numerics.md: near tie), NaN before it is emulated.
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
    sigma: float = float("nan")
    about: Energies = field(default_factory=dict)
    decoded_about: Energies = field(default_factory=dict)
    _open: dict[tuple[Sequenced, int | None, str], Array] = field(default_factory=dict)

    @property
    def distinct(self) -> list[Sequenced]:
        """The sequences that stand for all."""
        return list(dict.fromkeys(self.alike.values()))

    def of_prompts(self, prompts: Collection[str]) -> "Whole":
        """Return what is known of some prompts, and nothing that is open."""
        alike = {key: sequence for key, sequence in self.alike.items() if key[0] in prompts}
        kept = set(alike.values())

        def energies(of: Energies) -> Energies:
            return {key: x for key, x in of.items() if key[0] in kept}

        def cut(of: dict[Sequenced, T]) -> dict[Sequenced, T]:
            return {key: x for key, x in of.items() if key in kept}

        return Whole(
            cut(self.places),
            self.rows,
            self.vocab,
            alike,
            energies(self.noise),
            energies(self.decoded),
            cut(self.kl),
            cut(self.decoded_kl),
            meant=cut(self.meant),
            sigma=self.sigma,
        )

    def for_members(self) -> "Whole":
        """Return what draws of the emulated policy are compared with, and nothing that is open."""
        return Whole(self.places, self.rows, self.vocab, self.alike, wanted=self.wanted, meant=self.meant)

    @property
    def notes(self) -> list[str]:
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

    def spread(self) -> float:
        """Return the rms of the emulated policy's logit error over all recorded rows, from what is pooled.

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

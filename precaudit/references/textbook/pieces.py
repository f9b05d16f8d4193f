"""The whole model's forward as pieces: which sequences go together, and FP64 of some of them, kept where it belongs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precaudit.models.numpy_decoder.forward import Sequences, Wanted, divide_sequences, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.numbers.executors import Executor, Threads
from precaudit.progress import Advance, silent
from precaudit.references.cache import References
from precaudit.references.textbook.whole import Sequenced


@dataclass(frozen=True)
class Execution:
    """Who makes the pieces of a comparison, and who is told how far they are."""

    executor: Executor = field(default_factory=Threads)
    tell: Advance = silent


HERE = Execution()


@dataclass(frozen=True)
class ExactPieces:
    """What pieces of FP64 share. ``places``: where each sequence's values are kept; ``wanted``: of all sequences."""

    model: Model
    sequences: Sequence[Sequenced]
    wanted: Wanted
    places: dict[Sequenced, References]
    what: str


def divide_forward(sequences: Sequence[Sequenced], slots: int) -> list[range]:
    """Return which sequences are a piece: as many pieces as there are slots, of about equal rows; one for one slot.

    A piece ends where rows do not go through a matrix with those after it, so that bits are those of one piece. Each
    piece reads all weights: more pieces than slots would read them more often.
    """
    sizes = [len(s.tokens) for s in sequences]
    batches = divide_sequences(sizes)
    rows = [sum(sizes[b.start : b.stop]) for b in batches]
    found: list[range] = []
    first, done = 0, 0
    for i, batch in enumerate(batches):
        done += rows[i]
        share = sum(rows) * (len(found) + 1) / slots
        if i == len(batches) - 1 or (slots > 1 and done + rows[i + 1] / 2 > share):
            found.append(range(first, batch.stop))
            first = batch.stop
    return found


def fed_sequences(some: Sequence[Sequenced]) -> Sequences:
    """Return what is fed to the whole model, and how long each was when its rows were turned."""
    return Sequences([np.asarray(s.tokens) for s in some], [s.lengths for s in some])


def some_wanted(wanted: Wanted, some: range) -> Wanted:
    """Return what is wanted of some sequences."""
    return replace(wanted, logit_rows=wanted.logit_rows[some.start : some.stop])


def keep_exact(shared: ExactPieces, some: range, tell: Advance) -> list[References]:
    """Keep FP64 of some sequences; return where, with what the disk did not take."""
    mine = shared.sequences[some.start : some.stop]
    wanted = some_wanted(shared.wanted, some)
    places = [shared.places[s] for s in mine]

    def save(i: int, layer: int | None, point: str, values: Array) -> None:
        places[i].save(layer, point, wanted.logit_rows[i], values)

    told = layers_told(tell, shared.what, shared.model.config.layers)
    forward(shared.model, fed_sequences(mine), [FP64], wanted, save, told)
    return places


def exact_logits(shared: ExactPieces, some: range, tell: Advance) -> list[Array]:
    """Return the FP64 logits [R, V] of some sequences; nothing is kept."""
    mine = shared.sequences[some.start : some.stop]
    found: dict[int, Array] = {}
    forward(
        shared.model,
        fed_sequences(mine),
        [FP64],
        some_wanted(shared.wanted, some),
        lambda i, _, __, x: found.update({i: x}),
        layers_told(tell, shared.what, shared.model.config.layers),
    )
    return [found[i] for i in range(len(mine))]


def layers_told(tell: Advance, what: str, n: int) -> Callable[[int], None]:
    """Return what is told of each layer that is done; the first begins now. Layers are counted from 1, as of ``n``."""

    def advance(layer: int) -> None:
        tell(layer + 1, n, f"{what}, layer {min(layer + 2, n)} of {n}")

    advance(-1)
    return advance

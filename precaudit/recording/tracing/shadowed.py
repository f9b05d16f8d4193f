"""The program's FP64 shadow, in the batches that were recorded, against the independent FP64 reference (JAX)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from precaudit.interpreters.jaxpr import reap, shadow
from precaudit.models.numpy_decoder.forward import Decoding, Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.operators import rope_frequencies
from precaudit.models.numpy_decoder.rounding import Rounding, formula_rounding
from precaudit.numbers.arrays import Array
from precaudit.recording.tracing.programs import jit_program
from precaudit.recording.tracing.session import Batch
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import CACHES, LOGITS, POINTS
from precaudit.schema.lengths import row_lengths, telling, view_of
from precaudit.schema.places import Place
from precaudit.schema.records.runs import PromptRecord, Requested

HELD = 1 << 30  # bytes of taps held at once: layers are taken in as many passes as that needs


class TapDistance(NamedTuple):
    """How far a tap of one prompt in one call is from the reference: ‖x − r‖ / ‖r‖, and of the worst position."""

    prompt: str
    phase: str
    step: int
    layer: int | None
    point: str
    n: int
    nonfinite: int
    distance: float
    largest: float
    token: tuple[float, int]


class ShadowedCall(NamedTuple):
    """One call of the shadow: taps {point: [L', B, …] or [B, …]}, first slots, and each prompt's positions."""

    phase: str
    step: int
    taps: Mapping[str, Array]
    starts: Array
    rows: tuple[Array, ...]


class ShadowWork(NamedTuple):
    """What is looked at: one batch, the tokens fed to each of its prompts, phases and points."""

    batch: Batch
    fed: Mapping[str, Sequence[int]]
    requested: Requested
    phases: Collection[str]
    points: frozenset[str]

    @property
    def prompts(self) -> tuple[PromptRecord, ...]:
        """The batch's prompts."""
        return self.batch.prompts


def tap_distances(subject: Subject, model: Model, work: ShadowWork) -> Iterator[TapDistance]:
    """Yield the distance of every tap of a batch's prefill, decode and rescore from the reference.

    The shapes are those that were recorded: the batch, its padding, bucket and cache. Raises CannotLift where the
    program holds what has no FP64 meaning.
    """
    groups = _groups(model, work)
    for i, layers in enumerate(groups):
        points = work.points if i == 0 else frozenset(p for p in work.points if POINTS[p].per_layer)
        with jax.enable_x64(True):
            calls = list(_calls(subject, work, points, layers))
        for decode in (False, True):
            some = [c for c in calls if (c.phase == "decode") == decode]
            if formula_rounding(subject.policy, True) == formula_rounding(subject.policy):
                some = [] if decode else calls
            if some:
                yield from _compare(model, work, points, layers, some, formula_rounding(subject.policy, decode))


def _groups(model: Model, work: ShadowWork) -> list[tuple[int, ...]]:
    """Return the layers of each pass."""
    c = model.config
    sizes = {"D": c.width, "H": c.heads, "G": c.kv_heads, "K": c.head_dim, "F": c.mlp_width, "E": c.experts}
    width = sum(int(np.prod([sizes[a] for a in POINTS[p].axes[1:]])) for p in work.points if POINTS[p].per_layer)
    steps = work.requested.decode_steps + 1 if "decode" in work.phases else 0
    caches = steps if work.points & set(CACHES.values()) else 0
    rows = work.batch.length * len(work.prompts)
    each = 8 * rows * (width * len(set(work.phases) - {"decode"}) + 2 * c.kv_heads * c.head_dim * caches)
    n = max(1, min(c.layers, HELD // max(each, 1)))
    return [tuple(range(i, min(i + n, c.layers))) for i in range(0, c.layers, n)]


def _calls(
    subject: Subject, work: ShadowWork, points: frozenset[str], layers: tuple[int, ...]
) -> Iterator[ShadowedCall]:
    """Run the shadow of every call as the session ran the program (recording/tracing/session.py)."""
    asked, batch = work.requested, work.batch
    sequences = [list(p.tokens) for p in work.prompts]
    longer = [list(work.fed[p.id]) for p in work.prompts]
    tokens, starts = batch.arrays(sequences)
    ends = starts + np.asarray([len(s) for s in sequences], np.int32)
    run, step_of = _programs(subject.decoder, tuple(subject.lift.items()), points, layers, subject.platform)

    def cache() -> Any:
        shapes = jax.eval_shape(lambda: subject.decoder.init_cache(len(sequences), batch.length))
        return jax.tree.map(lambda x: np.zeros(x.shape, np.float64 if x.dtype.kind != "i" else x.dtype), shapes)

    def prefill(phase: str, fed: list[list[int]], filled: object) -> ShadowedCall:
        x, first = batch.arrays(fed)
        last = (first + np.asarray([len(s) - 1 for s in fed], np.int32))[:, None]
        tables = exact_tables(subject, batch.length, batch.lengths(phase))
        _, taps = run(subject.parameters, tables, x, first, last, filled)
        return ShadowedCall(phase, 0, _host(taps), first, tuple(np.arange(len(s)) for s in fed))

    if "prefill" in work.phases:
        yield prefill("prefill", sequences, None if asked.phases == ("prefill",) else cache())
    if "decode" in work.phases:
        cut = tokens.copy()
        cut[np.arange(len(cut)), ends - 1] = 0
        tables = exact_tables(subject, batch.length, batch.lengths("decode"))
        held = run(subject.parameters, tables, cut, starts, (ends - 1)[:, None], cache())[0][1]
        for step in range(min(len(a) - len(b) for a, b in zip(longer, sequences, strict=True)) + 1):
            rows = tuple(np.asarray([len(s) - 1 + step]) for s in sequences)
            token = np.asarray([a[int(r[0])] for a, r in zip(longer, rows, strict=True)], np.int32)
            (_, held), taps = step_of(subject.parameters, tables, token, starts, ends - 1 + np.int32(step), held)
            yield ShadowedCall("decode", step, _host(taps), starts, rows)
    if "rescore" in work.phases:
        yield prefill("rescore", longer, cache())


@lru_cache(maxsize=8)
def _programs(
    decoder: Any, lift: tuple[Any, ...], points: frozenset[str], layers: tuple[int, ...], platform: str
) -> tuple[Any, Any]:
    """Return the shadows of prefill and decode with taps, compiled once a shape."""
    phases = (decoder.prefill, decoder.decode)
    shadows = [shadow(reap(phase, points, layers, missing="ignore"), dict(lift)) for phase in phases]
    made = [jit_program(each, platform) for each in shadows]
    return made[0], made[1]


def _host(taps: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(x, np.float64) for name, x in taps.items()}


def exact_tables(subject: Subject, positions: int, lengths: Array | None = None) -> tuple[list[Array], list[Array]]:
    """Return RoPE's cos and sin in FP64, of full layers and of windowed ones where they have their own.

    ``lengths`` as ``Subject.tables`` takes them.
    """
    c = subject.config
    lengths = telling(c, lengths)
    layers = [c.full_layers[0] if c.full_layers else None]
    if c.local_rope_theta is not None:
        layers.append(next(i for i in range(c.layers) if i not in c.full_layers))
    found = [rope_frequencies(c, layer, lengths) for layer in layers]
    angles = [np.arange(positions)[:, None] * speed for speed, _ in found]
    factors = [factor for _, factor in found]
    cos = [np.cos(a) * f for a, f in zip(angles, factors, strict=True)]
    return cos, [np.sin(a) * f for a, f in zip(angles, factors, strict=True)]


def _compare(
    model: Model,
    work: ShadowWork,
    points: frozenset[str],
    layers: tuple[int, ...],
    calls: Sequence[ShadowedCall],
    meant: Rounding,
) -> list[TapDistance]:
    """Return the distances of all taps from the reference, which is held a layer at a time.

    ``meant``: FP64 with the casts to integers that the policy means; those of a cache are of decode's rows alone.
    """
    sequences = [np.asarray(work.fed[p.id], np.int32) for p in work.prompts]
    rows = [np.arange(len(s)) if LOGITS in points else np.arange(0) for s in sequences]
    found: list[TapDistance] = []
    views: dict[str, list[ShadowedCall]] = {}
    for call in calls:
        views.setdefault(view_of(model.config, call.phase, max(map(len, sequences))), []).append(call)

    def emit(turned: str, i: int, layer: int | None, point: str, reference: Array) -> None:
        caches = {row: cache for row, cache in CACHES.items() if cache in points}
        for name in (point, caches[point]) if point in caches else (point,):
            for call in views[turned]:
                if name in points and name in call.taps:
                    tap = call.taps[name] if layer is None else call.taps[name][layers.index(layer)]
                    read = meant.cache(reference) if name in CACHES.values() else reference
                    pair = _rows(name, tap[i], read, int(call.starts[i]), call.rows[i], call.phase)
                    found.append(_distance(Place(work.prompts[i].id, call.phase, call.step, layer, name), *pair))

    plain = {p for p in points if not POINTS[p].state} | {r for r, c in CACHES.items() if c in points}
    wanted, first = Wanted(plain, set(layers), rows), [len(p.tokens) - 1 for p in work.prompts]
    cached = None if meant.exact("cache") else Decoding(first, [meant])
    for view in views:
        lengths = [
            row_lengths(view, len(p.tokens), len(s), len(s)) for p, s in zip(work.prompts, sequences, strict=True)
        ]
        forward(model, Sequences(sequences, lengths, decoding=cached), [meant], wanted, partial(emit, view))
    return found


def _rows(point: str, tap: Array, reference: Array, start: int, rows: Array, phase: str) -> tuple[Array, Array, Array]:
    """Return a tap's rows of one prompt, the reference's, and their positions."""
    if point in CACHES.values():
        rows = np.arange(int(rows[-1]) + 1)
        return tap[start : start + len(rows)], reference[rows], rows
    if point == LOGITS:
        return tap, reference[rows[-1:]], rows[-1:]
    return tap if phase == "decode" else tap[start : start + len(rows)], reference[rows], rows


def _distance(place: Place, x: Array, r: Array, rows: Array) -> TapDistance:
    with np.errstate(invalid="ignore", over="ignore"):
        error = (x - r).reshape(len(r), -1)
        off, size = np.linalg.norm(error, axis=1), np.linalg.norm(r.reshape(len(r), -1), axis=1)
        whole, base = float(np.linalg.norm(off)), float(np.linalg.norm(size))
        each = np.where(off == 0, 0.0, off / np.where(size == 0, 1.0, size))
    worst = int(np.argmax(np.where(np.isnan(each), np.inf, each)))
    return TapDistance(
        *place,
        error.size,
        int((~np.isfinite(error)).sum()),
        whole / base if base else whole,
        float(np.abs(error).max()),
        (float(each[worst]), int(rows[worst])),
    )

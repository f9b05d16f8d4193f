"""The program's FP64 shadow against the independent FP64 reference, point by point (JAX)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.comparison.recorded import Recorded
from precaudit.diagnosis.records import Differs
from precaudit.formats import Array
from precaudit.numpy_decoder.forward import Wanted, forward
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.operators import rope_frequencies
from precaudit.numpy_decoder.rounding import FP64
from precaudit.points import CACHES, POINTS
from precaudit.records import number
from precaudit.tracing.programs import bucket
from precaudit.tracing.subject import Subject
from precaudit.transforms import reap, shadow

replace = msgspec.structs.replace

KEYED = ("scores", "probs")


def distances(recorded: Recorded, subject: Subject, model: Model, prompt: str) -> Iterator[Differs]:
    """Yield the distance of every tap of a prompt's prefill and decode from the reference.

    Raises CannotLift where the program holds what has no FP64 meaning.
    """
    asked = recorded.requested
    tokens = np.asarray(recorded.fed_tokens(prompt), np.int32)
    n = len(recorded.run.prompts[prompt].tokens)
    points = [p for p in POINTS if p in {*asked.points, *asked.support, "attn_out", "resid_out"}]
    reference: dict[tuple[int | None, str], Array] = {}
    rows = np.arange(len(tokens))
    wanted = Wanted({p for p in points if not POINTS[p].state} | {"k", "v", "logits"}, None, [rows])
    forward(model, [tokens], [FP64], wanted, lambda i, at, p, x: reference.update({(at, p): x}))
    with jax.enable_x64(True):
        if "prefill" in asked.phases:
            _, taps = _prefill(subject, points, tokens[:n], None)
            yield from _compared("prefill", 0, taps, reference, np.arange(n))
        if "decode" in asked.phases:
            size = bucket(len(tokens))
            empty = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), subject.decoder.init_cache(1, size))
            cut = tokens[:n].copy()
            cut[-1] = 0
            cache, _ = _prefill(subject, [], cut, empty)
            call = jax.jit(shadow(partial(_decode, subject, frozenset(points)), subject.lift))
            for step, position in enumerate(range(n - 1, len(tokens))):
                at = (tokens[position : position + 1], np.zeros(1, np.int32), np.asarray([position], np.int32))
                (_, cache), taps = call(subject.parameters, exact_tables(subject, size), *at, cache)
                yield from _compared("decode", step, taps, reference, np.asarray([position]))


def _decode(subject: Subject, points: frozenset[str], *args: Any) -> Any:
    return reap(subject.decoder.decode, points, missing="ignore")(*args)


def _prefill(subject: Subject, points: list[str], tokens: Array, cache: Any) -> tuple[Any, dict[str, Any]]:
    """Run the shadow of prefill alone; the cache's capacity is the program's, rows past the tokens are padding."""
    n = len(tokens)
    size = bucket(n)
    padded = np.zeros((1, size), np.int32)
    padded[0, :n] = tokens
    rows = np.asarray([[n - 1]], np.int32)
    program: Callable[..., Any] = reap(subject.decoder.prefill, frozenset(points), missing="ignore")
    call = jax.jit(shadow(lambda p, t, x, b, r, c: program(p, t, x, b, r, c), subject.lift))
    (_, filled), taps = call(
        subject.parameters, exact_tables(subject, size), padded, np.zeros(1, np.int32), rows, cache
    )
    return filled, taps


def exact_tables(subject: Subject, positions: int) -> tuple[list[Array], list[Array]]:
    """Return RoPE's cos and sin in FP64, of full layers and of windowed ones where they have their own."""
    c = subject.config
    layers = [c.full_layers[0] if c.full_layers else None]
    if c.local_rope_theta is not None:
        layers.append(next(i for i in range(c.layers) if i not in c.full_layers))
    found = [rope_frequencies(c, layer) for layer in layers]
    angles = [np.arange(positions)[:, None] * speed for speed, _ in found]
    factors = [factor for _, factor in found]
    cos = [np.cos(a) * f for a, f in zip(angles, factors, strict=True)]
    return cos, [np.sin(a) * f for a, f in zip(angles, factors, strict=True)]


def _compared(
    phase: str, step: int, taps: dict[str, Any], reference: dict[tuple[int | None, str], Array], rows: Array
) -> Iterator[Differs]:
    """Yield the distance of every tap of one call from the reference's rows."""
    for point, stacked in taps.items():
        base = {c: r for r, c in CACHES.items()}.get(point, point)
        for layer in range(len(stacked)) if POINTS[point].per_layer else (None,):
            x = np.asarray(jnp.asarray(stacked if layer is None else stacked[layer])[0], np.float64)
            r = reference[layer, base]
            keep: Any = 1.0
            if point in CACHES.values():
                r = r[: int(rows[-1]) + 1]
                x = x[: len(r)]
            elif point in KEYED:
                r = r[:, rows][:, :, : int(rows[-1]) + 1]
                x = x[:, : len(rows), : r.shape[2]]
                keep = np.arange(r.shape[2])[None, :] <= rows[:, None]
            elif point != "logits":
                r = r[rows]
                x = x[: len(rows)]
            else:
                r = r[rows[-1:]]
            with np.errstate(invalid="ignore"):
                size = float(np.linalg.norm(np.where(keep, r, 0.0)))
                off = float(np.linalg.norm(np.where(keep, x - r, 0.0)))
            distance = number(off / size if size else off)
            yield Differs(phase=phase, step=step, layer=layer, point=point, distance=distance)

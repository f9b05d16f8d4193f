"""In which form a program may hold a tensor of which it has no vector as it is: scaled, shifted, rounded twice."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.references.alignment.fingerprints import Form, roundings
from precaudit.references.alignment.sides import Family, Side, Tensor

SAMPLED = 16  # vectors of an array whose nearest are looked for
ALIKE = 2.0**-6  # relative distance of what may be one tensor, rounded to eight bits of significand or more
SNAP = 2.0**-10  # relative distance from a constant that is known


class Near(NamedTuple):
    """The nearest vector of a tensor: relative L2 of their difference, and with the constants that are best."""

    tensor: str
    distance: float
    times: float
    plus: float
    left: float


def nearest_tensor(vectors: Array, tensors: Iterable[Tensor]) -> Near | None:
    """Return the tensor with the vector nearest to one of some vectors [N, n]; None where none is as long."""
    chosen = widen(vectors[np.linspace(0, len(vectors) - 1, min(SAMPLED, len(vectors))).astype(int)])
    n, best = chosen.shape[1], None
    for tensor in tensors:
        for at in (a for a, size in enumerate(tensor.shape) if size == n):
            near = _nearest(chosen, np.moveaxis(tensor.read(), at, -1).reshape(-1, n), tensor.name)
            if near is not None and (best is None or near.left < best.left):
                best = near
    return best


def along_axes(own: Tensor) -> Iterator[Array]:
    """Yield the vectors [N, n] of an array along each axis."""
    x = own.read()
    yield from (np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]) for axis in range(x.ndim))


def _nearest(chosen: Array, theirs: Array, name: str) -> Near | None:
    """Return the nearest pair of vectors [·, n], by the angle between them with and without their means."""
    sampled = chosen.astype(np.float32)
    norms = np.maximum(np.linalg.norm(sampled, axis=1, keepdims=True), 1e-30)
    best: tuple[float, int, int] | None = None
    for first in range(0, len(theirs), step := max(1, (1 << 22) // theirs.shape[1])):
        block = theirs[first : first + step].astype(np.float32)
        for centred in (False, True) if len(theirs) == 1 else (False,):
            a, b = (v - v.mean(axis=1, keepdims=True) if centred else v for v in (sampled / norms, block))
            alike = np.abs(a @ b.T) / np.maximum(
                np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)[None, :], 1e-30
            )
            i, j = np.unravel_index(int(alike.argmax()), alike.shape)
            if best is None or alike[i, j] > best[0]:
                best = float(alike[i, j]), int(i), first + int(j)
    return None if best is None else fit_constants(chosen[best[1]], widen(theirs[best[2]]), name)


def fit_constants(own: Array, theirs: Array, name: str = "") -> Near:
    """Return how far values are from a tensor's, and by which one constant they are nearest."""
    size = max(float(np.linalg.norm(own)), 1e-300)
    far = float(np.linalg.norm(own - theirs)) / size
    times = float(np.vdot(theirs, own) / max(float(np.vdot(theirs, theirs)), 1e-300))
    plus = float(np.mean(own - theirs))
    scaled, shifted = (float(np.linalg.norm(own - y)) / size for y in (theirs * times, theirs + plus))
    if min(scaled, shifted) > far / 2:
        return Near(name, far, 1.0, 0.0, far)
    return Near(name, far, times, 0.0, scaled) if scaled < shifted else Near(name, far, 1.0, plus, shifted)


def possible_forms(near: Near, format_name: str, theirs: str, sizes: Sequence[int]) -> Iterator[Form]:
    """Yield the forms that a nearest tensor may be held in: constants that are known, also rounded; rounded twice."""
    if near.left > ALIKE:
        return
    if near.times == 1.0 and near.plus == 0.0:
        yield from (Form(format_name, through=other) for other in roundings(theirs, FORMATS) if other != format_name)
    elif near.plus:
        yield Form(
            format_name, 1.0, float(round(near.plus)) if abs(near.plus - round(near.plus)) < ALIKE else near.plus
        )
    else:
        for times in _constants(near.times, sizes):
            yield Form(format_name, times)
            rounded = float(np.float64(times).astype(FORMATS[format_name].dtype))
            if rounded != times:
                yield Form(format_name, rounded)


def _constants(times: float, sizes: Sequence[int]) -> list[float]:
    """Return the constants that a factor is near: roots of sizes and what divides by them, powers of two; or itself."""
    roots = sorted({sqrt(n) for n in sizes} | {float(n) for n in sizes})
    known = [1.0, *roots, *(1 / r for r in roots), *(2.0**k for k in range(-8, 9))]
    near = sorted({k for k in known if abs(abs(times) / k - 1) < SNAP}, key=lambda k: abs(abs(times) / k - 1))
    return [float(np.copysign(k, times)) for k in near] or [times]


def sizes_of(side: Side, theirs: Side, family: Family) -> list[int]:
    """Return the sizes whose roots a constant may be: axes of the family, the model's width and its heads."""
    config = theirs.config or side.config
    own = set() if config is None else {config.width, config.head_dim, config.layers}
    whole = {prod(family.shape[a:b]) for a in range(len(family.shape)) for b in range(a + 1, len(family.shape) + 1)}
    heads = {n for n in range(8, 513) if any(size % n == 0 for size in whole)}
    return sorted((own | whole | heads) - {0, 1})

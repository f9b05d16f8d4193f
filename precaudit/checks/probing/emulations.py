"""What a product may have been made of, emulated in NumPy, and which of that a device's result is.

A result is an emulation's if every element lies where honest float32 sums of it, rounded to the format of the result,
can come to lie. Where two cannot be told apart by that, both are named.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from precaudit.models.numpy_decoder.accumulation import rounding_products
from precaudit.models.numpy_decoder.passes import BF16, PRESETS, matmul_in_passes
from precaudit.numbers.arrays import Array, identity, rounder, widen
from precaudit.numbers.formats import FORMATS
from precaudit.schema.metrics.sizes import half_ulp

REACH = 6  # standard deviations that the error of a sum may take: beyond them is one element of 5e8
MOVED = 16  # scores that narrow sums have to be expected to move, to be told from others by the scores
LEAST = 0.25  # of the expected error of narrow sums, that scores have to be off to be theirs
NARROW = ("float16", "bfloat16")
FINEST = "float64"
Dot = Callable[[Array, Array], Array]


def _passes(count: int, narrow: Callable[[Array], Array]) -> str:
    return f"{count} {'bfloat16' if narrow is BF16 else 'TF32'} pass{'' if count == 1 else 'es'}"


PASSES = {preset: _passes(*how) for preset, how in PRESETS.items()}


@dataclass(frozen=True)
class ScoreEmulation:
    """Scores [B, H, Q, S] in FP64 before they are rounded, and the standard deviation of what sums leave in each.

    ``kept``: the format that they are rounded to before that of the result. ``sized``: the order of sums is not known,
    so that only how far the scores are from exact ones, rounded, says whether it is theirs.
    """

    name: str
    value: Array
    noise: Array
    kept: str | None = None
    sized: bool = False

    def makes(self, found: Array, form: str) -> bool:
        """Whether scores of a format, FP64 or held in it, are these."""
        near, last = rounder(self.kept) if self.kept else identity, rounder(form)
        wide = widen(found)
        if not np.isfinite(wide).all() or not np.array_equal(near(wide), wide):
            return False
        low, high = (last(near(self.value + s * REACH * self.noise)) for s in (-1.0, 1.0))
        outside = np.maximum(np.maximum(low - wide, wide - high), 0.0)
        if np.linalg.norm(outside) > np.linalg.norm(self.noise):
            return False
        if not self.sized or self.expected_moves(form) < MOVED:
            return True
        off = min(np.linalg.norm(wide - last(x)) for x in (self.value, near(self.value)))
        return bool(off >= LEAST * np.linalg.norm(self.noise))

    def expected_moves(self, form: str) -> float:
        """Return how many scores of a format its noise is expected to move to another value of the format."""
        coarse = min((f for f in (self.kept, form) if f), key=lambda f: FORMATS[f].precision)
        return float(np.minimum(1.0, self.noise / (2 * half_ulp(self.value, coarse))).sum())

    def same(self, other: "ScoreEmulation") -> bool:
        """Whether both are the same arithmetic on these operands."""
        return (self.kept, self.sized) == (other.kept, other.sized) and np.array_equal(self.value, other.value)


def emulations(q: Array, k: Array) -> list[ScoreEmulation]:
    """Return what a product of floats may be made of, float32 first, then from finer to coarser.

    ``q`` [B, H, Q, D], ``k`` [B, H, S, D] in their format.
    """
    a, b, form = widen(q), widen(k), q.dtype.name
    exact = _each(np.matmul, a, b)
    found = [
        ScoreEmulation("float32", exact, deviation(a, b, exact, "float32", _inexact(form))),
        ScoreEmulation(FINEST, exact, deviation(a, b, exact, FINEST, False)),
    ]
    for preset in ("BF16_BF16_F32_X6", "TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "TF32_TF32_F32"):
        count, narrow = PRESETS[preset]
        made = _each(partial(matmul_in_passes, count, np.matmul, narrow=narrow), a, b)
        found.append(ScoreEmulation(PASSES[preset], made, deviation(a, b, made, "float32", False)))
    narrower = [list(_in(name, a, b)) for name in NARROW]
    return found + [e for each in zip(*narrower, strict=True) for e in each]


def _in(name: str, a: Array, b: Array) -> Iterator[ScoreEmulation]:
    """Yield products of operands rounded to a narrow format, with ever more of the rest in it."""
    x, y = (rounder(name)(z) for z in (a, b))
    made, products = _each(np.matmul, x, y), _each(rounding_products(name), x, y)
    yield ScoreEmulation(f"1 {name} pass", made, deviation(x, y, made, "float32", False))
    yield ScoreEmulation(f"1 {name} pass, rounded to {name}", made, deviation(x, y, made, "float32", False), name)
    yield ScoreEmulation(f"products in {name}", products, deviation(x, y, products, "float32", False))
    sums = a.shape[-1] > 1
    yield ScoreEmulation(f"sums in {name}", made, deviation(x, y, made, name, True), name, sized=sums)


def _inexact(form: str) -> bool:
    """Whether products of two values of a format are rounded in float32."""
    return 2 * FORMATS[form].precision > FORMATS["float32"].precision


def _each(dot: Dot, a: Array, b: Array) -> Array:
    """Return scores [B, H, Q, S] of queries and keys, a head at a time."""
    out = np.empty((*a.shape[:3], b.shape[2]))
    with np.errstate(over="ignore", invalid="ignore"):
        for i in np.ndindex(*a.shape[:2]):
            out[i] = dot(np.ascontiguousarray(a[i]), np.ascontiguousarray(b[i].T))
    return out


def deviation(a: Array, b: Array, exact: Array, form: str, products: bool) -> Array:
    """Return the standard deviation of the error of sums in a format, made one after another in a random order.

    A rounding leaves u·|s|/√3 of its result s at most (uniform within u·|s|). Of n terms with sum S and squares' sum P,
    in a random order, Σₖ E[sₖ²] = S²·(n + 1)(2n + 1)/(6n) + (P/n − S²/n²)·n·(n + 1)/6: drawn without replacement.
    ``products``: those are rounded as well. Blocks and trees of sums leave less (Higham 2002, §4.2).
    """
    n = a.shape[-1]
    squares = _each(np.matmul, a**2, b**2)
    spread = np.maximum(squares / n - (exact / n) ** 2, 0.0)
    partial = exact**2 * (n + 1) * (2 * n + 1) / (6 * n) + spread * n * (n + 1) / 6
    u = FORMATS[form].unit_roundoff
    return np.asarray(u / np.sqrt(3) * np.sqrt(partial + (squares if products else 0.0)))


def name_emulation(
    found: Array, form: str, among: Sequence[ScoreEmulation], asked: str | None
) -> tuple[tuple[str, ...], str | None]:
    """Return what scores were made of and whether that is what was asked for: ``yes``, ``replaced``, ``undecided``.

    Made of: the first that makes them, and beside it what was asked for where that cannot be told from it.
    """
    first = next((e for e in among if e.makes(found, form)), None)
    names = () if first is None else (first.name,)
    wanted = next((e for e in among if e.name == asked), None)
    if wanted is None or first is None:
        return names, None if asked is None else "undecided"
    if wanted.name == FINEST and FORMATS[form].precision < FORMATS["float32"].precision:
        wanted = among[0]  # what finer sums leave is not seen in narrower scores
    if wanted.name != FINEST and wanted.same(first):
        return names, "yes"
    if not wanted.makes(found, form):
        return names, "replaced"
    return ((FINEST,) if wanted.name == FINEST else (*names, wanted.name)), "yes"


def named_integers(found: Array, exact: Array, asked: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the same of integers, whose sums are exact: kept, cut to their lowest bits, or clamped."""
    info = np.iinfo(found.dtype)
    cut = np.asarray(exact, np.int64).astype(found.dtype)
    clamped = np.clip(exact, info.min, info.max)
    forms = {"int32": exact, f"int32, cut to {info.bits} bits": cut, "int32, clamped": clamped}
    names = tuple(name for name, x in forms.items() if np.array_equal(found, x))[:1]
    return names, None if asked is None else "undecided" if not names else "yes" if asked in names else "replaced"

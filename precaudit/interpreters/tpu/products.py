"""Products as a TPU's matrix unit makes them: bfloat16 passes, float32 sums.

The compiler writes a batched product as a convolution: its batch, free and contracted dimensions may be spatial ones,
dilated, padded and reversed so that one output element reads what it should. ``relation`` says which.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from precaudit.interpreters.tpu.hlo import Instruction

PASSES = {"default": 1, "high": 3, "highest": 6}
ALGORITHMS = {"dot_bf16_bf16_f32": 1, "dot_bf16_bf16_f32_x3": 3, "dot_bf16_bf16_f32_x6": 6}
Product = Callable[[Any, Any], Any]


class Window(NamedTuple):
    """A window, one number a dimension; ``pad``: low and high."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[tuple[int, int], ...]
    lhs_dilate: tuple[int, ...]
    rhs_dilate: tuple[int, ...]
    rhs_reversal: tuple[int, ...]


def window(fields: Mapping[str, str], rank: int) -> Window:
    """Return ``window={size=4x2 pad=3_3x0_0 …}``, what is not written at its default."""

    def each(key: str, default: int) -> tuple[int, ...]:
        return tuple(map(int, fields[key].split("x"))) if key in fields else (default,) * rank

    pads = [tuple(map(int, x.split("_"))) for x in fields["pad"].split("x")] if "pad" in fields else [(0, 0)] * rank
    return Window(
        each("size", 1),
        each("stride", 1),
        tuple((low, high) for low, high in pads),
        each("lhs_dilate", 1),
        each("rhs_dilate", 1),
        each("rhs_reversal", 0),
    )


def declared_product(instruction: Instruction, x: jax.Array, y: jax.Array) -> Any:
    """Return a ``dot`` or ``convolution`` of operands in their declared formats: integers, or float32 sums."""
    once = _dot(instruction) if instruction.opcode == "dot" else _convolution(instruction, x.shape, y.shape)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return once(x.astype(np.int32), y.astype(np.int32))
    return product_in_passes(product_passes(instruction), once, x, y)


def product_passes(instruction: Instruction) -> int:
    """Return how many bfloat16 products a float32 product is made of: 1, 3 or 6. Raises ValueError."""
    algorithm = instruction.attributes.get("algorithm")
    if algorithm is not None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"no rule for the algorithm {algorithm}")
        return ALGORITHMS[algorithm]
    written = instruction.attributes.get("operand_precision", "default")
    return max(PASSES[x] for x in re.findall(r"\w+", written))


def product_in_passes(count: int, once: Product, x: jax.Array, y: jax.Array) -> Any:
    """Return the product of operands rounded to bfloat16 once, of two parts each (3 products), or in float32 (6)."""
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    if count == max(PASSES.values()):
        return once(x32, y32)
    x0, y0 = round_to_bfloat16(x32, x.dtype), round_to_bfloat16(y32, y.dtype)
    if count == 1 or x.dtype == y.dtype == jnp.bfloat16:
        return once(x0, y0)
    return once(round_to_bfloat16(x32 - x0), y0) + once(x0, round_to_bfloat16(y32 - y0)) + once(x0, y0)


def round_to_bfloat16(x: jax.Array, dtype: DTypeLike | None = None) -> Any:
    """Return values rounded to bfloat16's, in their own format; ``dtype``: the format they were in before."""
    return x if dtype == jnp.bfloat16 else lax.reduce_precision(x, 8, 7)


def _sum_format(x: jax.Array) -> Any:
    return np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32


def _dot(instruction: Instruction) -> Product:
    sides = [[instruction.ints(f"{side}_{kind}_dims") for side in ("lhs", "rhs")] for kind in ("contracting", "batch")]
    dims = tuple(tuple(kind) for kind in sides)
    return lambda x, y: lax.dot_general(x, y, dims, precision="highest", preferred_element_type=_sum_format(x))


class _Labels(NamedTuple):
    lhs: str
    rhs: str
    out: str


def _convolution(instruction: Instruction, lhs: Sequence[int], rhs: Sequence[int]) -> Product:
    found = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])
    if found is None:
        raise ValueError("dim_labels that are none")
    labels = _Labels(*found.groups())
    view = window(instruction.fields("window"), len(lhs) - 2)
    groups = [next(iter(instruction.ints(f"{kind}_group_count")), 1) for kind in ("feature", "batch")]
    letters = _letters(labels, view, lhs, rhs) if groups == [1, 1] else None
    if letters is None:
        return _true_convolution(labels, view, groups)
    return _einsum(labels, *letters)


def relation(view: Window, i: int, n: int, w: int) -> str | None:
    """Return what spatial dimension ``i`` of sizes ``n`` (left) and ``w`` (right) is; None: a convolution's.

    "batch", "contracted", "left", "right" (free), and with a minus sign those whose right index runs backwards.
    Output element o reads left a times right b where o·stride = a·lhs_dilate + low − k·rhs_dilate, b = k or w − 1 − k.
    """
    (low, high), stride = view.pad[i], view.stride[i]
    reached = (n - 1) * view.lhs_dilate[i] + low + high - (w - 1) * view.rhs_dilate[i]
    out = reached // stride + 1
    a, k = np.arange(n)[:, None], np.arange(w)[None, :]
    steps = a * view.lhs_dilate[i] + low - k * view.rhs_dilate[i]
    left, right = np.nonzero((steps % stride == 0) & (steps >= 0) & (steps <= reached))
    read = steps[left, right] // stride
    right = w - 1 - right if view.rhs_reversal[i] else right
    forms = {
        "batch": (out == n == w, left, right),
        "contracted": (out == 1 and n == w, None, right),
        "left": (out == n and w == 1, left, None),
        "right": (out == w and n == 1, None, right),
    }
    for name, (sizes, of_left, of_right) in forms.items():
        if not sizes or len(read) != max(n, w) or (of_left is not None and (of_left != read).any()):
            continue
        against = left if name == "contracted" else read
        if of_right is None or (of_right == against).all():
            return name
        if (of_right == w - 1 - against).all():
            return f"-{name}"
    return None


def _letters(
    labels: _Labels, view: Window, lhs: Sequence[int], rhs: Sequence[int]
) -> tuple[list[dict[str, str]], list[int]] | None:
    """Return each side's letters for its labels and the right axes to reverse; None for a true convolution."""
    left, right, out = {"b": "a", "f": "b"}, {"i": "b", "o": "c"}, {"b": "a", "f": "c"}
    backwards = []
    for i, one in zip(range(len(lhs) - 2), ascii_letters[3:], strict=False):
        at = str(i)
        kind = relation(view, i, lhs[labels.lhs.index(at)], rhs[labels.rhs.index(at)])
        if kind is None:
            return None
        if kind.startswith("-"):
            backwards.append(labels.rhs.index(at))
        left[at], right[at], out[at] = {
            "batch": (one, one, one),
            "contracted": (one, one, ""),
            "left": (one, "", one),
            "right": ("", one, one),
        }[kind.lstrip("-")]
    return [left, right, out], backwards


def _einsum(labels: _Labels, letters: list[dict[str, str]], backwards: list[int]) -> Product:
    """Return the product; a label without a letter is a dimension of size 1."""
    spec = ["".join(names[x] for x in side) for names, side in zip(letters, labels, strict=True)]
    ones = [[axis for axis, x in enumerate(side) if not names[x]] for names, side in zip(letters, labels, strict=True)]

    def once(x: jax.Array, y: jax.Array) -> Any:
        x, y = lax.squeeze(x, ones[0]), lax.squeeze(lax.rev(y, backwards) if backwards else y, ones[1])
        formula = f"{spec[0]},{spec[1]}->{spec[2]}"
        z = jnp.einsum(formula, x, y, precision="highest", preferred_element_type=_sum_format(x))
        return lax.expand_dims(z, ones[2])

    return once


def _true_convolution(labels: _Labels, view: Window, groups: list[int]) -> Product:
    spatial = [str(i) for i in range(len(labels.lhs) - 2)]

    def axes(side: str, first: str, second: str) -> tuple[int, ...]:
        return tuple(side.index(x) for x in (first, second, *spatial))

    right = axes(labels.rhs, "o", "i")
    backwards = [axis for axis, flip in zip(right[2:], view.rhs_reversal, strict=True) if flip]
    dims = lax.ConvDimensionNumbers(axes(labels.lhs, "b", "f"), right, axes(labels.out, "b", "f"))

    def once(x: jax.Array, y: jax.Array) -> Any:
        y = lax.rev(y, backwards) if backwards else y
        return lax.conv_general_dilated(
            x,
            y,
            view.stride,
            view.pad,
            view.lhs_dilate,
            view.rhs_dilate,
            dims,
            *groups,
            precision="highest",
            preferred_element_type=_sum_format(x),
        )

    return once

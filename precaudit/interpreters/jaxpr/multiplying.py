"""How a device makes products of floats: by what their equations declare, and what a compiled program says of them.

A matrix product of float32 operands may be made of narrower parts of them: bfloat16 on a TPU's matrix unit, TF32 on a
GPU's tensor cores (NVIDIA's tensor cores read 8 bits of exponent and 11 significant ones of each operand; PTX ISA).
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.jaxpr.products import label_of
from precaudit.interpreters.jaxpr.rounding import TO_BFLOAT16, round_once
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.interpreters.jaxpr.wide import up
from precaudit.numbers.arrays import Array
from precaudit.schema.records.devices import Way

MOST = 6  # passes, as good as float32
MATRIX: dict[Way | None, int] = {"1 pass": 1, "3 passes": 3, "6 passes": MOST}
PASSES: dict[Way | None, int] = {**MATRIX, "float32": MOST, "float32, both operands bfloat16": 1}
ONE_NARROW: Way = "float32, one operand bfloat16"
TF32: Way = "1 TF32 pass"
ROUNDED_TERMS: Way = "rounded products"
FLOAT32: Way = "float32"
# What a GPU may make of a product that its compiled program does not name, the likelier first.
OPEN_ON_GPU: tuple[Way, ...] = (TF32, FLOAT32, ROUNDED_TERMS)
DROPPED = 13  # of float32's 24 significant bits TF32 keeps 11
REST = 52 - 23 + DROPPED  # of FP64's
SMALLEST = 2.0**-126  # normal number of float32
MOST_TERMS = 1 << 22
VECTOR_TERMS = 1 << 24  # of a product that a TPU's vector unit may make
ALGORITHMS = {"BF16_BF16_F32_X3": "HIGH", "BF16_BF16_F32_X6": "HIGHEST"}
# What XLA's dot algorithms ask of any device, and JAX's precisions of a GPU.
ASKED: dict[str, Way] = {
    "DEFAULT": TF32,
    "HIGH": TF32,
    "HIGHEST": FLOAT32,
    "TF32_TF32_F32": TF32,
    "TF32_TF32_F32_X3": "3 TF32 passes",
    "BF16_BF16_F32": "1 pass",
    "BF16_BF16_F32_X3": "3 passes",
    "BF16_BF16_F32_X6": "6 passes",
    "BF16_BF16_F32_X9": FLOAT32,
    "F32_F32_F32": FLOAT32,
}
# By the significant bits that they keep of a float32 operand.
FINER: tuple[Way, ...] = ("1 pass", TF32, "3 passes", "3 TF32 passes", "6 passes", FLOAT32)


def round_to_tf32(x: jax.Array) -> Any:
    """Return FP64 values of float32 ones to the nearest TF32 number, ties away from zero (PTX ISA, cvt.rna.tf32)."""
    bits = lax.bitcast_convert_type(jnp.asarray(x), np.uint64) + np.uint64(1 << (REST - 1))
    kept = lax.bitcast_convert_type(bits & np.uint64(2**64 - 2**REST), np.float64)
    few = jnp.sign(x) * jnp.floor(jnp.abs(x) * 2.0**136 + 0.5) * 2.0**-136  # of float32's subnormal numbers
    made = jnp.where(jnp.abs(x) < SMALLEST, few, jnp.where(jnp.abs(kept) < 2.0**128, kept, jnp.sign(x) * np.inf))
    return jnp.where(jnp.isfinite(x), made, x)


# Passes on a GPU, and the format of their parts.
MADE_OF: dict[Way | None, tuple[int, Callable[[Any], Any]]] = {
    "1 pass": (1, TO_BFLOAT16),
    "3 passes": (3, TO_BFLOAT16),
    "1 TF32 pass": (1, round_to_tf32),
    "3 TF32 passes": (3, round_to_tf32),
}


def to_even(x: jax.Array) -> Any:
    """Return FP64 values to the nearest TF32 number, ties to even, as cuDNN's convolutions make them (on an H100)."""
    return lax.reduce_precision(x, 8, 23 - DROPPED)


def near_tie(x: jax.Array, within: int) -> Any:
    """Return by how much TF32 operands differ where they are rounded the other way, 0 but ``within`` ulps of a tie.

    Of FP64 values of float32 ones: what a compiler makes again for a product is some ulps off what is recorded.
    """
    bits = lax.bitcast_convert_type(jnp.asarray(x), np.uint64)
    half, ulp = np.int64(1 << (REST - 1)), np.int64(1 << (REST - DROPPED))
    off = (bits & np.uint64(2**REST - 1)).astype(np.int64) - half
    near = (jnp.abs(off) <= within * ulp) & (jnp.abs(x) >= SMALLEST) & jnp.isfinite(x)
    kept = bits & np.uint64(2**64 - 2**REST)
    below, above = (lax.bitcast_convert_type(y, np.float64) for y in (kept, kept + np.uint64(2**REST)))
    return jnp.where(near & (jnp.abs(above) < 2.0**128), jnp.abs(above - below), 0.0)


def is_compilers_choice(equation: jex.JaxprEqn) -> bool:
    """Whether a device's compiler chooses what a product's precision is: of a float32 operand, below the highest."""
    widths = [float_bits(x.aval.dtype) for x in equation.invars]
    return all(16 <= x <= 32 for x in widths) and max(widths) == 32 and declared_passes(equation) < MOST


def declared_passes(equation: jex.JaxprEqn) -> int:
    """Return the passes that a product's precision asks a TPU's matrix unit for."""
    precisions = _precisions(equation.params.get("precision"))
    return MOST if "HIGHEST" in precisions else 3 if "HIGH" in precisions else 1


def product_passes(equation: jex.JaxprEqn, made: Mapping[str, Way] | None, declared: bool) -> int:
    """Return how many bfloat16 passes make a product: 1, 3, or 6 for as good as float32; 0 where that is open.

    As many as its equation declares at least: a program that makes fewer is not excused by being compiled so. ``made``:
    how the compiled program makes products, by label; None: as ``declared``, or in float32.
    """
    if made is None:
        return declared_passes(equation) if declared else MOST
    way = made.get(label_of(equation))
    if not is_compilers_choice(equation):  # the matrix unit reads an operand that is narrow as it is held, rounded
        return 1 if way in MATRIX and all(x.aval.dtype == jnp.bfloat16 for x in equation.invars) else MOST
    return 0 if way not in PASSES else max(PASSES[way], declared_passes(equation))


def reads_one_rounded(equation: jex.JaxprEqn, inputs: Sequence[Any], made: Mapping[str, Way] | None) -> Any:
    """Whether a float32 product of which the compiler holds one operand in bfloat16 reads one that is so anyhow."""
    if made is None or made.get(label_of(equation)) != ONE_NARROW:
        return False
    return jnp.any(jnp.stack([jnp.all(x == round_once(x, jnp.bfloat16)) for x in inputs]))


def on_gpu(equation: jex.JaxprEqn, said: Way | None) -> Way | None:
    """Return how a GPU makes a product, ``said`` of it by the compiled program; None where that is open.

    At least as its equation declares: a program that keeps less of its operands is not excused by being compiled so.
    Of operands of 16 bits every term is exact in float32, but where it is stored in their format before the sum, as
    XLA makes products with one row whose result is narrow, where no preset asks for something else.
    """
    widths = [float_bits(x.aval.dtype) for x in equation.invars[:2]]
    if not all(16 <= x <= 32 for x in widths):
        return FLOAT32
    asked = equation.params.get("precision")
    preset = asked is not None and not isinstance(asked, tuple)
    names = [getattr(p, "name", "DEFAULT") for p in (asked if isinstance(asked, tuple) else (asked,))]
    least = max((ASKED.get(name, FLOAT32) for name in names), key=FINER.index)
    if max(widths) == 16:
        if least in ("1 pass", "3 passes"):  # an algorithm's, of float16 operands: bfloat16 ones it leaves as they are
            return least
        return said if said in (ROUNDED_TERMS, None) and rounds_terms(equation) and not preset else FLOAT32
    if least == FLOAT32 or said is None:
        return least if least == FLOAT32 else None
    return max(said, least, key=FINER.index) if said in FINER else least


def rounds_terms(equation: jex.JaxprEqn) -> bool:
    """Whether a GPU may store the terms of a product in its format: a dot of narrow operands with a narrow result."""
    return equation.primitive.name == "dot_general" and float_bits(equation.outvars[0].aval.dtype) == 16


def operand_parts(
    equation: jex.JaxprEqn, inputs: Sequence[Any], passes: int, narrow: Callable[[Any], Any]
) -> list[tuple[Any, Any]]:
    """Return the pairs of operands whose products are added up; nothing where float32 is multiplied.

    One pass: operands rounded by ``narrow``. Three: of each a narrow part and the rest of it, rounded likewise; the
    product of the two rests is left out.
    """
    if passes == MOST or any(not 16 <= float_bits(x.aval.dtype) <= 32 for x in equation.invars[:2]):
        return []
    x, y = inputs
    x0, y0 = narrow(x), narrow(y)
    if passes == 1:
        return [(x0, y0)]
    return [(narrow(x - x0), y0), (x0, narrow(y - y0)), (x0, y0)]


def of_rounded_terms(equation: jex.JaxprEqn, inputs: Sequence[Any], stored: Callable[[Any], Any]) -> Any:
    """Return the sum of a product's terms, each as its result's format holds it; exact where that is over 16 bits.

    Of many terms those of one step along the contracted dimensions are held at a time.
    """
    x, y, shape = elementwise_factors(equation, inputs)
    k = len(x)
    if k * prod(shape) <= MOST_TERMS:
        return jnp.sum(stored(x * y), 0)

    def add(i: jax.Array, total: Array) -> Array:
        return total + stored(x[i] * y[i])

    return lax.fori_loop(0, k, add, jnp.zeros(shape))


def in_own_format(equation: jex.JaxprEqn, inputs: Sequence[Any], stored: Callable[[Any], Any]) -> Any:
    """Return a product whose sum its result's format holds after every term, as XLA:CPU of JAX 0.12 makes some.

    Term after term with fused multiply-adds; bit for bit what ``einsum("bsef,efd->bsed")`` gives there in bfloat16.
    """
    x, y, shape = elementwise_factors(equation, inputs)
    return lax.fori_loop(0, len(x), lambda i, total: stored(total + x[i] * y[i]), jnp.zeros(shape))


def narrow_product(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a product of operands of 16 bits with such a result: a backend might sum it in that."""
    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
    return equation.primitive.name == "dot_general" and all(float_bits(a.dtype) == 16 for a in avals)


def single_product(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a product with a result in float32: XLA:CPU makes some small ones term after term."""
    return equation.primitive.name == "dot_general" and equation.outvars[0].aval.dtype == np.float32


def term_after_term(equation: jex.JaxprEqn, narrow: bool, single: bool) -> bool:
    """Whether a product's format holds its sum after every term: of those of 16 bits, of those in float32."""
    return (narrow and narrow_product(equation)) or (single and single_product(equation))


def elementwise_factors(equation: jex.JaxprEqn, inputs: Sequence[Any]) -> tuple[Any, Any, tuple[int, ...]]:
    """Return the operands of a product so that term k is ``x[k] * y[k]``, and its shape."""
    contracted, batched = equation.params["dimension_numbers"]
    sides = []
    for x, c, b in zip(inputs, contracted, batched, strict=True):
        free = [i for i in range(x.ndim) if i not in (*c, *b)]
        lengths = [x.shape[i] for i in (*c, *b, *free)]
        sides.append((lengths, jnp.transpose(up(x), (*c, *b, *free))))
    nc, nb = len(contracted[0]), len(batched[0])
    (left, x), (right, y) = sides
    k, batch = prod(left[:nc]), left[nc : nc + nb]
    shape = (*batch, *left[nc + nb :], *right[nc + nb :])
    x = x.reshape(k, *batch, *left[nc + nb :], *(1 for _ in right[nc + nb :]))
    y = y.reshape(k, *batch, *(1 for _ in left[nc + nb :]), *right[nc + nb :])
    return x, y, shape


def _precisions(asked: object) -> set[str]:
    """Return the names of a product's precisions: of its operands, or of an algorithm by the passes it asks for."""
    each = asked if isinstance(asked, tuple) else (asked,)
    names = {getattr(p, "name", "DEFAULT") for p in each}
    return {ALGORITHMS.get(name, name) for name in names}


def few_terms(equation: jex.JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether a TPU's vector unit may make a product: of a narrow result, and of not too many terms."""
    contracted, _ = equation.params["dimension_numbers"]
    k = prod(inputs[0].shape[i] for i in contracted[0])
    out = equation.outvars[0].aval
    return float_bits(out.dtype) == 16 and k * out.size <= VECTOR_TERMS

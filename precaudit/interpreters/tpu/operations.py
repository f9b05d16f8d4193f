"""HLO's array operations in JAX, one rule an opcode.

A rule takes inputs as they are and gives its result in the format it was made in: arithmetic below float32 in float32
(TPU vector units before the sixth generation have no narrower one), the rest as its inputs. Who stores it rounds it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.tpu.calls import InstructionCall, Rule, alike, dtype_of, is_float, widen_floats
from precaudit.interpreters.tpu.folding import MONOIDS, reduce, reduce_window, scatter, sort
from precaudit.interpreters.tpu.moving import (
    bitcast,
    broadcast,
    concatenate,
    dynamic_slice,
    dynamic_update_slice,
    gather,
    pad,
    reshape,
    reverse,
    strided_slice,
    transpose,
)
from precaudit.interpreters.tpu.products import declared_product


def _unary(operation: Callable[[Any], Any]) -> Rule:
    return lambda call: operation(widen_floats(call.inputs[0]))


def _binary(operation: Callable[[Any, Any], Any]) -> Rule:
    return lambda call: operation(*alike(*map(widen_floats, call.inputs)))


BINARY: dict[str, Callable[[Any, Any], Any]] = MONOIDS | {
    "subtract": lax.sub,
    "divide": lax.div,
    "remainder": lax.rem,
    "power": lax.pow,
    "atan2": lax.atan2,
    "shift-left": lax.shift_left,
    "shift-right-logical": lax.shift_right_logical,
    "shift-right-arithmetic": lax.shift_right_arithmetic,
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": lax.abs,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "cosine": lax.cos,
    "count-leading-zeros": lax.clz,
    "erf": lax.erf,
    "exponential": lax.exp,
    "exponential-minus-one": lax.expm1,
    "floor": lax.floor,
    "is-finite": lax.is_finite,
    "log": lax.log,
    "log-plus-one": lax.log1p,
    "logistic": lax.logistic,
    "negate": lax.neg,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "rsqrt": lax.rsqrt,
    "sign": lax.sign,
    "sine": lax.sin,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
    "round-nearest-afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round-nearest-even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
}
COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}


def _compare(call: InstructionCall) -> Any:
    x, y = alike(*call.inputs)
    if call.instruction.attributes.get("type") == "TOTALORDER" and is_float(x.dtype):
        x, y = _total_order(x), _total_order(y)
    return COMPARISONS[call.instruction.attributes["direction"]](x, y)


def _total_order(x: jax.Array) -> Any:
    """Return integers in the total order of floats (IEEE 754, §5.10): -NaN < -inf < … < -0 < 0 < … < NaN."""
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _constant(call: InstructionCall) -> Any:
    """Return the array of a literal. Raises ValueError for one that was left out."""
    words = re.findall(r"[^\s{},]+", call.instruction.literal)
    if "..." in words:
        raise ValueError("the text leaves its values out")
    if call.dtype == bool:
        values = np.array([{"true": True, "false": False, "1": True, "0": False}[x] for x in words], bool)
    elif is_float(call.dtype):
        values = np.array([float(x.split("(")[0]) for x in words], np.float64)
    else:
        values = np.array([int(x) for x in words], np.uint64 if call.shape.dtype == "u64" else np.int64)
    return jnp.asarray(values.astype(call.dtype).reshape(call.shape.dims))


def _iota(call: InstructionCall) -> Any:
    return lax.broadcasted_iota(call.dtype, call.shape.dims, call.ints("iota_dimension")[0])


def _select(call: InstructionCall) -> Any:
    return lax.select(_spread(call.inputs[0], call.inputs[1].shape), *alike(*call.inputs[1:]))


def _spread(x: jax.Array, dims: Sequence[int]) -> Any:
    return lax.broadcast_in_dim(x, dims, ()) if x.ndim == 0 else x


def _clamp(call: InstructionCall) -> Any:
    low, x, high = alike(*call.inputs)
    return lax.clamp(_spread(low, x.shape), x, _spread(high, x.shape))


def _convert(call: InstructionCall) -> Any:
    """Convert, but for what storing does: rounding floats to floats."""
    x = call.inputs[0]
    return x if is_float(x.dtype) and is_float(call.dtype) else x.astype(call.dtype)


def _reduce_precision(call: InstructionCall) -> Any:
    return lax.reduce_precision(
        widen_floats(call.inputs[0]), call.ints("exponent_bits")[0], call.ints("mantissa_bits")[0]
    )


def _bitcast_convert(call: InstructionCall) -> Any:
    return lax.bitcast_convert_type(call.inputs[0], call.dtype)


def _product(call: InstructionCall) -> Any:
    x, y = (v.astype(dtype_of(s)) for v, s in zip(call.inputs, call.declared_types, strict=True))
    return declared_product(call.instruction, x, y)


MOVES: dict[str, Rule] = {
    "bitcast": bitcast,
    "broadcast": broadcast,
    "clamp": _clamp,
    "concatenate": concatenate,
    "copy": lambda call: call.inputs[0],
    "dynamic-slice": dynamic_slice,
    "dynamic-update-slice": dynamic_update_slice,
    "gather": gather,
    "pad": pad,
    "reduce": reduce,
    "reduce-window": reduce_window,
    "reshape": reshape,
    "reverse": reverse,
    "select": _select,
    "slice": strided_slice,
    "transpose": transpose,
}
ELEMENTWISE: dict[str, Rule] = {
    **{name: _unary(operation) for name, operation in UNARY.items()},
    **{name: _binary(operation) for name, operation in BINARY.items()},
}
RULES: dict[str, Rule] = {
    **ELEMENTWISE,
    **MOVES,
    "bitcast-convert": _bitcast_convert,
    "compare": _compare,
    "constant": _constant,
    "convert": _convert,
    "convolution": _product,
    "dot": _product,
    "iota": _iota,
    "reduce-precision": _reduce_precision,
    "scatter": scatter,
    "sort": sort,
}

"""HLO's array operations in JAX, one rule an opcode.

A rule takes inputs as they are and gives its result in the format it was made in: arithmetic below float32 in float32
(TPU vector units before the sixth generation have no narrower one), the rest as its inputs. Who stores it rounds it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from precaudit.tpu.hlo import Computation, Instruction, Shape, Type
from precaudit.tpu.products import product, window
from precaudit.tpu.sorting import in_order

DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(bool), "bf16": np.dtype(ml_dtypes.bfloat16),
    **{f"f{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    **{f"s{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    "s4": np.dtype(ml_dtypes.int4), "u4": np.dtype(ml_dtypes.uint4),
    **{f"f8{x}": np.dtype(getattr(ml_dtypes, f"float8_{x}"))
       for x in ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz")},
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """An instruction, what its computation made so far, and the module's computations to run."""

    instruction: Instruction
    inputs: tuple[Any, ...]
    within: Computation
    made: Mapping[str, Any]
    computation: Callable[[str], Computation]
    run: Callable[[str, Sequence[Any]], Any]

    @property
    def declared(self) -> tuple[Type, ...]:
        """The types its inputs were declared with."""
        return tuple(self.within.instructions[name].type for name in self.instruction.operands)

    @property
    def shape(self) -> Shape:
        """The declared shape of its one array."""
        kind = self.instruction.type
        if not isinstance(kind, Shape):
            raise ValueError("a tuple where an array should be")
        return kind

    @property
    def dtype(self) -> np.dtype[Any]:
        """The declared format of its one array."""
        return dtype_of(self.shape)

    def ints(self, key: str) -> tuple[int, ...]:
        """Return the integers of an attribute."""
        return self.instruction.ints(key)

    @property
    def body(self) -> Computation:
        """What it applies."""
        return self.computation(self.instruction.names("to_apply")[0])


Rule = Callable[[Call], Any]


def dtype_of(shape: Type) -> np.dtype[Any]:
    """Return NumPy's format. Raises ValueError for one that has none here."""
    if not isinstance(shape, Shape):
        raise ValueError("a tuple where an array should be")
    if shape.dtype not in DTYPES:
        raise ValueError(f"no rule for the format {shape.dtype}")
    return DTYPES[shape.dtype]


def is_float(dtype: Any) -> bool:
    """Return whether a format is a float, of any width."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def widened(x: Any) -> Any:
    """Return floats below float32 in float32, the rest as it is."""
    return x.astype(np.float32) if is_float(x.dtype) and x.dtype.itemsize < 4 else x


def alike(*values: Any) -> tuple[Any, ...]:
    """Return floats of different formats in the widest of them. Raises ValueError for other formats that differ."""
    formats = {x.dtype for x in values}
    if len(formats) == 1:
        return values
    if not all(map(is_float, formats)):
        raise ValueError(f"operands of the formats {', '.join(sorted(map(str, formats)))}")
    return tuple(x.astype(max((widened(x).dtype for x in values), key=lambda d: d.itemsize)) for x in values)


def _unary(operation: Callable[[Any], Any]) -> Rule:
    return lambda call: operation(widened(call.inputs[0]))


def _binary(operation: Callable[[Any, Any], Any]) -> Rule:
    return lambda call: operation(*alike(*map(widened, call.inputs)))


def _arithmetic(operation: Callable[[Any, Any], Any], logical: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the operation, and what stands for it of truth values."""
    return lambda x, y: (logical if x.dtype == bool else operation)(x, y)


MONOIDS: dict[str, Callable[[Any, Any], Any]] = {
    "add": _arithmetic(lax.add, lax.bitwise_or), "multiply": _arithmetic(lax.mul, lax.bitwise_and),
    "maximum": _arithmetic(lax.max, lax.bitwise_or), "minimum": _arithmetic(lax.min, lax.bitwise_and),
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = MONOIDS | {
    "subtract": lax.sub, "divide": lax.div, "remainder": lax.rem, "power": lax.pow, "atan2": lax.atan2,
    "shift-left": lax.shift_left, "shift-right-logical": lax.shift_right_logical,
    "shift-right-arithmetic": lax.shift_right_arithmetic,
}  # fmt: skip
UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": lax.abs, "cbrt": lax.cbrt, "ceil": lax.ceil, "cosine": lax.cos, "count-leading-zeros": lax.clz,
    "erf": lax.erf, "exponential": lax.exp, "exponential-minus-one": lax.expm1, "floor": lax.floor,
    "is-finite": lax.is_finite, "log": lax.log, "log-plus-one": lax.log1p, "logistic": lax.logistic,
    "negate": lax.neg, "not": lax.bitwise_not, "popcnt": lax.population_count, "rsqrt": lax.rsqrt, "sign": lax.sign,
    "sine": lax.sin, "sqrt": lax.sqrt, "tan": lax.tan, "tanh": lax.tanh,
    "round-nearest-afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round-nearest-even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
}  # fmt: skip
COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}


def _compare(call: Call) -> Any:
    x, y = alike(*call.inputs)
    if call.instruction.attributes.get("type") == "TOTALORDER" and is_float(x.dtype):
        x, y = _ordered(x), _ordered(y)
    return COMPARISONS[call.instruction.attributes["direction"]](x, y)


def _ordered(x: Any) -> Any:
    """Return integers in the total order of floats (IEEE 754, §5.10): -NaN < -inf < … < -0 < 0 < … < NaN."""
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _constant(call: Call) -> Any:
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


def _iota(call: Call) -> Any:
    return lax.broadcasted_iota(call.dtype, call.shape.dims, call.ints("iota_dimension")[0])


def _select(call: Call) -> Any:
    return lax.select(_spread(call.inputs[0], call.inputs[1].shape), *alike(*call.inputs[1:]))


def _spread(x: Any, dims: Sequence[int]) -> Any:
    return lax.broadcast_in_dim(x, dims, ()) if x.ndim == 0 else x


def _clamp(call: Call) -> Any:
    low, x, high = alike(*call.inputs)
    return lax.clamp(_spread(low, x.shape), x, _spread(high, x.shape))


def _convert(call: Call) -> Any:
    """Convert, but for what storing does: rounding floats to floats."""
    x = call.inputs[0]
    return x if is_float(x.dtype) and is_float(call.dtype) else x.astype(call.dtype)


def _reduce_precision(call: Call) -> Any:
    return lax.reduce_precision(widened(call.inputs[0]), call.ints("exponent_bits")[0], call.ints("mantissa_bits")[0])


def _broadcast(call: Call) -> Any:
    axes = call.ints("dimensions")
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    return lax.broadcast_in_dim(lax.transpose(call.inputs[0], order), call.shape.dims, sorted(axes))


def _reshape(call: Call) -> Any:
    return _shaped(call.inputs[0], call.shape.dims)


def _shaped(x: Any, dims: Sequence[int]) -> Any:
    if x.size != math.prod(dims):
        raise ValueError(f"{list(x.shape)} made {list(dims)}")
    return lax.reshape(x, dims)


def _transpose(call: Call) -> Any:
    return lax.transpose(call.inputs[0], call.ints("dimensions"))


def _bitcast(call: Call) -> Any:
    """Read the same elements in the order of another layout, or the same bits as another format of their width.

    One of fewer elements in the same layout reads a corner: rows are padded to the same whole tiles.
    """
    x, source = call.inputs[0], call.declared[0]
    if not isinstance(source, Shape):
        raise ValueError("a bitcast of a tuple")
    dims = call.shape.dims
    if source.layout == call.shape.layout and x.size > math.prod(dims) and all(map(int.__ge__, source.dims, dims)):
        return lax.slice(x, [0] * x.ndim, dims)
    line = lax.reshape(lax.transpose(x, source.layout[::-1]), (x.size,))
    slowest = call.shape.layout[::-1]
    line = line if source.dtype == call.shape.dtype else _same_bits(line.astype(dtype_of(source)), call.dtype)
    physical = _shaped(line, tuple(dims[i] for i in slowest))
    return lax.transpose(physical, sorted(range(len(slowest)), key=lambda i: slowest[i]))


def _same_bits(x: Any, dtype: np.dtype[Any]) -> Any:
    """Return x's bits as another format. Raises ValueError where widths differ: tiles say which bits lie together."""
    if x.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"a bitcast from {x.dtype} to {dtype}, of another width")
    if bool in (x.dtype, dtype):
        return x.astype(dtype)
    return lax.bitcast_convert_type(x, dtype)


def _bitcast_convert(call: Call) -> Any:
    return lax.bitcast_convert_type(call.inputs[0], call.dtype)


def _slice(call: Call) -> Any:
    found = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", call.instruction.attributes.get("slice", ""))
    starts, limits, steps = ([int(x[i] or 1) for x in found] for i in range(3))
    return lax.slice(call.inputs[0], starts, limits, steps)


def _starts(indices: Sequence[Any]) -> list[Any]:
    return [i.astype(np.int32) for i in indices]


def _dynamic_slice(call: Call) -> Any:
    starts = _starts(call.inputs[1:])
    return lax.dynamic_slice(call.inputs[0], starts, call.ints("dynamic_slice_sizes"), allow_negative_indices=False)


def _dynamic_update_slice(call: Call) -> Any:
    x, update = alike(*call.inputs[:2])
    return lax.dynamic_update_slice(x, update, _starts(call.inputs[2:]), allow_negative_indices=False)


def _pad(call: Call) -> Any:
    written = call.instruction.attributes.get("padding", "")
    pads = [(*map(int, x.split("_")), 0)[:3] for x in written.split("x") if x]
    return lax.pad(*alike(*call.inputs), pads)


def _concatenate(call: Call) -> Any:
    return lax.concatenate(alike(*call.inputs), call.ints("dimensions")[0])


def _reverse(call: Call) -> Any:
    return lax.rev(call.inputs[0], call.ints("dimensions"))


def _vectors(call: Call) -> Any:
    """Return indices with the vectors they are made of along the last axis."""
    indices, axis = call.inputs[1], call.ints("index_vector_dim")[0]
    return lax.expand_dims(indices, [axis]) if axis == indices.ndim else jnp.moveaxis(indices, axis, -1)


def _gather(call: Call) -> Any:
    """Gather; what lies outside is clamped into the operand."""
    names = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
             "start_indices_batching_dims")  # fmt: skip
    dims = lax.GatherDimensionNumbers(*map(call.ints, names))
    return lax.gather(call.inputs[0], _vectors(call), dims, call.ints("slice_sizes"), mode="clip")


SCATTERS = {"add": lax.scatter_add, "multiply": lax.scatter_mul, "minimum": lax.scatter_min,
            "maximum": lax.scatter_max, "second": lax.scatter}  # fmt: skip


def _scatter(call: Call) -> Any:
    """Scatter by an operation of the element and its update; what lies outside is dropped."""
    kind = "second" if _behind(call.body, call.body.root.name) == "1" else combination(call.body)
    if len(call.inputs) != 3 or kind not in SCATTERS:
        raise ValueError("no rule for what this scatter does with an update")
    names = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims",
             "scatter_indices_batching_dims")  # fmt: skip
    dims = lax.ScatterDimensionNumbers(*map(call.ints, names))
    x, update = alike(call.inputs[0], call.inputs[2])
    return SCATTERS[kind](x, _vectors(call), update, dims, mode="drop")


SAME = ("convert", "bitcast", "copy")


def combination(body: Computation) -> str | None:
    """Return the opcode of a computation that does one operation of MONOIDS to its two parameters, else None."""
    made = [x for x in body.instructions.values() if x.opcode not in {"parameter", *SAME}]
    if len(made) != 1 or made[0].opcode not in MONOIDS or len(body.parameters) != 2:
        return None
    return made[0].opcode if {_behind(body, x) for x in made[0].operands} == {"0", "1"} else None


def _behind(body: Computation, name: str) -> str:
    """Return the number of the parameter that a value is, converted or not; "" for another value."""
    while body.instructions[name].opcode in SAME:
        name = body.instructions[name].operands[0]
    found = body.instructions[name]
    return found.literal if found.opcode == "parameter" else ""


def _folded(call: Call, fold: Callable[[tuple[Any, ...], tuple[Any, ...], Callable[..., Any]], Any]) -> Any:
    """Fold arrays from initial values by what the call applies; one narrow float array in float32, rounded once."""
    n, kind = len(call.inputs) // 2, combination(call.body)
    if n == 1 and kind is not None:
        x, start = alike(*map(widened, call.inputs))
        return fold((x,), (start,), lambda a, b: (MONOIDS[kind](*a, *b),))[0]

    def step(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
        made = call.run(call.body.name, (*a, *b))
        return made if isinstance(made, tuple) else (made,)

    inputs = tuple(x.astype(dtype_of(s)) for x, s in zip(call.inputs, call.declared, strict=True))
    made = tuple(fold(inputs[:n], inputs[n:], step))
    return made if isinstance(call.instruction.type[0], Shape) else made[0]


def _reduce(call: Call) -> Any:
    found = _vector_product(call)
    if found is not None:
        return found
    return _folded(call, lambda xs, starts, step: lax.reduce(xs, starts, step, call.ints("dimensions")))


def _vector_product(call: Call) -> Any | None:
    """Return a float32 sum of products of what was broadcast, made as one product, or None for another sum.

    The vector unit's way to multiply by a matrix, and slow on a CPU. Only the order of the sum is another.
    """
    times = call.within.instructions[call.instruction.operands[0]]
    if len(call.inputs) != 2 or times.opcode != "multiply" or combination(call.body) != "add":
        return None
    summed, every = set(call.ints("dimensions")), range(call.inputs[0].ndim)
    for spread, other in (times.operands, times.operands[::-1]):
        source = call.within.instructions[spread]
        x = call.made[source.operands[0]] if source.opcode == "broadcast" else None
        y, axes = call.made[other], source.ints("dimensions")
        if x is None or not summed <= set(axes) or {x.dtype, y.dtype, call.dtype} != {np.dtype(np.float32)}:
            continue
        kept = [i for i in every if i not in summed]
        made = jnp.einsum(x, axes, y, [*every], kept, precision="highest", preferred_element_type=np.float32)
        return made + call.inputs[1]
    return None


def _reduce_window(call: Call) -> Any:
    view = window(call.instruction.fields("window"), call.inputs[0].ndim)
    sizes = (view.size, view.stride, view.pad, view.lhs_dilate, view.rhs_dilate)
    return _folded(call, lambda xs, starts, step: lax.reduce_window(xs, starts, step, *sizes))


def _ordering(call: Call, comparison: str) -> Callable[..., Any]:
    """Return a comparison of scalars; one that has fewer parameters reads the first of them."""
    count = len(call.computation(comparison).parameters)
    return lambda *pairs: call.run(comparison, pairs[:count])


def _sort(call: Call) -> Any:
    made = in_order(call.inputs, call.ints("dimensions")[0], _ordering(call, call.body.name))
    return made if len(made) > 1 else made[0]


def top_k(call: Call) -> tuple[Any, ...]:
    """Return the first elements of the last axis by the comparison it names, and their indices."""
    kinds = call.instruction.type
    if len(kinds) != 2 or not isinstance(kinds[0], Shape) or not isinstance(kinds[1], Shape):
        raise ValueError("no rule for a TopK of other results than values and indices")
    x, k = call.inputs[0], kinds[0].dims[-1]
    places = lax.broadcasted_iota(dtype_of(kinds[1]), x.shape, x.ndim - 1)
    (comparison,) = call.instruction.called
    return tuple(v[..., :k] for v in in_order((x, places), x.ndim - 1, _ordering(call, comparison)))


def _product(call: Call) -> Any:
    x, y = (v.astype(dtype_of(s)) for v, s in zip(call.inputs, call.declared, strict=True))
    return product(call.instruction, x, y)


MOVES: dict[str, Rule] = {
    "bitcast": _bitcast, "broadcast": _broadcast, "clamp": _clamp, "concatenate": _concatenate,
    "copy": lambda call: call.inputs[0], "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice, "gather": _gather, "pad": _pad, "reduce": _reduce,
    "reduce-window": _reduce_window, "reshape": _reshape, "reverse": _reverse, "select": _select, "slice": _slice,
    "transpose": _transpose,
}  # fmt: skip
ELEMENTWISE: dict[str, Rule] = {
    **{name: _unary(operation) for name, operation in UNARY.items()},
    **{name: _binary(operation) for name, operation in BINARY.items()},
}
RULES: dict[str, Rule] = {
    **ELEMENTWISE, **MOVES, "bitcast-convert": _bitcast_convert, "compare": _compare, "constant": _constant,
    "convert": _convert, "convolution": _product, "dot": _product, "iota": _iota,
    "reduce-precision": _reduce_precision, "scatter": _scatter, "sort": _sort,
}  # fmt: skip

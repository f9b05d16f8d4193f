"""Operations that apply a computation: reductions, scatters, sorts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.tpu.calls import InstructionCall, alike, dtype_of, widen_floats
from precaudit.interpreters.tpu.hlo import ArrayType, Computation
from precaudit.interpreters.tpu.moving import vectors
from precaudit.interpreters.tpu.products import window
from precaudit.interpreters.tpu.sorting import in_order


def _arithmetic(operation: Callable[[Any, Any], Any], logical: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the operation, and what stands for it of truth values."""
    return lambda x, y: (logical if x.dtype == bool else operation)(x, y)


MONOIDS: dict[str, Callable[[Any, Any], Any]] = {
    "add": _arithmetic(lax.add, lax.bitwise_or),
    "multiply": _arithmetic(lax.mul, lax.bitwise_and),
    "maximum": _arithmetic(lax.max, lax.bitwise_or),
    "minimum": _arithmetic(lax.min, lax.bitwise_and),
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}
SCATTERS = {
    "add": lax.scatter_add,
    "multiply": lax.scatter_mul,
    "minimum": lax.scatter_min,
    "maximum": lax.scatter_max,
    "second": lax.scatter,
}


def scatter(call: InstructionCall) -> Any:
    """Scatter by an operation of the element and its update; what lies outside is dropped."""
    kind = "second" if _behind(call.body, call.body.root.name) == "1" else combination(call.body)
    if len(call.inputs) != 3 or kind not in SCATTERS:
        raise ValueError("no rule for what this scatter does with an update")
    names = (
        "update_window_dims",
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "input_batching_dims",
        "scatter_indices_batching_dims",
    )
    dims = lax.ScatterDimensionNumbers(*map(call.ints, names))
    x, update = alike(call.inputs[0], call.inputs[2])
    return SCATTERS[kind](x, vectors(call), update, dims, mode="drop")


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


def _fold(call: InstructionCall, fold: Callable[[tuple[Any, ...], tuple[Any, ...], Callable[..., Any]], Any]) -> Any:
    """Fold arrays from initial values by what the call applies; one narrow float array in float32, rounded once."""
    n, kind = len(call.inputs) // 2, combination(call.body)
    if n == 1 and kind is not None:
        x, start = alike(*map(widen_floats, call.inputs))
        return fold((x,), (start,), lambda a, b: (MONOIDS[kind](*a, *b),))[0]

    def step(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
        made = call.run(call.body.name, (*a, *b))
        return made if isinstance(made, tuple) else (made,)

    inputs = tuple(x.astype(dtype_of(s)) for x, s in zip(call.inputs, call.declared_types, strict=True))
    made = tuple(fold(inputs[:n], inputs[n:], step))
    return made if isinstance(call.instruction.type[0], ArrayType) else made[0]


def reduce(call: InstructionCall) -> Any:
    """Reduce; a bfloat16 sum is float32's, rounded once where it is stored."""
    found = _vector_product(call)
    if found is not None:
        return found
    return _fold(call, lambda xs, starts, step: lax.reduce(xs, starts, step, call.ints("dimensions")))


def _vector_product(call: InstructionCall) -> Any | None:
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


def reduce_window(call: InstructionCall) -> Any:
    """Reduce windows."""
    view = window(call.instruction.fields("window"), call.inputs[0].ndim)
    sizes = (view.size, view.stride, view.pad, view.lhs_dilate, view.rhs_dilate)
    return _fold(call, lambda xs, starts, step: lax.reduce_window(xs, starts, step, *sizes))


def _ordering(call: InstructionCall, comparison: str) -> Callable[..., Any]:
    """Return a comparison of scalars; one that has fewer parameters reads the first of them."""
    count = len(call.computation(comparison).parameters)
    return lambda *pairs: call.run(comparison, pairs[:count])


def sort(call: InstructionCall) -> Any:
    """Sort arrays together by any comparison."""
    made = in_order(call.inputs, call.ints("dimensions")[0], _ordering(call, call.body.name))
    return made if len(made) > 1 else made[0]


def top_k(call: InstructionCall) -> tuple[Any, ...]:
    """Return the first elements of the last axis by the comparison it names, and their indices."""
    kinds = call.instruction.type
    if len(kinds) != 2 or not isinstance(kinds[0], ArrayType) or not isinstance(kinds[1], ArrayType):
        raise ValueError("no rule for a TopK of other results than values and indices")
    x, k = call.inputs[0], kinds[0].dims[-1]
    places = lax.broadcasted_iota(dtype_of(kinds[1]), x.shape, x.ndim - 1)
    (comparison,) = call.instruction.computations
    return tuple(v[..., :k] for v in in_order((x, places), x.ndim - 1, _ordering(call, comparison)))

"""Programs whose floats of 8 and 16 bits are moved as bits: the same operations, without conversions of whole arrays.

XLA:CPU slices and updates no float narrower than 32 bits: around every ``dynamic_slice`` of a loop's weights and every
``dynamic_update_slice`` of a cache it converts all of the array to float32, and back. On unsigned integers of the same
width both are done in place. Only where a value is computed with is it a float again. Which roundings between fused
operations a compiler then leaves out may differ: at 4,096 tokens XLA:CPU no longer skips that of a norm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from precaudit.interpreters.jaxpr.jax_versions import bind, open_jaxpr, walk
from precaudit.interpreters.jaxpr.loops import LOOPS

INTEGERS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}  # by the bytes of a float
MOVES = (
    "broadcast_in_dim",
    "copy",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "name",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
)
INLINE = frozenset({"jit", "closed_call"})


@partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclass(frozen=True)
class NarrowBits:
    """An array of floats of 8 or 16 bits, held as unsigned integers of its shape; NumPy reads it as the floats."""

    bits: Any
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self.bits.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the floats on the host."""
        found = np.asarray(self.bits).view(self.dtype)
        return found if dtype is None or dtype == found.dtype else found.astype(dtype)

    def value(self) -> jax.Array:
        """Return the floats on the device."""
        return lax.bitcast_convert_type(self.bits, self.dtype)


def hold_narrow(tree: object) -> Any:
    """Return a tree of arrays with its narrow floats on the host or a CPU as ``NarrowBits``, in the same memory."""
    return jax.tree.map(_hold, tree, is_leaf=_is_narrow)


def moved_as_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with narrow floats moved as bits, whose arguments and results may be ``NarrowBits``.

    Loops carry, slice and stack bits, and what slices, updates or reshapes bits gives bits; everything else is bound as
    it was, on floats. The function is traced with the floats.
    """

    @wraps(function)
    def restore(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args, is_leaf=_is_narrow)
        shown = [jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_narrow(x) else x for x in leaves]
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*structure.unflatten(shown))
        return jax.tree.unflatten(jax.tree.structure(shape), _run(jaxpr.jaxpr, jaxpr.consts, leaves))

    return restore


def _is_narrow(x: object) -> bool:
    return isinstance(x, NarrowBits)


def _floats(dtype: DTypeLike) -> bool:
    """Whether a format is a float of whole bytes, narrower than 32 bits (int4 and its kin are packed: they stay)."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits in (8, 16)


def _hold(x: object) -> Any:
    if not isinstance(x, jax.Array | np.ndarray) or not _floats(x.dtype):
        return x
    bits = INTEGERS[x.dtype.itemsize]
    if isinstance(x, np.ndarray):
        return NarrowBits(x.view(bits), x.dtype)
    if {device.platform for device in x.devices()} != {"cpu"}:
        return x
    if len(x.devices()) == 1:
        return NarrowBits(jax.device_put(np.asarray(x).view(bits), x.sharding), np.dtype(x.dtype))  # not copied
    parts = [jax.device_put(np.asarray(part.data).view(bits), part.device) for part in x.addressable_shards]
    return NarrowBits(jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts), np.dtype(x.dtype))


def _bits(x: Any) -> Any:
    """Return a value as bits, where it is narrow."""
    if _is_narrow(x) or not _floats(jnp.result_type(x)):
        return x
    dtype = np.dtype(x.dtype)
    return NarrowBits(lax.bitcast_convert_type(x, INTEGERS[dtype.itemsize]), dtype)


def _value(x: Any) -> Any:
    return x.value() if _is_narrow(x) else x


def _run(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return walk(jaxpr, consts, args, _step)


def _step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in LOOPS:
        return LOOPS[name](_run, _bits, params, [_bits(x) for x in inputs])
    if name == "remat2":
        return _remat(params, [_bits(x) for x in inputs])
    if name in INLINE:
        jaxpr, consts = open_jaxpr(params["jaxpr" if name == "jit" else "call_jaxpr"])
        return _run(jaxpr, consts, inputs)
    if name in MOVES and _is_narrow(inputs[0]) and params.get("fill_value") is None:
        given = [x.bits if _is_narrow(x) else x for x in map(_bits, inputs)]
        return [NarrowBits(y, inputs[0].dtype) for y in bind(equation, given)]
    return bind(equation, [_value(x) for x in inputs])


def _remat(params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    jaxpr, consts = open_jaxpr(params["jaxpr"])
    how = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
    return list(jax.checkpoint(lambda *args: [_bits(x) for x in _run(jaxpr, consts, args)], **how)(*inputs))

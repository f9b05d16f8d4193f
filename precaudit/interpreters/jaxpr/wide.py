"""The formats of the FP64 shadow: floats in FP64, complex numbers in complex128, everything else as it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

F64 = np.dtype("float64")
C128 = np.dtype("complex128")
NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def wide_dtype(dtype: DTypeLike) -> Any:
    """Return the format of the shadow's value for a value of a format; PRNG keys and float0 as they are."""
    if jnp.issubdtype(dtype, jnp.floating):
        return F64
    return C128 if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def up(x: ArrayLike) -> Any:
    """Lift a value; exact."""
    return x.astype(wide_dtype(x.dtype)) if hasattr(x, "dtype") and wide_dtype(x.dtype) != x.dtype else x


def traced_as(x: ArrayLike) -> jax.ShapeDtypeStruct:
    """Return what a program sees of an argument where 64-bit types are off."""
    if not hasattr(x, "dtype"):
        x = jnp.asarray(x)
    dtype = jnp.dtype(NARROW[x.dtype.name]) if getattr(x.dtype, "name", "") in NARROW else x.dtype
    return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=bool(getattr(x, "weak_type", False)))


def halve_widths(tree: object) -> Any:
    """Return a tree of arguments as a program reads them where 64-bit types are off: its arrays in half the width."""

    def leaf(x: ArrayLike) -> Any:
        found = getattr(getattr(x, "dtype", None), "name", "")
        if found not in NARROW:
            return x
        with np.errstate(over="ignore"):
            return x.astype(NARROW[found])

    return jax.tree.map(leaf, tree)


def argument_value(x: ArrayLike, aval: Any) -> Any:
    """Return an argument as it enters the shadow: integers in the format the program was traced with."""
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    narrow = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != aval.dtype
    return x.astype(aval.dtype) if narrow else x

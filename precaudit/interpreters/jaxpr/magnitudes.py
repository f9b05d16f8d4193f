"""(|A|·|B|)ᵢ of every element of a program's segments: sums of |terms| where it sums terms (Higham 2002, §3.5).

What rounding may leave where terms cancel grows with it, however small the sum is.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.plant import Planted, Values, planting
from precaudit.interpreters.jaxpr.products import GROUPED, PRODUCTS
from precaudit.interpreters.jaxpr.sums import monoid

# They lay out, choose or add up elements: of sizes they give sizes.
LAID_OUT = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "cumsum",
    "device_put",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "name",
    "optimization_barrier",
    "pad",
    "reduce_precision",
    "reduce_sum",
    "reduce_window_sum",
    "reshape",
    "rev",
    "scatter",
    "scatter-add",
    "select_n",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
ADDED = {"add", "add_any", "sub"}


def magnitudes(function: Callable[..., Any], steps: Sequence[int] | None = None) -> Callable[..., Values]:
    """Return ``g(values, *args) → {tap: (|A|·|B|)}`` of its segments, FP64 in the shape of values that ``plant`` takes.

    At least the size of what the segment makes in FP64. Functions other than sums and products begin anew with the
    size of their result. ``steps``: as ``planting`` has them. Under ``jax.enable_x64(True)``; raises as ``plant`` does.
    """
    return planting(function, Magnitudes, steps=steps)


class Magnitudes(Planted):
    """Evaluates a planted shadow and what its terms add up to without cancelling."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__({}, "read", names)
        self.sizes: dict[int, tuple[Any, Any]] = {}  # of values, by their ids

    def size(self, x: ArrayLike) -> Any:
        """Return the size of a value's terms."""
        known = self.sizes.get(id(x))
        return jnp.abs(x) if known is None else known[1]

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation, and the same on the sizes of its operands where it is a sum or a product."""
        out = super().operation(equation, inputs)
        if len(out) == 1 and _floats(out[0]) and (size := self._size(equation, inputs)) is not None:
            self.sizes[id(out[0])] = out[0], size
        return out

    def _size(self, equation: jex.JaxprEqn, inputs: Sequence[Any]) -> Any:
        name = equation.primitive.name
        if name in ("mul", *PRODUCTS, GROUPED) or (name in LAID_OUT and self._has_size(inputs)) or _adds(equation):
            return super().operation(equation, [self.size(x) if _floats(x) else x for x in inputs])[0]
        if name in ADDED:
            return self.size(inputs[0]) + self.size(inputs[1])
        if name in ("neg", "abs"):
            return self.size(inputs[0])
        if name == "div" and self._has_size(inputs[:1]):
            return self.size(inputs[0]) / jnp.abs(inputs[1])
        return None

    def _has_size(self, inputs: Sequence[Any]) -> bool:
        return any(id(x) in self.sizes for x in inputs)

    def tap(self, x: jax.Array, value: jax.Array) -> tuple[list[Any], list[Any]]:
        """Go on with the planted value, and tell the size of what the segment makes."""
        return [self.chosen(value, x)], [jnp.maximum(self.size(x), jnp.abs(x)) if _floats(x) else x]


def _adds(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name in ("reduce_sum", "cumsum", "reduce_window_sum") or monoid(equation) == "add"


def _floats(x: ArrayLike) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))

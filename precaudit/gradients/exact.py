"""What a reference's formula gives in FP64: its outputs, and its vector-Jacobian product."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from precaudit.transforms.shadow import shadow


def exact(
    reference: Callable[..., Any], inputs: Sequence[Any], cotangents: Any, argnums: Sequence[int]
) -> tuple[Any, tuple[Any, ...]]:
    """Return ``(outputs, gradients)`` of ``reference`` at ``inputs``, floats in FP64.

    ``inputs``: pytrees of arrays of any format. ``cotangents``: one of its outputs' structure and shapes. ``argnums``:
    positions in ``inputs`` whose gradients are asked, in that order. The reference is traced on inputs cast to float32,
    Python scalars too: a literal takes the format it is traced beside, and bfloat16 holds 0.7 as 0.69921875.
    One beside a value that the reference itself casts to bfloat16 keeps that format: give it as an input. Custom
    derivative rules are the reference's own. Raises CannotLift as ``shadow`` does.
    """
    places = tuple(argnums)

    def both(cotangents: Any, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        def asked(*chosen: Any) -> Any:
            whole = list(inputs)
            for i, x in zip(places, chosen, strict=True):
                whole[i] = x
            return reference(*whole)

        out, pull = jax.vjp(asked, *(inputs[i] for i in places))
        return out, pull(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, out))

    single = jax.tree.map(_single, (cotangents, *inputs))
    with jax.enable_x64(True):
        found: tuple[Any, tuple[Any, ...]] = shadow(both)(*single)
        return found


def _single(x: Any) -> Any:
    array = jnp.asarray(x)
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array

"""What a value of a jaxpr was made of: narrow values widened, narrow values kept."""

from typing import Any

MOVES = frozenset(
    ("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice", "copy", "rev", "concatenate",
     "expand_dims", "gather", "optimization_barrier", "sharding_constraint", "name")
)  # fmt: skip
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def widened(equation: Any, i: int) -> bool:
    """Whether input ``i`` is a bfloat16 or narrower value, cast up: one pass loses nothing of it."""
    made = equation.producer(i)
    while made is not None and made.primitive.name in MOVES:
        var = made.invars[0]
        made = None if hasattr(var, "val") else equation.producers.get(var)
    if made is None or made.primitive.name != "convert_element_type":
        return False
    return str(made.invars[0].aval.dtype) in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool")

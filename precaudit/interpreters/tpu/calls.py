"""An instruction to be run, and the formats of its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Type

DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(bool),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    **{f"f{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    **{f"s{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    "s4": np.dtype(ml_dtypes.int4),
    "u4": np.dtype(ml_dtypes.uint4),
    **{
        f"f8{x}": np.dtype(getattr(ml_dtypes, f"float8_{x}"))
        for x in ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz")
    },
}


@dataclass(frozen=True)
class InstructionCall:
    """An instruction, what its computation made so far, and the module's computations to run."""

    instruction: Instruction
    inputs: tuple[Any, ...]
    within: Computation
    made: Mapping[str, Any]
    computation: Callable[[str], Computation]
    run: Callable[[str, Sequence[Any]], Any]

    @property
    def declared_types(self) -> tuple[Type, ...]:
        """The types its inputs were declared with."""
        return tuple(self.within.instructions[name].type for name in self.instruction.operands)

    @property
    def shape(self) -> ArrayType:
        """The declared shape of its one array."""
        kind = self.instruction.type
        if not isinstance(kind, ArrayType):
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


Rule = Callable[[InstructionCall], Any]


def dtype_of(shape: Type) -> np.dtype[Any]:
    """Return NumPy's format. Raises ValueError for one that has none here."""
    if not isinstance(shape, ArrayType):
        raise ValueError("a tuple where an array should be")
    if shape.dtype not in DTYPES:
        raise ValueError(f"no rule for the format {shape.dtype}")
    return DTYPES[shape.dtype]


def is_float(dtype: DTypeLike) -> bool:
    """Return whether a format is a float, of any width."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def widen_floats(x: jax.Array) -> Any:
    """Return floats below float32 in float32, the rest as it is."""
    return x.astype(np.float32) if is_float(x.dtype) and x.dtype.itemsize < 4 else x


def alike(*values: Any) -> tuple[Any, ...]:
    """Return floats of different formats in the widest of them. Raises ValueError for other formats that differ."""
    formats = {x.dtype for x in values}
    if len(formats) == 1:
        return values
    if not all(map(is_float, formats)):
        raise ValueError(f"operands of the formats {', '.join(sorted(map(str, formats)))}")
    return tuple(x.astype(max((widen_floats(x).dtype for x in values), key=lambda d: d.itemsize)) for x in values)

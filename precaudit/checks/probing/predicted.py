"""What a TPU that need not be here would make of a product: its passes and unit, and its scores on this CPU."""

from dataclasses import dataclass
from typing import Any

from precaudit.checks.probing.ways import REFUSALS, ProductWay, first_line
from precaudit.errors import UserError
from precaudit.interpreters.tpu.execute import Unknown, function
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.hlo import Instruction, Module
from precaudit.interpreters.tpu.products import product_passes
from precaudit.interpreters.tpu.target import Target, compile_for
from precaudit.numbers.arrays import Array

MATRIX = ("convolution", "dot")  # opcodes that the matrix unit runs


@dataclass(frozen=True)
class PredictedScores:
    """Scores in their format, or why there are none; bytes of arguments, outputs, temporaries; what makes them."""

    scores: Array | None = None
    unknown: str | None = None
    memory: tuple[int, int, int] | None = None
    unit: Any = None
    passes: int | None = None


def predict(target: Target, way: ProductWay, q: Array, k: Array) -> PredictedScores:
    """Compile a way for a target and run what its compiler made. Raises UserError without libtpu."""
    import numpy as np

    try:
        made = compile_for(target, way.call, (q, k))
        module = parse_module(made.text)
    except (UserError, *REFUSALS) as error:
        return PredictedScores(unknown=f"refused: {first_line(error)}")
    memory = (made.arguments, made.outputs, made.temporaries)
    unit, count = _unit(module)
    count = None if q.dtype.kind == "i" else count  # passes are of floats
    try:
        found = function(module)(q, k)
    except Unknown as error:
        return PredictedScores(None, f"not predicted: {first_line(error)}", memory, unit, count)
    return PredictedScores(np.asarray(found[0] if isinstance(found, tuple) else found), None, memory, unit, count)


def _unit(module: Module) -> tuple[str | None, int | None]:
    """Return the unit that makes a program's one product, and in how many passes; of the vector unit none."""
    every: list[Instruction] = [i for _, i in module.walk()]
    products = [i for i in every if i.opcode in MATRIX]
    if products:
        return "matrix", max(map(product_passes, products))
    return ("vector" if any(i.opcode == "reduce" for i in every) else None), None

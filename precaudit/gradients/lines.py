"""Which line of a function rounds most: its program with the roundings of one line, all else in FP64."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from precaudit.arrays import Array
from precaudit.gradients.formula import EFFORT, Formula
from precaudit.transforms.emulate import Emulated, Realisation
from precaudit.transforms.jax_versions import source
from precaudit.transforms.subnormals import device_flushes
from precaudit.transforms.wide import up


class OneLine(Emulated):
    """Rounds what the equations of one line give."""

    def __init__(self, line: str) -> None:
        super().__init__({}, (), Realisation(flush=device_flushes()))
        self.line = line

    def operation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation, in FP64 unless the line made it."""
        if source(equation) == self.line:
            return super().operation(equation, inputs)
        return super(Emulated, self).operation(equation, inputs)


def shares(
    formula: Formula, cotangents: Any, inputs: Sequence[Any], leaf: int, exact: Array
) -> list[tuple[str, float]]:
    """Return ``(line, ‖error‖² of it alone / that of all lines)`` of one leaf, the largest first.

    Roundings of different lines add up as errors that are independent do.
    """
    found = []
    with jax.enable_x64(True):
        held = formula.leaves(cotangents, inputs)
        for line in formula.narrow():
            made = np.asarray(jax.jit(_rounding(formula, line), compiler_options=EFFORT)(*held)[leaf], np.float64)
            error = np.where(np.isfinite(made - exact), made - exact, 0.0)
            found.append((line, float(np.sum(error**2))))
    total = sum(size for _, size in found)
    return sorted(((line, size / total) for line, size in found if size), key=lambda x: -x[1])


def inside(
    formula: Formula, cotangents: Any, inputs: Sequence[Any], leaf: int, straight: Array
) -> list[tuple[str, float]]:
    """Return the same of the places inside a function's Pallas kernels, all others in float32.

    ``straight``: the leaf with all of them in float32. Kernels are run and not lifted.
    """
    found = []
    for place in formula.places:
        made = formula.raised(cotangents, inputs, [place])[leaf].astype(np.float64)
        error = made - straight.astype(np.float64)
        found.append((place, float(np.sum(np.where(np.isfinite(error), error, 0.0) ** 2))))
    total = sum(size for _, size in found)
    return sorted(((place, size / total) for place, size in found if size), key=lambda x: -x[1])


def _rounding(formula: Formula, line: str) -> Callable[..., list[Any]]:
    def run(*held: Any) -> list[Any]:
        return [up(x) for x in OneLine(line).run(formula.jaxpr.jaxpr, formula.jaxpr.consts, held)]

    return run


def short(line: str) -> str:
    """Return ``FILE:LINE (function)`` from here, or from where packages are installed."""
    return line.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")

"""Which line of a function rounds most: its program with the roundings of one line, all else in FP64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from precaudit.checks.gradients.flips import Choosing, chooses, record_choices
from precaudit.checks.gradients.formula import Formula
from precaudit.interpreters.jaxpr.effort import least_effort
from precaudit.interpreters.jaxpr.strict import STRICTLY
from precaudit.interpreters.jaxpr.wide import up
from precaudit.numbers.arrays import Array


def line_shares(
    formula: Formula, cotangents: object, inputs: Sequence[Any], leaf: int, exact: Array
) -> list[tuple[str, float]]:
    """Return ``(line, ‖error‖² of it alone / that of all lines)`` of one leaf, the largest first.

    Roundings of different lines add up as errors that are independent do. Where the function chooses otherwise than
    FP64 does, that is an error of the choice's line, and all others' are those that are left with its choices.
    """
    found = []
    held = formula.leaves(cotangents, inputs)
    chosen = None
    if chooses(formula.jaxpr.jaxpr):
        chosen = record_choices(formula.jaxpr, held, STRICTLY if formula.strict else None)
    with jax.enable_x64(True):
        if chosen is not None:
            own, names = _raise_line(formula, None, held)
            off = [(name, np.sum(a != b), a.size) for name, a, b in zip(names, own[1], chosen, strict=True)]
            if (first := next((i for i, x in enumerate(off) if x[1]), None)) is not None:
                name, n, size = off[first]
                middle = np.asarray(_raise_line(formula, None, held, chosen)[0][0][leaf], np.float64)
                alone = (x for x in formula.narrow() if _turns(_raise_line(formula, x, held)[0][1], chosen, first))
                by = f" by the rounding at {short_line(line)}" if (line := next(alone, None)) is not None else ""
                found.append((f"{name} chooses {n:,} of {size:,} differently{by}", _energy(middle, exact)))
                exact = middle
        for line in formula.narrow():
            found.append(
                (line, _energy(np.asarray(_raise_line(formula, line, held, chosen)[0][0][leaf], np.float64), exact))
            )
    total = sum(size for _, size in found)
    return sorted(((line, size / total) for line, size in found if size), key=lambda x: -x[1])


def _raise_line(
    formula: Formula, line: str | None, leaves: Sequence[Any], chosen: Sequence[Array] | None = None
) -> tuple[tuple[list[Any], list[Array]], list[str]]:
    """Return (leaves, choices) of a function in FP64 but for one line, and each choice's line and operation."""
    names: list[str] = []

    def run(held: Any, given: Any) -> tuple[list[Any], list[Any]]:
        one = Choosing(line, given)
        out = [up(x) for x in one.run(formula.jaxpr.jaxpr, formula.jaxpr.consts, held)]
        names[:] = [f"{where}: {name}" for where, name, _ in one.made]
        return out, [x for *_, x in one.made]

    out, own = jax.jit(run, compiler_options=least_effort())(list(leaves), chosen)
    return (out, [np.asarray(x) for x in own]), names


def _turns(own: Sequence[Array], chosen: Sequence[Array], i: int) -> bool:
    return np.array_equal(own[i], chosen[i])


def _energy(made: Array, exact: Array) -> float:
    error = made - exact
    return float(np.sum(np.where(np.isfinite(error), error, 0.0) ** 2))


def kernel_lines(
    formula: Formula, cotangents: object, inputs: Sequence[Any], leaf: int, straight: Array
) -> list[tuple[str, float]]:
    """Return the same of the places inside a function's Pallas kernels, all others in float32.

    ``straight``: the leaf with all of them in float32. Kernels are run and not lifted.
    """
    found = []
    for place in formula.places:
        made = formula.with_raised_kernels(cotangents, inputs, [place])[leaf].astype(np.float64)
        error = made - straight.astype(np.float64)
        found.append((place, float(np.sum(np.where(np.isfinite(error), error, 0.0) ** 2))))
    total = sum(size for _, size in found)
    return sorted(((place, size / total) for place, size in found if size), key=lambda x: -x[1])


def short_line(line: str) -> str:
    """Return ``FILE:LINE (function)`` from here, or from where packages are installed."""
    return line.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")

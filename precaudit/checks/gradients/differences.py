"""A third opinion on a reference's gradients: differences of its FP64 outputs along random directions."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from precaudit.checks.gradients.formula import Formula
from precaudit.numbers.arrays import Array
from precaudit.schema.digits import digits

STEP = 1e-4  # of an input's largest value: truncation and rounding of the extrapolated difference both below 1e-10
AGREE, SMOOTH = 1e-6, 1e-3  # relative to ‖gradient‖ ‖direction‖ / √n, what a random direction sees of it


def gradient_disagreements(
    formula: Formula,
    cotangents: object,
    inputs: Sequence[Any],
    places: Sequence[int],
    names: Sequence[str],
    exact: Sequence[Array],
) -> list[str]:
    """Return each differentiated input whose gradient the differences contradict, in words; none where they agree.

    ``exact``: outputs, then gradients as ``names`` calls them. Central differences of two steps, extrapolated
    (Richardson); where the two do not agree the function has a kink there, and nothing is said of the gradient.
    """
    weights = [np.asarray(c, np.float64) for c in jax.tree.leaves(cotangents)]
    gradients = list(zip(names[len(weights) :], exact[len(weights) :], strict=True))
    random = np.random.default_rng(20020801)
    found = []
    for place in places:
        leaves, structure = jax.tree.flatten(inputs[place])
        for i, leaf in enumerate(leaves):
            name, gradient = gradients.pop(0)
            x = np.asarray(leaf, np.float64)
            if not np.all(np.isfinite(gradient)) or not x.size:
                continue
            way = random.standard_normal(x.shape)
            step = STEP * (float(np.abs(x).max()) or 1.0)

            def at(t: float, i: int = i, place: int = place, x: Array = x, way: Array = way) -> float:
                moved = [np.asarray(v, np.float64) for v in leaves]  # noqa: B023
                moved[i] = x + t * way
                every = list(inputs)
                every[place] = jax.tree.unflatten(structure, moved)  # noqa: B023
                out = formula.exact(cotangents, every)[: len(weights)]
                return float(sum(np.sum(w * o) for w, o in zip(weights, out, strict=True)))

            coarse, fine = ((at(h) - at(-h)) / (2 * h) for h in (step, step / 2))
            slope, own = (4 * fine - coarse) / 3, float(np.sum(gradient * way))
            size = max(float(np.linalg.norm(gradient)), abs(slope), abs(own))
            if not np.isfinite(slope) or abs(fine - coarse) > SMOOTH * size:
                continue
            if abs(slope - own) > AGREE * size:
                found.append(
                    f"{name}: differences in FP64 give a slope of {digits(slope, 6)}, "
                    f"the reference's gradient {digits(own, 6)}"
                )
    return found

"""Honest ways to make a program's numbers: what is rounded, how sums and products are made, on which unit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.extend.core as jex
import numpy as np

from precaudit.interpreters.jaxpr.algebra import SUMS
from precaudit.interpreters.jaxpr.excess import Excess, Unrounded, narrows, widens
from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.schema.records.devices import SplitSum, Way

SHARED = 3  # equations that read a value: a norm reads its input twice, the next sum of the stream once more


@dataclass(frozen=True)
class Realisation:
    """One honest way to make a program's numbers.

    ``unrounded``: which narrow results inside segments are not rounded: none, those that the program converts to a
    wider format (a compiler removes such pairs), of these only those that are not conversions themselves (XLA:CPU
    keeps a pair that the program writes out), none but where a square or a sum reads them (a TPU computes a norm's
    statistics in a fusion of their own, from what is not rounded yet, and its values from what is stored), those that
    fewer than SHARED equations read (what more read, such as a residual stream, a compiler stores), or all, always but
    for formats of 8 bits, which are meant; "single": all are
    rounded to float32 instead, as the same program would that declares no narrower format. ``expanded``: logistic,
    cubes and 1 − x² of narrow formats, and quotients by what is smaller, are made of simpler operations, each rounded,
    as XLA makes them. ``seed``: 0 rounds to nearest, others round on grids moved by a factor of each equation, with
    inaccurate functions. ``sums``: exact; those of narrow formats rounded to their own after every term (what XLA:CPU
    makes of a ``reduce_sum`` in bfloat16, such as the gradient of a broadcast), or so in several sums beside each other
    ("lanes"); in float32; or so from the last term to the first, or in an order and on a grid of each seed's;
    "fused": products in float32 term after term with fused multiply-adds, others exact.
    ``unit``: what makes products of floats no wider than float32. The matrix unit of a TPU makes them of
    operands in one, two or three bfloat16 parts, by the precision that their equation declares; its vector unit
    multiplies and adds, every term in the format of the result. ``made``: how the compiled program makes each product
    of float32 operands below the highest precision, by its label (``transforms.products``); what it does not say is not
    a number. A GPU ("gpu") makes products as ``made`` says, and those that it does not name as ``otherwise``; of what
    that leaves open it makes no number. ``ties``: to each product is added what its operands make of it where those
    near a tie are rounded the other way, all of it of one sign. ``apart``: values are two of each, stacked, as a
    compiler has them that makes again in each fusion what several read: of two equations that read a result the second
    reads the other. ``flush``: the device makes 0 of subnormals (``transforms.subnormals``).
    ``narrow_products``: sums of products of narrow operands and results are rounded to their own format after every
    term, which no program asks for. ``split``: products whose terms lie on several devices, by label: each part is
    rounded to the product's format before parts are added. ``by_conversions``: narrow inputs that are given unrounded
    are read so where the program converts them to a wider format; what else reads them reads them rounded.
    ``contracted``: a product in float16 that nothing else reads is added before it is rounded (fused multiply-add).
    ``chosen``: which reads see results unrounded, one by one, in place of what ``unrounded`` says.
    """

    unrounded: Unrounded = "none"
    expanded: bool = True
    seed: int = 0
    sums: Literal["exact", "own", "lanes", "single", "reversed", "shuffled", "fused"] = "exact"
    unit: Literal["any", "matrix", "vector", "gpu"] = "any"
    made: Mapping[str, Way] | None = None
    otherwise: Way | None = None
    ties: bool = False
    apart: bool = False
    flush: bool = False
    narrow_products: bool = False
    split: Mapping[str, SplitSum] | None = None
    by_conversions: bool = False
    contracted: bool = False
    chosen: Excess | None = None


def converts_twice(jaxpr: jex.Jaxpr) -> bool:
    """Whether a jaxpr, or a body in it, converts floats to 16 bits and back."""
    every = list(walk_equations(jaxpr))
    narrowed = {e.outvars[0] for e in every if narrows(e)}
    return any(widens(e) and not hasattr(e.invars[0], "val") and e.invars[0] in narrowed for e in every)


def contracts(jaxpr: jex.Jaxpr) -> bool:
    """Whether a jaxpr, or a body in it, adds a product in float16."""
    every = list(walk_equations(jaxpr))
    products = {e.outvars[0] for e in every if e.primitive.name == "mul" and e.outvars[0].aval.dtype == np.float16}
    sums = (v for e in every if e.primitive.name in SUMS for v in e.invars if not hasattr(v, "val"))
    return any(v in products for v in sums)


def elidable(jaxpr: jex.Jaxpr) -> bool:
    """Whether a jaxpr, or a body in it, converts 16-bit floats to a wider format: a compiler may not have rounded."""
    return any(map(widens, walk_equations(jaxpr)))


def rounds_all(how: Realisation) -> bool:
    """Whether a realisation rounds every result, and is expanded as XLA does."""
    return how.unrounded == "none" and how.expanded and not how.contracted

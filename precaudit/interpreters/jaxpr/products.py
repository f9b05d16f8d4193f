"""Products and sums of a program by number, so that what a compiler makes of each can be told from its text."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.schema.records.devices import PRODUCT, SUM

PRODUCTS = ("dot_general", "conv_general_dilated")
GROUPED = "ragged_dot_general"  # a product whose pieces a compiler makes as it likes: it has no label
_LABEL = re.compile(rf"(?:^|[/(])((?:{PRODUCT}|{SUM})\.[0-9]+)(?=[/)]|$)", re.ASCII)


def labels(jaxpr: jex.Jaxpr) -> dict[int, str]:
    """Return {id of an equation: its label} of an open jaxpr, bodies included.

    ``product.N`` of its products and ``sum.N`` of its sums in 16 bits, N in its order. An equation of a body that
    several calls share has one label.
    """
    found: dict[int, str] = {}
    met = Counter[str]()
    for e in walk_equations(jaxpr):
        kind = PRODUCT if e.primitive.name in PRODUCTS else SUM if is_narrow_reduction(e) else ""
        if kind and id(e) not in found:
            found[id(e)] = f"{kind}.{met[kind]}"
            met[kind] += 1
    return found


def is_narrow_reduction(equation: jex.JaxprEqn) -> bool:
    """Whether an equation sums 16-bit floats over axes, as the gradient of a broadcast does."""
    return equation.primitive.name == "reduce_sum" and float_bits(equation.outvars[0].aval.dtype) == 16


def find_products(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Return the products of an open jaxpr, those inside of loops, branches and calls among them."""
    return (e for e in walk_equations(jaxpr) if e.primitive.name in PRODUCTS)


def label_in(path: str) -> str:
    """Return the innermost label in a path of scopes, such as ``jit(f)/product.3/dot_general``; "" where none is."""
    found = _LABEL.findall(path)
    return found[-1] if found else ""


def label_of(equation: jex.JaxprEqn) -> str:
    """Return the label of an equation; "" where it has none."""
    return label_in(str(equation.source_info.name_stack))

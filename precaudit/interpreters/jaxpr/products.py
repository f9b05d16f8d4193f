"""Products of a program by number, so that what a compiler makes of each can be told from its text."""

import re
from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.jax_versions import walk_equations

PRODUCTS = ("dot_general", "conv_general_dilated")
GROUPED = "ragged_dot_general"  # a product whose pieces a compiler makes as it likes: it has no label
_LABEL = re.compile(r"(?:^|[/(])(product\.[0-9]+)(?=[/)]|$)", re.ASCII)


def labels(jaxpr: jex.Jaxpr) -> dict[int, str]:
    """Return {id of an equation: ``product.N``} of the products of an open jaxpr, N in its order, bodies included.

    An equation of a body that several calls share has one label.
    """
    found: dict[int, str] = {}
    for equation in find_products(jaxpr):
        found.setdefault(id(equation), f"product.{len(found)}")
    return found


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

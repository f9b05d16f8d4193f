"""Conversions that are undone at once."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.flow import NARROW, Equation, Graph, in_place
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView

WIDE = ("float32", "float64")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit conversions to a narrower format that only conversions back read, and the other way round."""
    for view in views:
        for e in view.equations:
            if e.primitive != "convert_element_type":
                continue
            down, up = e.rounds, e.dtype() in NARROW and e.result in WIDE
            if (down or up) and undone(view.graph, e):
                if down:
                    says = f"A value is rounded to {e.result}, and nothing reads it so: bits are lost for nothing."
                else:
                    says = f"A value is cast to {e.result} and back, with nothing between."
                yield Hit(view.phase, e.source, e.point, says)


def undone(graph: Graph, e: Equation) -> bool:
    """Whether all that reads the result, moved or not, converts it back; what a loop keeps is stored."""
    if any(v in graph.flows_into for v in graph.ahead(e.outputs[0], in_place)):
        return False
    readers = graph.readers(e.outputs[0])
    return bool(readers) and all(
        user.primitive == "convert_element_type" and user.result == e.dtype() for user in readers
    )


RULE = Rule(
    "there-and-back",
    "note",
    "jaxpr",
    "A conversion there and back",
    "A value is converted to another format and back, and nothing reads it in between.",
    "leave both conversions out, or say lax.reduce_precision where the rounding is meant",
    "the program's equations; compilers may leave both out themselves",
    check,
)

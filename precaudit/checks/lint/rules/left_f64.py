"""Float64 values."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView

WIDE = ("float64", "complex128")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit the equations that float64 values come from: that make one of none, or are the first to read an argument."""
    for view in views:
        severity = RULE.severity if view.platform == "tpu" else "note"
        graph, met = view.graph, False
        for v, dtype in enumerate(graph.dtypes):
            if dtype not in WIDE or v in graph.constants or v in graph.joins:
                continue
            maker = graph.makers.get(v)
            if maker is None:
                users = graph.users.get(v, ())[:1]
                met = met or not users
            else:
                users = (
                    () if any(graph.dtypes[i] in WIDE and i not in graph.constants for i in maker.inputs) else (maker,)
                )
            for e in users:
                yield Hit(view.phase, e.source, e.point, severity=severity)
        if met:
            yield Hit(view.phase, "", "", "An argument is float64.", severity=severity)


RULE = Rule(
    "left-f64",
    "error",
    "jaxpr",
    "Float64 values",
    "A value is float64. No TPU computes in it: the compiler emulates it, slowly, with pairs of float32.",
    "leave jax_enable_x64 off, or cast to float32 where it begins",
    "the program's equations",
    check,
)

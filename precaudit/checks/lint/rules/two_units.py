"""One line of source whose product is made otherwise in two phases."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.rules.one_pass import reads_float32
from precaudit.checks.lint.view import CallView, instruction_place
from precaudit.interpreters.tpu.units import unit_of


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit points whose float32 product takes one pass in one phase and is made in float32 in another."""
    made: dict[tuple[str, str], dict[str, set[str]]] = {}
    for view in views:
        for _, i in view.instructions:
            unit = unit_of(i)
            if unit not in ("passes1", "vector"):
                continue
            if any(reads_float32(view.graph, e) for e in view.made_of(i)):
                kind = "one bfloat16 pass" if unit == "passes1" else "float32 on the vector unit"
                made.setdefault(instruction_place(view, i), {}).setdefault(kind, set()).add(view.phase)
    for (source, point), kinds in made.items():
        if len(kinds) > 1 and len({frozenset(phases) for phases in kinds.values()}) > 1:
            ways = "; ".join(f"{kind} in {' and '.join(sorted(phases))}" for kind, phases in sorted(kinds.items()))
            yield Hit(
                "", source, point, f"The same product is computed in {ways}: the phases differ by more than rounding."
            )


RULE = Rule(
    "two-units",
    "warning",
    "tpu",
    "One product, two precisions",
    "The same product takes one bfloat16 pass in one phase and float32 on the vector unit in another.",
    "an explicit precision: --set matmul=highest gives float32 in both",
    "the compiled program's text and its machine-level dump",
    check,
)

"""A product whose float32 result the compiler rounds. What other fusions store is ``hidden_storage``'s."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView, array, instruction_place
from precaudit.interpreters.tpu.units import PRODUCTS


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit products whose equations say float32, whose instruction gives bfloat16, and which the program reads wider."""
    for view in views:
        for _, i in view.instructions:
            shape = array(i)
            if i.opcode not in PRODUCTS or shape is None or shape.dtype not in ("bf16", "f16"):
                continue
            made = view.made_of(i)
            if made and all(e.result == "float32" and not view.graph.is_rounded_by_all(e.outputs[0]) for e in made):
                source, point = instruction_place(view, i)
                yield Hit(view.phase, source, point)


RULE = Rule(
    "added-rounding",
    "warning",
    "tpu",
    "A product's float32 result stored as bfloat16",
    "The equation says float32; the compiled product's own result is bfloat16, because a one-pass product reads it.",
    "highest or high precision of the products that read it: --set matmul=highest",
    "the compiled program's text and its machine-level dump",
    check,
)

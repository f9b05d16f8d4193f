"""A product of float32 values that the matrix unit makes in one bfloat16 pass."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.flow import Equation, Graph, is_cast_up
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView, instruction_place
from precaudit.interpreters.tpu.units import PRODUCTS


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit products without a precision whose equation multiplies float32 values that hold more than bfloat16."""
    for view in views:
        for _, i in view.instructions:
            if i.opcode not in PRODUCTS or i.attributes.get("operand_precision"):
                continue
            if any(reads_float32(view.graph, e) for e in view.made_of(i)):
                source, point = instruction_place(view, i)
                yield Hit(view.phase, source, point)


def reads_float32(graph: Graph, e: Equation) -> bool:
    """Whether a product reads a float32 value that was no narrower one just before."""
    return any(e.dtype(k) == "float32" and not is_cast_up(graph, e, k) for k in (0, 1))


RULE = Rule(
    "one-pass-product",
    "error",
    "tpu",
    "A float32 product in one bfloat16 pass",
    "An operand is float32 and the precision is the default: the matrix unit rounds it to bfloat16 (8 bits) and "
    "multiplies once, without a mark in the program.",
    'jax.default_matmul_precision("highest"), or precision="highest" on this product; of a model here: '
    "--set matmul=highest (six passes), or high (three)",
    "jax.lax.Precision (documentation) and the compiled program's machine-level dump",
    check,
)

"""Float32 values that the compiler keeps in memory as bfloat16. Those of products are ``added_rounding``'s."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.flow import NARROW, Equation
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.stored import results
from precaudit.checks.lint.view import CallView, array, instruction_place
from precaudit.interpreters.tpu.hlo import Instruction
from precaudit.interpreters.tpu.units import PRODUCTS

STORED = ("fusion", "copy", "dynamic-update-slice", "concatenate", "transpose", "all-reduce", "reduce-scatter")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit values outside of fusions that are bfloat16 where no equation of their line makes a bfloat16 value."""
    for view in views:
        assert view.module is not None
        inside = {name for _, i in view.instructions if i.opcode == "fusion" for name in i.computations}
        makes: dict[str, set[str]] = {}
        for e in view.equations:
            makes.setdefault(e.source, set()).update(str(getattr(v.aval, "dtype", "")) for v in e.made.outvars)
        for computation, i in view.instructions:
            if computation in inside or i.opcode not in STORED:
                continue
            for shape, made in results(view.module, i):
                if shape.dtype != "bf16" or is_narrow_product(made):
                    continue
                source, point = instruction_place(view, made)
                if not source:  # what only moves or rounds what it is given says nothing of where it is from
                    made, (source, point) = i, instruction_place(view, i)
                formats = makes.get(source, set())
                unasked = not any(program_rounds(view, e) for e in view.made_of(made))
                if source and unasked and "float32" in formats and "bfloat16" not in formats:
                    yield Hit(view.phase, source, point)


def is_narrow_product(instruction: Instruction) -> bool:
    """Whether it is a product whose own result is bfloat16: ``added_rounding``'s."""
    shape = array(instruction)
    return instruction.opcode in PRODUCTS and shape is not None and shape.dtype == "bf16"


def program_rounds(view: CallView, e: Equation) -> bool:
    """Whether the program itself rounds what an equation makes."""
    return e.result in NARROW or view.graph.is_rounded_by_all(e.outputs[0])


RULE = Rule(
    "hidden-bf16",
    "warning",
    "tpu",
    "Float32 values stored as bfloat16",
    "The program says float32; between two fusions the compiler stores the value as bfloat16, because a one-pass "
    "product reads it. In a gradient these are saved activations.",
    "highest or high precision of the products that read it: --set matmul=highest",
    "the compiled program's text and its machine-level dump",
    check,
)

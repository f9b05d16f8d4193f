"""A rounding of a product's result that the compiler leaves out."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.flow import NARROW
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.stored import reading_instructions
from precaudit.checks.lint.view import CallView, array, instruction_place
from precaudit.interpreters.tpu.hlo import Instruction, Module
from precaudit.interpreters.tpu.units import PRODUCTS

ROUNDS = ("convert", "all-reduce", "reduce-scatter")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit products that the program rounds, whose instruction gives float32, and which nothing there rounds at once."""
    for view in views:
        assert view.module is not None
        for name, i in view.instructions:
            shape = array(i)
            if i.opcode not in PRODUCTS or shape is None or shape.dtype != "f32":
                continue
            made = view.made_of(i)
            asked = all(e.result in NARROW or view.graph.is_rounded_by_all(e.outputs[0]) for e in made)
            if made and asked and not all_readers_round(view.module, name, i):
                source, point = instruction_place(view, i)
                yield Hit(view.phase, source, point)


def all_readers_round(module: Module, computation: str, instruction: Instruction) -> bool:
    """Whether all that reads an instruction, moved or not, rounds it; a sum over chips may, once it is added."""
    users = list(reading_instructions(module, computation, instruction.name))
    return bool(users) and all(x.opcode in ROUNDS and is_narrow(x) for x in users)


def is_narrow(instruction: Instruction) -> bool:
    """Whether its value is bfloat16 or float16."""
    shape = array(instruction)
    return shape is not None and shape.dtype in ("bf16", "f16")


RULE = Rule(
    "elided-rounding",
    "note",
    "tpu",
    "A rounding that is omitted",
    "The program rounds the product's result; the compiled one gives float32, and what reads it gets that: more exact, "
    "and not what another platform or phase does.",
    "preferred_element_type=float32 if it is meant; else excess precision off (xla_allow_excess_precision=False); here "
    "--set excess_precision=off",
    "the compiled program's text",
    check,
)

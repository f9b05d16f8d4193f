"""Float32 values that the compiler keeps in memory as bfloat16. Those of products are ``added_rounding``'s."""

from collections.abc import Iterator, Sequence

from precaudit.lint.flow import NARROW, Equation
from precaudit.lint.rule import Hit, Rule
from precaudit.lint.view import PRODUCTS, View, array, place_of
from precaudit.tpu.hlo import Instruction, Module

STORED = ("fusion", "copy", "dynamic-update-slice", "concatenate", "transpose")
MOVES = ("bitcast", "copy", "reshape", "transpose")


def check(views: Sequence[View]) -> Iterator[Hit]:
    """Hit values outside of fusions that are bfloat16 where no equation of their line makes a bfloat16 value."""
    for view in views:
        assert view.module is not None
        inside = {name for _, i in view.instructions if i.opcode == "fusion" for name in i.called}
        makes: dict[str, set[str]] = {}
        for e in view.equations:
            makes.setdefault(e.source, set()).update(str(getattr(v.aval, "dtype", "")) for v in e.made.outvars)
        for computation, i in view.instructions:
            shape = array(i)
            if computation in inside or i.opcode not in STORED or shape is None or shape.dtype != "bf16":
                continue
            root = rooted(view.module, i)
            if root.opcode in PRODUCTS or any(asked(view, e) for e in view.made_of(root)):
                continue
            source, point = place_of(view, i)
            formats = makes.get(source, set())
            if "float32" in formats and "bfloat16" not in formats:
                yield Hit(view.phase, source, point)


def asked(view: View, e: Equation) -> bool:
    """Whether the program itself rounds what an equation makes."""
    return e.result in NARROW or view.graph.rounded(e.outputs[0])


def rooted(module: Module, instruction: Instruction) -> Instruction:
    """Return what makes the value of a fusion, before it is moved; an instruction that is none is its own."""
    if instruction.opcode != "fusion":
        return instruction
    computation = module.computations[instruction.called[0]]
    made = computation.root
    while made.opcode in MOVES:
        made = computation.instructions[made.operands[0]]
    return made


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

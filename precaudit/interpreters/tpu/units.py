"""Which unit makes each product of a compiled program, in how many bfloat16 passes, and in what precision that is."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from precaudit.interpreters.jaxpr.products import label_in
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module
from precaudit.schema.graphs.decoder import point_of
from precaudit.schema.records.devices import Way

PRODUCTS = ("convolution", "dot")  # opcodes that the matrix unit runs
MOVES = ("bitcast", "broadcast", "convert", "copy", "get-tuple-element", "reshape", "slice", "transpose")
NARROW = re.compile(r"bf16|f8.*|[su]\d+|pred")  # one pass rounds none of these
PASSES = {1: "passes1", 3: "passes3", 6: "passes6"}
WAYS: dict[str, Way] = {"passes1": "1 pass", "passes3": "3 passes", "passes6": "6 passes"}
# By how many operands are narrow
ON_VECTOR: tuple[Way, ...] = ("float32", "float32, one operand bfloat16", "float32, both operands bfloat16")
Precision = Literal["bfloat16", "3 passes", "float32"]


class UnitProduct(NamedTuple):
    """A product: its point, or FILE:LINE ("" for neither); ``unit``: passes1, passes3, passes6 or vector.

    ``precision``: bfloat16 where operands are, or are rounded to it; float32 of six passes and of the vector unit.
    ``way``: how it is made of float32 operands.
    ``label``: of the program's product that it is (``transforms.products``), "" for none.
    """

    place: str
    unit: str
    precision: Precision
    way: Way
    label: str = ""


def products_of(module: Module) -> tuple[UnitProduct, ...]:
    """Return the products of a program, in the order of its text; those of a loop's body once."""
    found = []
    for computation, x in module.walk():
        unit = unit_of(x)
        if unit:
            place = point_of(tuple(x.op_name.split("/"))) or module.source(x) or ""
            narrow = [_is_narrow(computation, name) for name in _operands(computation, x, unit)]
            found.append(UnitProduct(place, unit, _precision(unit, narrow), _way(unit, narrow), label_in(x.op_name)))
    return tuple(found)


def unit_of(instruction: Instruction) -> str:
    """Return what makes a product: passes1, passes3, passes6 or vector; "" for an instruction that is none."""
    if instruction.opcode in PRODUCTS:
        return PASSES[passes_of_precision(instruction.attributes.get("operand_precision", ""))]
    summed = instruction.opcode == "reduce" and isinstance(instruction.type, ArrayType)
    return "vector" if summed and _primitive(instruction) == "dot_general" else ""


def passes_of_precision(precision: str) -> int:
    """Return how many bfloat16 passes a product takes at an ``operand_precision`` as HLO writes it."""
    return 6 if "highest" in precision else 3 if "high" in precision else 1


def count_products(made: Iterable[UnitProduct]) -> dict[str, int]:
    """Return how many products the matrix unit makes in 1, 3 and 6 passes, and how many the vector unit makes."""
    counts = Counter(p.unit for p in made)
    return {unit: counts[unit] for unit in (*PASSES.values(), "vector")}


def other_precisions(
    bare: Iterable[UnitProduct], other: Iterable[UnitProduct]
) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return the places whose products two programs make in other precisions: those of one and of the other.

    A place that only one of them names is none: its products stand elsewhere in the other.
    """
    first, second = _by_place(bare), _by_place(other)
    return {place: (first[place], second[place]) for place in first if first[place] != second.get(place, first[place])}


def _by_place(made: Iterable[UnitProduct]) -> Mapping[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for p in made:
        found.setdefault(p.place, set()).add(p.precision)
    return {place: frozenset(x) for place, x in found.items()}


def ways_by_place(made: Iterable[UnitProduct]) -> dict[str, tuple[Way, ...]]:
    """Return {place: the ways in which its products are made, each once}."""
    found: dict[str, set[Way]] = {}
    for p in made:
        found.setdefault(p.place, set()).add(p.way)
    return {place: tuple(sorted(x)) for place, x in sorted(found.items())}


def ways_by_label(module: Module) -> dict[str, tuple[Way, ...]]:
    """Return {label of a program's product: the ways in which it is made}, "" for those without a label.

    A product of one term is a multiplication alone, on the vector unit.
    """
    found: dict[str, set[Way]] = {}
    for p in products_of(module):
        found.setdefault(p.label, set()).add(p.way)
    for computation, x in module.walk():
        label = label_in(x.op_name)
        if x.opcode == "multiply" and label and label not in found and _primitive(x) == "dot_general":
            found[label] = {_way("vector", [_is_narrow(computation, name) for name in x.operands])}
    return {label: tuple(sorted(x)) for label, x in sorted(found.items())}


def _primitive(instruction: Instruction) -> str:
    """Return the JAX primitive that an instruction was made of."""
    return instruction.op_name.rpartition("/")[2]


def _operands(computation: Computation, product: Instruction, unit: str) -> tuple[str, ...]:
    """Return the names of a product's two operands; of one on the vector unit, those of what is summed."""
    if unit != "vector":
        return product.operands
    times = computation.instructions[product.operands[0]]
    return times.operands if times.opcode == "multiply" else product.operands[:1] * 2


def _precision(unit: str, narrow: Iterable[bool]) -> Precision:
    if unit == "passes1" or all(narrow):
        return "bfloat16"
    return "3 passes" if unit == "passes3" else "float32"


def _way(unit: str, narrow: Iterable[bool]) -> Way:
    return WAYS[unit] if unit in WAYS else ON_VECTOR[sum(narrow)]


def _is_narrow(computation: Computation, name: str) -> bool:
    """Whether a value, or what it was cast from where it lies, is in a format that one pass does not round."""
    while True:
        made = computation.instructions[name]
        if isinstance(made.type, ArrayType) and NARROW.fullmatch(made.type.dtype):
            return True
        if made.opcode not in MOVES:
            return False
        name = made.operands[0]

"""Products whose terms lie on several devices: in how many parts a compiled program makes each, and how they add."""

import math
import re
from collections.abc import Iterator

from precaudit.interpreters.jaxpr.products import label_in
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module, Type
from precaudit.schema.records.devices import SplitSum

ADDING = ("all-reduce", "all-reduce-start", "reduce-scatter")
FORMATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}  # in which parts are added
GROUPS = re.compile(r"\{\{([\d,]*)\}")  # {{0,1},{2,3}}: devices whose parts are added
IOTA = re.compile(r"\[(?:\d+,)*(\d+)\]<=")  # [2,4]<=[8]: groups and devices of each
AXES = re.compile(r"'(\w+)'=(\d+)")  # mesh['x'=4,'y'=2], and {'x'} for the axes that are added over
OVER = re.compile(r"\{('[^{}]*)\}\s*$")


def split_sums(module: Module) -> dict[str, SplitSum]:
    """Return {label of a product: its parts}, of products of 16 bits whose parts are rounded before they are added.

    A product that is made in several ways, in a loop and before it, is left out.
    """
    found: dict[str, set[SplitSum]] = {}
    for label, split in _labels_and_splits(module):
        found.setdefault(label, set()).add(split)
    return {label: next(iter(each)) for label, each in sorted(found.items()) if len(each) == 1}


def _labels_and_splits(module: Module) -> Iterator[tuple[str, SplitSum]]:
    for computation, x in module.walk():
        if x.opcode not in ADDING or (parts := group_size(x)) < 2:
            continue
        for name in x.operands:
            operand = computation.instructions[name]
            label, summed = label_in(operand.op_name) or label_in(x.op_name), FORMATS.get(_dtype(operand.type), "")
            its_own = bool(label) and f"{label}/" in x.op_name  # a psum of the program's adds values that it names
            if its_own and summed and _is_rounded(module, computation, operand):
                yield label, SplitSum(parts=parts, summed=summed)


def group_size(x: Instruction) -> int:
    """Return over how many devices a collective goes; 1 where its text does not say."""
    groups = x.attributes.get("replica_groups", "")
    if found := GROUPS.search(groups):
        return len(found[1].split(",")) if found[1] else 1
    if found := IOTA.search(groups):
        return int(found[1])
    sizes = {name: int(n) for name, n in AXES.findall(groups)}
    over = OVER.search(groups) or OVER.search(x.attributes.get("device_ids", ""))
    return math.prod(sizes.get(name.strip(" '"), 1) for name in over[1].split(",")) if over and sizes else 1


def _is_rounded(module: Module, computation: Computation, x: Instruction) -> bool:
    """Whether a part is rounded to 16 bits: it is of such a format, or what makes it goes through one."""
    if _dtype(x.type) in ("bf16", "f16"):
        return True
    inside = [i for name in x.computations for i in module.computations[name].instructions.values()]
    read = [computation.instructions[name] for name in x.operands if x.opcode in ("convert", "copy", "bitcast")]
    return any(_dtype(i.type) in ("bf16", "f16") for i in (*inside, *read))


def _dtype(of: Type) -> str:
    return of.dtype if isinstance(of, ArrayType) else ""

"""Products whose terms lie on several devices: in how many parts a compiled program makes each, and how they add."""

import re
from collections.abc import Iterator

from precaudit.interpreters.jaxpr.products import label_in
from precaudit.interpreters.mesh.groups import group_size
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module, Type
from precaudit.schema.graphs.decoder import point_of
from precaudit.schema.records.devices import SplitSum

PRODUCT = "dot_general"
ADDING = ("all-reduce", "all-reduce-start", "reduce-scatter")
FORMATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}  # in which parts are added


def split_sums(module: Module) -> dict[str, SplitSum]:
    """Return {label of a product: its parts}, of products of 16 bits whose parts are rounded before they are added.

    A product that is made in several ways, in a loop and before it, is left out.
    """
    found: dict[str, set[SplitSum]] = {}
    for path, operand, split in _rounded_parts(module):
        label = label_in(operand.op_name) or label_in(path)
        named = rf"{re.escape(label)}\)*/"  # a gradient's: transpose(jvp(product.4))/dot_general
        if label and re.search(named, path):  # a psum of the program's adds values that it names
            found.setdefault(label, set()).add(split)
    return {label: next(iter(each)) for label, each in sorted(found.items()) if len(each) == 1}


def splits_by_point(module: Module) -> dict[str, tuple[SplitSum, ...]]:
    """Return {point of the decoder: how its products are made in parts, each way once}, as ``split_sums`` of labels.

    Where another product of the point is whole, or adds parts that were not rounded, that is a way of one part.
    """
    found: dict[str, set[SplitSum]] = {}
    for names, operand, split in _rounded_parts(module):
        path = (operand.op_name or names).split("/")
        point = point_of(path)
        its_own = path[-1] == PRODUCT and "/".join(path[path.index(point) :]) in names if point else False
        if its_own:  # several sums may be added together, under all their names
            found.setdefault(point, set()).add(split)
    return {point: tuple(sorted(each, key=str)) for point, each in sorted(found.items())}


def _rounded_parts(module: Module) -> Iterator[tuple[str, Instruction, SplitSum]]:
    """Yield (the names of a collective that adds, what it adds, how) where parts were rounded to 16 bits."""
    for computation, x in module.walk():
        if x.opcode not in ADDING or (parts := group_size(x)) < 2:
            continue
        for i, name in enumerate(x.operands):
            operand = computation.instructions[name]
            summed = FORMATS.get(_dtype(operand.type), "")
            if summed and _is_rounded(module, computation, operand):
                yield _names(computation, x, i), operand, SplitSum(parts=parts, summed=summed)


def _names(computation: Computation, added: Instruction, i: int) -> str:
    """Return the names of a collective's i-th sum; those of several that go together have the name of one of them."""
    read = (
        x for x in computation.instructions.values() if x.opcode == "get-tuple-element" and added.name in x.operands
    )
    each = [x.op_name for x in read if x.ints("index") == (i,)]
    return " ".join([added.op_name, *each] if len(added.operands) > 1 else [added.op_name])


def _is_rounded(module: Module, computation: Computation, x: Instruction) -> bool:
    """Whether a part is rounded to 16 bits: it is of such a format, or what makes it goes through one."""
    if _dtype(x.type) in ("bf16", "f16"):
        return True
    inside = _inside(module, x)
    read = [computation.instructions[name] for name in x.operands if x.opcode in ("convert", "copy", "bitcast")]
    return any(_dtype(i.type) in ("bf16", "f16") for i in (*inside, *read))


def _inside(module: Module, x: Instruction) -> Iterator[Instruction]:
    """Yield the instructions that one computes by, those of a reduction inside of a fusion among them."""
    for name in x.computations:
        for i in module.computations[name].instructions.values():
            yield i
            yield from _inside(module, i)


def _dtype(of: Type) -> str:
    return of.dtype if isinstance(of, ArrayType) else ""

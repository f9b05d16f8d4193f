"""Values of a compiled program across its fusions: what makes each of their results, and what reads a value."""

from collections.abc import Iterator

from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module

MOVES = ("bitcast", "copy", "reshape", "transpose")


def results(module: Module, instruction: Instruction) -> Iterator[tuple[ArrayType, Instruction]]:
    """Yield an instruction's arrays as they are stored, each with what makes it.

    Of a fusion that is inside of it, before it is moved and converted; a fusion may have several results.
    """
    if instruction.opcode != "fusion":
        if isinstance(instruction.type, ArrayType):
            yield instruction.type, instruction
        return
    inside = module.computations[instruction.computations[0]]
    roots = [inside.instructions[x] for x in inside.root.operands] if inside.root.opcode == "tuple" else [inside.root]
    for root in roots:
        if isinstance(root.type, ArrayType):
            yield root.type, _maker(module, inside, root)


def _maker(module: Module, inside: Computation, made: Instruction) -> Instruction:
    while made.opcode in (*MOVES, "convert"):
        made = inside.instructions[made.operands[0]]
    nested = list(results(module, made)) if made.opcode == "fusion" else []
    return nested[0][1] if len(nested) == 1 else made


def reading_instructions(module: Module, computation: str, name: str) -> Iterator[Instruction]:
    """Yield what reads a value, moved or not, into fusions and out of them; the program's root where it is returned."""
    where = module.computations[computation]
    for x in where.instructions.values():
        if name not in x.operands:
            continue
        if x.opcode in MOVES:
            yield from reading_instructions(module, computation, x.name)
        elif x.opcode == "fusion":
            inside = module.computations[x.computations[0]]
            for given, parameter in zip(x.operands, inside.parameters, strict=True):
                if given == name:
                    yield from reading_instructions(module, inside.name, parameter.name)
        elif x.opcode != "tuple" or not x.root or not callers(module, computation):
            yield x
    if where.root.name == name or (where.root.opcode == "tuple" and name in where.root.operands):
        yield from _outside(module, where, name)


def _outside(module: Module, where: Computation, name: str) -> Iterator[Instruction]:
    """Yield what reads a result of a fusion."""
    found = callers(module, where.name)
    if not found and where.root.name == name:
        yield where.root
    for outer, fusion in found:
        if where.root.name == name:
            yield from reading_instructions(module, outer.name, fusion.name)
            continue
        for x in outer.instructions.values():
            if x.opcode != "get-tuple-element" or x.operands != (fusion.name,):
                continue
            if where.root.operands[x.ints("index")[0]] == name:
                yield from reading_instructions(module, outer.name, x.name)


def callers(module: Module, computation: str) -> list[tuple[Computation, Instruction]]:
    """Return the fusions that run a computation, each with the computation it lies in."""
    return [(c, i) for c, i in module.walk() if i.opcode == "fusion" and computation in i.computations]

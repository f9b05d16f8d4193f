"""In what format a sharded program's chips exchange and add values."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.stored import callers
from precaudit.checks.lint.view import CallView, formats_of, instruction_place
from precaudit.interpreters.tpu.hlo import Instruction, Module

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
NARROW = ("bf16", "f16")
SCATTERED = "all-reduce-scatter"  # libtpu's name of a computation that adds up over chips and keeps a part


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit every collective with the formats it reads, adds in and leaves."""
    for view in views:
        assert view.module is not None
        for name, i in view.instructions:
            kind = i.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            kind = "reduce-scatter" if name.startswith(SCATTERED) else kind
            added = adds_in(view.module, i)
            narrow = added in NARROW
            says = f"{kind} adds in {added}: {SAYS}" if narrow else exchange_text(kind, view.reads(name, i), added, i)
            source, point = whence(view, name, i)
            yield Hit(view.phase, source, point, says, severity="warning" if narrow else "note")


def adds_in(module: Module, instruction: Instruction) -> str:
    """Return the format a collective adds in; "" of one that does not add."""
    roots = [module.computations[name].root for name in instruction.computations]
    return next((x for root in roots if root.opcode == "add" for x in formats_of(root.type)), "")


def exchange_text(kind: str, reads: Iterable[str], added: str, instruction: Instruction) -> str:
    """Return what is exchanged and, where it is another format, what is added in and what is left."""
    given, left = sorted(reads), sorted(set(formats_of(instruction.type)))
    how = [f"added in {added}"] if added and [added] != given else []
    if instruction.opcode in KINDS and left != ([added] if added else given):
        how.append(f"stored as {', '.join(left)}")
    return ", ".join([f"{kind} of {', '.join(given)}", *how]) + "."


def whence(view: CallView, computation: str, instruction: Instruction) -> tuple[str, str]:
    """Return (FILE:LINE, point): its own, of the fusion it lies in, or of the only equation of its primitive."""
    assert view.module is not None
    for x in (instruction, *(fusion for _, fusion in callers(view.module, computation))):
        if (place := instruction_place(view, x))[0]:
            return place
    applied = [view.module.computations[name].parameters for name in instruction.computations]
    names = {x.op_name for parameters in applied for x in parameters}
    found = [e for e in view.equations if e.primitive in names]
    return (found[0].source, found[0].point) if len(found) == 1 else ("", "")


SAYS = "the sum is rounded with every chip."
RULE = Rule(
    "collectives",
    "note",
    "tpu",
    "Formats between chips",
    "Chips exchange values in this format; an all-reduce or reduce-scatter that adds in bfloat16 or float16 rounds the "
    "sum with every chip.",
    "cast to float32 before psum, or preferred_element_type=float32 on the product whose partial sums are added",
    "the compiled program's text",
    check,
)

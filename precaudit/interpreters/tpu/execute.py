"""A module run on a CPU with its target's roundings: ``function`` makes an ordinary JAX function of HLO.

Rounded: every value where HLO stores it, to its declared format; operands of float32 products on the matrix unit to
bfloat16 (``products.py``). Not rounded: products on the vector unit (a multiply and a reduce), what a reduce sums.
Not known from HLO: whether bfloat16 results inside a fusion are rounded; ``rounded_inside`` says so.
What no rule reproduces bit for bit: the order of sums, and the target's own exp, tanh, 1/x and 1/√x.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.errors import UserError
from precaudit.interpreters.tpu.calls import InstructionCall, Rule, dtype_of, is_float
from precaudit.interpreters.tpu.collectives import ASYNCHRONOUS, collectives, on_chips
from precaudit.interpreters.tpu.folding import top_k
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module, Type
from precaudit.interpreters.tpu.operations import ELEMENTWISE, MOVES, RULES
from precaudit.interpreters.tpu.products import round_to_bfloat16

CUT = re.compile(r"\[(\d+):")  # where a slice begins, one a dimension
LEFT_WIDE = (
    ELEMENTWISE.keys()
    | MOVES.keys()
    | {
        "convert",
        "fusion",
        "call",
        "parameter",
        "tuple",
        "get-tuple-element",
    }
)


class Unknown(UserError):
    """What no rule says how to run: an opcode, a custom call, a format; the message begins with the line."""


def function(
    module: Module, custom: Mapping[str, Rule] | None = None, rounded_inside: bool = True, chips: int = 1
) -> Callable[..., Any]:
    """Return jitted (the entry computation's parameters, flat) → its outputs; of several ``chips`` [chips, …] of each.

    ``custom``: rules of custom calls by target. Raises Unknown for what has no rule; calling it raises Unknown, too.
    """
    targets, rules = {**TARGETS, **(custom or {})}, RULES
    if chips > 1:
        targets, rules = {**targets, **ASYNCHRONOUS}, {**RULES, **collectives(chips)}
    for _, instruction in module.walk():
        _check_rule(instruction, targets, rules)
    run = _Run(module, targets, rules, rounded_inside)

    def program(*args: Any) -> Any:
        return run.computation(module.entry, [jnp.asarray(x) for x in args], inside=False)

    whole = program if chips == 1 else on_chips(program, chips)
    return jax.jit(whole, compiler_options={"xla_allow_excess_precision": False})


def rounds_inside(module: Module) -> bool:
    """Whether a fusion holds a bfloat16 result that ``rounded_inside`` decides about: one that it does not return."""
    inside = {name for _, x in module.walk() if x.opcode == "fusion" for name in x.computations}
    return any(
        computation.name in inside
        and not x.root
        and x.opcode in (*ELEMENTWISE, "convert", "reduce", "select")
        and isinstance(x.type, ArrayType)
        and x.type.dtype == "bf16"
        for computation, x in module.walk()
    )


def _check_rule(instruction: Instruction, targets: Mapping[str, Rule], rules: Mapping[str, Rule]) -> None:
    name = instruction.opcode
    for end in ("-start", "-update", "-done"):
        name = name.removesuffix(end)
    if name not in rules and name not in FLOW and name not in ("async", "custom-call"):
        raise Unknown(f"line {instruction.line}: no rule says how to run {instruction.opcode!r}")
    target = instruction.attributes.get("custom_call_target", "")
    if name == "custom-call" and target not in targets:
        raise Unknown(f"line {instruction.line}: what the custom call {target!r} computes is not known")


def _same(call: InstructionCall) -> Any:
    return call.inputs[0]


def _buffer(call: InstructionCall) -> Any:
    return jnp.zeros(call.shape.dims, call.dtype)


def _join_parts(call: InstructionCall) -> Any:
    """Join parts that were copied one by one: each lies where it was cut from, whatever the order of operands."""
    pairs = enumerate(zip(call.inputs[0].shape, call.shape.dims, strict=True))
    axis = next((axis for axis, (a, b) in pairs if a != b), 0)
    starts = [_cut_at(call.within, name, axis) for name in call.instruction.operands]
    parts = sorted(zip(starts, call.inputs, strict=True), key=lambda part: part[0])
    return lax.concatenate([x for _, x in parts], axis)


def _cut_at(within: Computation, name: str, axis: int) -> int:
    """Return where a part that was copied begins; raises Unknown where the text does not say."""
    made = within.instructions[name]
    while "slice" not in made.attributes and made.opcode.endswith(("-done", "-update")):
        made = within.instructions[made.operands[0]]
    cuts = CUT.findall(made.attributes.get("slice", ""))
    if axis >= len(cuts):
        raise Unknown(f"line {made.line}: where {name} lies in what it is joined to is not known")
    return int(cuts[axis])


TARGETS: dict[str, Rule] = {
    "AssumeGatherIndicesInBound": _same,
    "GatherScatterIndicesBitpacked": _same,
    "AllocateBuffer": _buffer,
    "ConcatBitcast": _join_parts,
    "TopK": top_k,
}


def store(value: Any, kind: Type, wide: bool = False) -> Any:
    """Return a value as declared, floats rounded to their format; ``wide``: bfloat16 left as it is.

    Raises ValueError where its shape is another, or its format is one that is no rounding away.
    """
    if not isinstance(kind, ArrayType):
        if not isinstance(value, tuple) or len(value) != len(kind):
            raise ValueError(f"a tuple of {len(kind)} was declared")
        return tuple(store(x, k, wide) for x, k in zip(value, kind, strict=True))
    if kind.dtype == "token":
        return value
    dtype = dtype_of(kind)
    floats = is_float(value.dtype) and is_float(dtype)
    if value.shape != kind.dims or (value.dtype != dtype and not floats):
        raise ValueError(f"{value.dtype}{list(value.shape)} was made, {dtype}{list(kind.dims)} declared")
    if value.dtype == dtype or (wide and dtype == jnp.bfloat16):
        return value
    # XLA:CPU of JAX 0.10 drops a conversion to bfloat16 and back inside its fusions even so; it keeps this one
    return (round_to_bfloat16(value) if dtype == jnp.bfloat16 else value).astype(dtype)


@dataclass(frozen=True)
class _Run:
    """A module and how it is run. ``inside``: within a fusion, where values need not be stored."""

    module: Module
    targets: Mapping[str, Rule]
    rules: Mapping[str, Rule]
    rounded_inside: bool

    def computation(self, name: str, args: Sequence[Any], inside: bool) -> Any:
        """Return a computation's value of its arguments."""
        computation = self.module.computations[name]
        if len(args) != len(computation.parameters):
            raise UserError(f"{len(args)} arguments; {name} has {len(computation.parameters)} parameters")
        made: dict[str, Any] = {}
        for instruction in computation.instructions.values():
            given = [args[int(instruction.literal)]] if instruction.opcode == "parameter" else []
            given += [made[x] for x in instruction.operands]
            made[instruction.name] = self.instruction(instruction, tuple(given), computation, made, inside)
        return made[computation.root.name]

    def instruction(
        self, x: Instruction, inputs: tuple[Any, ...], within: Computation, made: Mapping[str, Any], inside: bool
    ) -> Any:
        """Return an instruction's value. Raises Unknown, with its line, where it is not what was declared."""
        wide = inside and not self.rounded_inside and x.opcode in LEFT_WIDE
        call = InstructionCall(x, inputs, within, made, self.module.computations.__getitem__, self.plain)
        try:
            if inside and not self.rounded_inside and x.opcode not in LEFT_WIDE | {"compare"}:
                call = replace(call, inputs=tuple(map(store, inputs, call.declared_types)))
            value = self.value(call, inside)
            return value if x.opcode.endswith(("-start", "-update")) else store(value, x.type, wide)
        except (TypeError, ValueError, IndexError, KeyError, NotImplementedError) as error:
            why = str(error).split("\n")[0]
            raise Unknown(f"line {x.line}: {x.name} ({x.opcode}) cannot be run: {why}") from error

    def value(self, call: InstructionCall, inside: bool) -> Any:
        """Return what an instruction makes, before it is stored."""
        opcode = call.instruction.opcode
        if opcode.endswith("-start"):
            return self.start(call, inside)
        if opcode.endswith(("-update", "-done")):
            return call.inputs[0]
        if opcode == "custom-call":
            return self.targets[call.instruction.attributes["custom_call_target"]](call)
        if opcode in FLOW:
            return FLOW[opcode](self, call, inside or opcode == "fusion")
        return self.rules[opcode](call)

    def start(self, call: InstructionCall, inside: bool) -> Any:
        """Return at once what is made asynchronously; its type is (operands, result, …), a copy's (result, …)."""
        x = call.instruction
        opcode = x.opcode.removesuffix("-start")
        if opcode == "copy":
            return call.inputs[0]
        if x.names("calls"):
            return self.computation(x.names("calls")[0], call.inputs, inside)
        kind = x.type
        if opcode != "all-reduce":  # the type of this one is that of its result
            if isinstance(kind, ArrayType):
                raise ValueError("a start that is no tuple")
            kind = kind[1]
        return store(self.value(replace(call, instruction=replace(x, opcode=opcode, type=kind)), inside), kind)

    def plain(self, name: str, args: Sequence[Any]) -> Any:
        """Return a computation's value outside fusions."""
        return self.computation(name, args, inside=False)


Flow = Callable[[_Run, InstructionCall, bool], Any]


def _call_computation(run: _Run, call: InstructionCall, inside: bool) -> Any:
    (name,) = call.instruction.computations
    return run.computation(name, call.inputs, inside)


def _element(_run: _Run, call: InstructionCall, _inside: bool) -> Any:
    return call.inputs[0][call.ints("index")[0]]


def _first(_run: _Run, call: InstructionCall, _inside: bool) -> Any:
    return call.inputs[0]


def _all(_run: _Run, call: InstructionCall, _inside: bool) -> Any:
    return call.inputs


def _nothing(_run: _Run, _call: InstructionCall, _inside: bool) -> Any:
    return ()


def _while(run: _Run, call: InstructionCall, _inside: bool) -> Any:
    (condition,), (body,) = call.instruction.names("condition"), call.instruction.names("body")
    return lax.while_loop(lambda s: run.plain(condition, [s]), lambda s: run.plain(body, [s]), call.inputs[0])


def _conditional(run: _Run, call: InstructionCall, _inside: bool) -> Any:
    """Run one branch on its own argument; an index that names none runs the last."""
    index, *args = call.inputs
    branches = call.instruction.names("branch_computations")
    if not branches:
        branches = call.instruction.names("false_computation") + call.instruction.names("true_computation")
        args = args[::-1]
    last = len(branches) - 1
    index = index.astype(np.int32)
    index = jnp.where((index < 0) | (index > last), np.int32(last), index)
    return lax.switch(index, [lambda *a, i=i, b=b: run.plain(b, [a[i]]) for i, b in enumerate(branches)], *args)


FLOW: dict[str, Flow] = {
    "parameter": _first,
    "tuple": _all,
    "get-tuple-element": _element,
    "after-all": _nothing,
    "fusion": _call_computation,
    "call": _call_computation,
    "while": _while,
    "conditional": _conditional,
    "optimization-barrier": _first,
    "add-dependency": _first,
    "domain": _first,
}

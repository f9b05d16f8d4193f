"""What several chips exchange, run on one CPU: every value has an axis of chips, by ``vmap``, and a name for it.

Sums go in the order of a group, each rounded to the format that the text says: in which order a chip adds is not known
from HLO, and every order is as honest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.mesh.groups import Groups, device_groups, source_of
from precaudit.interpreters.tpu.calls import InstructionCall, Rule, dtype_of, widen_floats
from precaudit.interpreters.tpu.folding import MONOIDS, combination
from precaudit.interpreters.tpu.hlo import ArrayType

CHIPS = "chips"


def on_chips(program: Callable[..., Any], chips: int) -> Callable[..., Any]:
    """Return a partitioned program as a function of what each chip is given and gives, [chips, …]."""
    return jax.vmap(program, axis_name=CHIPS, axis_size=chips)


def collectives(chips: int) -> dict[str, Rule]:
    """Return the rules of collectives of so many chips, by opcode."""
    each: dict[str, Callable[[InstructionCall, Groups, Any], Any]] = {
        "all-reduce": _add,
        "all-gather": _join,
        "reduce-scatter": _add_and_cut,
        "all-to-all": _exchange,
    }

    def rule(make: Callable[[InstructionCall, Groups, Any], Any]) -> Rule:
        def of(call: InstructionCall) -> Any:
            groups = device_groups(call.instruction, chips)
            made = tuple(make(call, groups, _of_group(x, groups)) for x in call.inputs)
            return made[0] if len(made) == 1 else made

        return of

    return {
        **{opcode: rule(make) for opcode, make in each.items()},
        "collective-permute": lambda call: _permute(call, chips),
        "partition-id": lambda call: lax.axis_index(CHIPS).astype(call.dtype),
        "replica-id": lambda call: jnp.zeros((), call.dtype),
    }


def _of_group(x: object, groups: Groups) -> Any:
    """Return what every chip of this one's group has [P, …], in the group's order."""
    members = np.zeros((sum(map(len, groups)), len(groups[0])), np.int32)
    for group in groups:
        members[list(group)] = group
    return lax.all_gather(x, CHIPS)[jnp.asarray(members)[lax.axis_index(CHIPS)]]


def _place_in(groups: Groups) -> Any:
    """Return which of its group this chip is."""
    places = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        places[list(group)] = np.arange(len(group))
    return jnp.asarray(places)[lax.axis_index(CHIPS)]


def _add(call: InstructionCall, _groups: Groups, parts: Any) -> Any:
    """Return the parts combined one after another, each sum rounded to the format of a part."""
    kind, body = combination(call.body), call.instruction.names("to_apply")[0]

    def combined(x: jax.Array, y: jax.Array) -> Any:
        if kind is not None:
            return MONOIDS[kind](widen_floats(x), widen_floats(y)).astype(parts.dtype)
        return jax.vmap(lambda *one: call.run(body, one))(x.reshape(-1), y.reshape(-1)).reshape(x.shape)

    total = parts[0]
    for part in parts[1:]:
        total = combined(total, part)
    return total


def _join(call: InstructionCall, _groups: Groups, parts: Any) -> Any:
    (axis,) = call.ints("dimensions")
    return lax.concatenate(list(parts), axis)


def _add_and_cut(call: InstructionCall, groups: Groups, parts: object) -> Any:
    (axis,) = call.ints("dimensions")
    total = _add(call, groups, parts)
    size = total.shape[axis] // len(groups[0])
    return lax.dynamic_slice_in_dim(total, _place_in(groups) * size, size, axis)


def _exchange(call: InstructionCall, groups: Groups, parts: Any) -> Any:
    """Return what every chip of the group has for this one, one after another along the axis."""
    (axis,) = call.ints("dimensions")
    size, at = parts.shape[axis + 1] // len(groups[0]), _place_in(groups)
    cut: Sequence[Any] = [lax.dynamic_slice_in_dim(part, at * size, size, axis) for part in parts]
    return lax.concatenate(cut, axis)


def _permute(call: InstructionCall, chips: int) -> Any:
    """Return what another chip sends this one; zeros where none does."""
    sources = jnp.asarray(source_of(call.instruction, chips))[lax.axis_index(CHIPS)]
    (x,) = call.inputs
    sent = lax.all_gather(x, CHIPS)[jnp.maximum(sources, 0)]
    return jnp.where(sources >= 0, sent, jnp.zeros((), dtype_of(call.shape)))


def _collective(call: InstructionCall) -> str:
    """Return the name of the collective that a custom call begins or ends."""
    made = call.within.instructions
    found = [name for name in call.instruction.operands if made[name].opcode in OPCODES]
    if len(found) != 1:
        raise ValueError("no one collective that this custom call begins or ends")
    return found[0]


def _begin(call: InstructionCall) -> Any:
    """Return what is sent, what is received, and flags that nothing reads."""
    name, kinds = _collective(call), call.instruction.type
    if isinstance(kinds, ArrayType):
        raise ValueError("a collective that begins without what it sends")
    sent = call.made[call.within.instructions[name].operands[0]]
    flags = (jnp.zeros(kind.dims, dtype_of(kind)) for kind in kinds[2:] if isinstance(kind, ArrayType))
    return (sent, call.made[name], *flags)


def _end(call: InstructionCall) -> Any:
    """Return what is received: the text names the collective again, of what was sent."""
    return call.made[_collective(call)]


OPCODES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ASYNCHRONOUS: dict[str, Rule] = {"AsyncCollectiveStart": _begin, "AsyncCollectiveDone": _end}

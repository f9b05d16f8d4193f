"""Pallas kernels of a compiled program: their custom calls run as the equations they were made of, in interpret mode.

Products inside of a kernel are then a CPU's, not passes of the matrix unit.
"""

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex
import numpy as np

from precaudit.interpreters.jaxpr.jax_versions import bodies, frames, open_jaxpr, source
from precaudit.interpreters.tpu.calls import InstructionCall, Rule, dtype_of
from precaudit.interpreters.tpu.hlo import ArrayType, Module, Type

TARGET = "tpu_custom_call"
KERNEL = "pallas_call"


def kernel_rule(module: Module, jaxpr: jex.ClosedJaxpr) -> dict[str, Rule]:
    """Return the rule of Pallas kernels' custom calls; none where the program, a closed jaxpr, has no kernel."""
    kernels = list(kernel_equations(open_jaxpr(jaxpr)[0]))

    def run(call: InstructionCall) -> Any:
        equation = kernel_of_call(module, kernels, call)
        out = equation.primitive.bind(*call.inputs, **{**equation.params, "interpret": True})
        return out[0] if isinstance(call.instruction.type, ArrayType) else tuple(out)

    return {TARGET: run} if kernels else {}


def kernel_equations(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yield the kernels of a jaxpr, those inside of loops, branches and calls among them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == KERNEL:
            yield equation
            continue
        for value in equation.params.values():
            for body in bodies(value):
                yield from kernel_equations(body)


def kernel_of_call(module: Module, kernels: list[Any], call: InstructionCall) -> Any:
    """Return the kernel that a custom call was made of: of its formats, shapes and, of several, its line.

    Raises ValueError where no kernel is, or several that differ may be.
    """
    given, made = [_shape_and_dtype(x) for x in call.declared_types], _results(call.instruction.type)
    found = [e for e in kernels if ([_of(v) for v in e.invars], [_of(v) for v in e.outvars]) == (given, made)]
    line = module.source(call.instruction)
    found = [e for e in found if line in _lines(e)] or found
    if len({str(e.params["jaxpr"]) + str(e.params["grid_mapping"]) for e in found}) != 1:
        raise ValueError(f"{len(found)} Pallas kernels may be the custom call {call.instruction.name}")
    return found[0]


def kernel_names(module: Module, jaxpr: jex.ClosedJaxpr) -> tuple[str, ...]:
    """Return the names, or lines, of the kernels that a compiled program holds."""
    if not any(x.attributes.get("custom_call_target") == TARGET for _, x in module.walk()):
        return ()
    return tuple(dict.fromkeys(str(e.params.get("name") or source(e)) for e in kernel_equations(open_jaxpr(jaxpr)[0])))


def _lines(equation: jex.JaxprEqn) -> list[str]:
    return [f"{file}:{line}" for file, line, *_ in frames(equation)]


def _of(variable: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return tuple(variable.aval.shape), np.dtype(variable.aval.dtype)


def _shape_and_dtype(kind: Type) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not isinstance(kind, ArrayType):
        raise ValueError("a tuple that a Pallas kernel reads")
    return kind.dims, dtype_of(kind)


def _results(kind: Type) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    return [_shape_and_dtype(x) for x in ((kind,) if isinstance(kind, ArrayType) else kind)]

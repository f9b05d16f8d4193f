"""Pallas kernels of a compiled program: their custom calls run as the equations they were made of, in interpret mode.

Products inside of a kernel are then a CPU's, not passes of the matrix unit.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from precaudit.interpreters.jaxpr.jax_versions import bodies, closed, frames, source
from precaudit.interpreters.tpu.calls import Call, Rule, dtype_of
from precaudit.interpreters.tpu.hlo import Module, Shape, Type

TARGET = "tpu_custom_call"
KERNEL = "pallas_call"


def rules(module: Module, jaxpr: Any) -> dict[str, Rule]:
    """Return the rule of Pallas kernels' custom calls; none where the program, a closed jaxpr, has no kernel."""
    kernels = list(equations(closed(jaxpr)[0]))

    def run(call: Call) -> Any:
        equation = made_of(module, kernels, call)
        out = equation.primitive.bind(*call.inputs, **{**equation.params, "interpret": True})
        return out[0] if isinstance(call.instruction.type, Shape) else tuple(out)

    return {TARGET: run} if kernels else {}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the kernels of a jaxpr, those inside of loops, branches and calls among them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == KERNEL:
            yield equation
            continue
        for value in equation.params.values():
            for body in bodies(value):
                yield from equations(body)


def made_of(module: Module, kernels: list[Any], call: Call) -> Any:
    """Return the kernel that a custom call was made of: of its formats, shapes and, of several, its line.

    Raises ValueError where no kernel is, or several that differ may be.
    """
    given, made = [_described(x) for x in call.declared], _results(call.instruction.type)
    found = [e for e in kernels if ([_of(v) for v in e.invars], [_of(v) for v in e.outvars]) == (given, made)]
    line = module.source(call.instruction)
    found = [e for e in found if line in _lines(e)] or found
    if len({str(e.params["jaxpr"]) + str(e.params["grid_mapping"]) for e in found}) != 1:
        raise ValueError(f"{len(found)} Pallas kernels may be the custom call {call.instruction.name}")
    return found[0]


def interpreted(module: Module, jaxpr: Any) -> tuple[str, ...]:
    """Return the names, or lines, of the kernels that a compiled program holds."""
    if not any(x.attributes.get("custom_call_target") == TARGET for _, x in module.walk()):
        return ()
    return tuple(dict.fromkeys(str(e.params.get("name") or source(e)) for e in equations(closed(jaxpr)[0])))


def _lines(equation: Any) -> list[str]:
    return [f"{file}:{line}" for file, line, *_ in frames(equation)]


def _of(variable: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return tuple(variable.aval.shape), np.dtype(variable.aval.dtype)


def _described(kind: Type) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not isinstance(kind, Shape):
        raise ValueError("a tuple that a Pallas kernel reads")
    return kind.dims, dtype_of(kind)


def _results(kind: Type) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    return [_described(x) for x in ((kind,) if isinstance(kind, Shape) else kind)]

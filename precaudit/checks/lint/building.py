"""The graph of a program from its jaxpr: values numbered, those of calls, loops, branches and kernels joined."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from precaudit.checks.lint.flow import Carried, Equation, Graph, user_frames
from precaudit.interpreters.jaxpr.jax_versions import bodies, body_of_call, frames, open_jaxpr, scan_counts
from precaudit.interpreters.jaxpr.primitives import CALLS

LOOPS = ("scan", "while", "cond")
READS = ("get", "masked_load", "new_ref", "freeze")  # of memory, a reference, their first input
WRITES = ("swap", "masked_swap", "addupdate")


def build(jaxpr: jex.ClosedJaxpr) -> Graph:
    """Return the graph of a program, a closed jaxpr."""
    builder = _Builder()
    body, consts = open_jaxpr(jaxpr)
    results = builder.run(body, consts, [builder.value(v.aval) for v in body.invars], (), ())
    return Graph(
        tuple(builder.equations),
        builder.makers,
        {v: tuple(x) for v, x in builder.joins.items()},
        builder.constants,
        builder.shapes,
        builder.dtypes,
        tuple(builder.carried),
        tuple(results),
    )


class _Builder:
    """Numbers the values of a jaxpr; a body that is called twice has values of its own each time."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.makers: dict[int, Equation] = {}
        self.joins: dict[int, list[int]] = {}
        self.constants: dict[int, Any] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[str] = []
        self.carried: list[Carried] = []
        self.steps: int | None = None  # of the outermost scan around what is taken in

    def value(self, aval: object) -> int:
        """Number a value."""
        self.shapes.append(tuple(getattr(aval, "shape", ())))
        self.dtypes.append(str(getattr(aval, "dtype", "")))
        return len(self.shapes) - 1

    def join(self, value: int, *sources: int) -> None:
        """Say what a value may be."""
        self.joins.setdefault(value, []).extend(sources)

    def constant(self, aval: object, given: object) -> int:
        """Number a value that the text gives."""
        v = self.value(aval)
        if isinstance(getattr(aval, "dtype", None), np.dtype):  # no PRNG key, which is no number
            self.constants[v] = given
        return v

    def run(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        given: Sequence[int],
        names: tuple[str, ...],
        around: tuple[str, ...],
        closed_over: Sequence[int] = (),
    ) -> list[int]:
        """Take in a body on numbered arguments; return the numbers of its results.

        ``closed_over``: the numbers of its constants, of a body whose constants are its equation's inputs.
        """
        known = dict(zip(jaxpr.invars, given, strict=True)) | dict(zip(jaxpr.constvars, closed_over, strict=False))
        for i, var in enumerate(jaxpr.constvars[len(closed_over) :], len(closed_over)):
            known[var] = self.constant(var.aval, consts[i]) if i < len(consts) else self.value(var.aval)

        def node_of(var: Any) -> int:
            return self.constant(var.aval, var.val) if hasattr(var, "val") else known[var]

        for e in jaxpr.eqns:
            stack = str(getattr(e.source_info, "name_stack", ""))
            path = (*names, *(x for x in stack.split("/") if x))
            own = user_frames(f"{file}:{line}" for file, line, *_ in frames(e))
            whole = own if own[-len(around) :] == around else (*own, *around)
            inputs = [node_of(v) for v in e.invars]
            at = len(self.equations)
            outputs = self.outputs(e, inputs, path, whole)
            inner = outputs is not None
            made = [self.value(v.aval) for v in e.outvars] if outputs is None else outputs
            found = Equation(e, path, whole, tuple(inputs), tuple(made), self.steps)
            self.equations.insert(at, found)
            if not inner:
                self.makers.update(dict.fromkeys(made, found))
            known.update(zip(e.outvars, made, strict=True))
        return [node_of(v) for v in jaxpr.outvars]

    def outputs(
        self, e: jex.JaxprEqn, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]
    ) -> list[int] | None:
        """Take in the bodies of an equation; return the numbers of its results where they are those of a body."""
        name, params = e.primitive.name, e.params
        if name in LOOPS:
            return getattr(self, f"{name}_loop")(e, inputs, names, around)
        if name == "pallas_call":
            return self.kernel(e, inputs, names, around)
        if name in READS or name in WRITES:
            return self.memory(e, inputs)
        if name == "optimization_barrier":
            made = [self.value(v.aval) for v in e.outvars]
            for v, source in zip(made, inputs, strict=True):
                self.join(v, source)
            return made
        if name in CALLS or name == "shard_map":
            body, consts = body_of_call(params, CALLS.get(name, "jaxpr"))
            if len(body.invars) == len(inputs) and len(body.outvars) == len(e.outvars):
                return self.run(body, consts, inputs, names, around)
        for value in params.values():
            for body in bodies(value):
                over = inputs if len(body.constvars) == len(inputs) else ()  # the references that ``run_scoped`` reads
                self.run(body, (), [self.value(v.aval) for v in body.invars], names, around, over)
        return None

    def kernel(self, e: jex.JaxprEqn, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]) -> list[int]:
        """Take in a Pallas kernel: its references are what it is given, what it makes, and memory of its own."""
        body, _ = open_jaxpr(e.params["jaxpr"])
        n = getattr(e.params["grid_mapping"], "num_dynamic_grid_bounds", 0)
        references = [self.value(v.aval) for v in body.invars]
        for reference, given in zip(references, inputs[n:], strict=False):
            self.join(reference, given)
        made = references[len(inputs) - n :][: len(e.outvars)]
        for given, k in e.params["input_output_aliases"]:
            self.join(made[k], inputs[given])
        self.run(body, (), references, names, around)
        return made

    def memory(self, e: jex.JaxprEqn, inputs: list[int]) -> list[int]:
        """Join what is read of memory and what is written there, whenever that is."""
        held, given = inputs[0], inputs[1:]
        made = [self.value(v.aval) for v in e.outvars]
        for v in made:
            self.join(v, held)
        if e.primitive.name in WRITES:
            self.join(held, *(v for v in given if self.dtypes[v] == self.dtypes[held]))
        return made

    def scan_loop(
        self, e: jex.JaxprEqn, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]
    ) -> list[int]:
        """Take in a scan: what a step carries is its first value or what the step before left."""
        body, consts = open_jaxpr(e.params["jaxpr"])
        n, m = scan_counts(e.params)
        given = [*inputs[:n], *(self.value(v.aval) for v in body.invars[n:])]
        outer = self.steps
        self.steps = outer or int(e.params["length"])
        left = self.run(body, consts, given, names, around)
        self.steps = outer
        for k in range(n, len(inputs)):
            self.join(given[k], inputs[k])
        made = [self.value(v.aval) for v in e.outvars]
        for k, v in enumerate(made):
            self.join(v, left[k])
        for k in range(m):
            self.join(given[n + k], left[k])
            self.carried.append(Carried(given[n + k], left[k], int(e.params["length"])))
        return made

    def while_loop(
        self, e: jex.JaxprEqn, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]
    ) -> list[int]:
        """Take in a loop with a condition."""
        n, m = e.params["cond_nconsts"], e.params["body_nconsts"]
        (condition, known), (body, consts) = open_jaxpr(e.params["cond_jaxpr"]), open_jaxpr(e.params["body_jaxpr"])
        carried = [self.value(v.aval) for v in body.invars[m:]]
        (goes_on,) = self.run(condition, known, [*inputs[:n], *carried], names, around)
        left = self.run(body, consts, [*inputs[n : n + m], *carried], names, around)
        made = [self.value(v.aval) for v in e.outvars]
        for k, (read, first, out) in enumerate(zip(carried, inputs[n + m :], left, strict=True)):
            self.join(read, first, out)
            self.join(made[k], first, out)
            self.carried.append(Carried(read, out, None, goes_on))
        return made

    def cond_loop(
        self, e: jex.JaxprEqn, inputs: list[int], names: tuple[str, ...], around: tuple[str, ...]
    ) -> list[int]:
        """Take in the branches of a condition."""
        made = [self.value(v.aval) for v in e.outvars]
        for branch in e.params["branches"]:
            left = self.run(*open_jaxpr(branch), inputs[1:], names, around)
            for v, source in zip(made, left, strict=True):
                self.join(v, source)
        return made

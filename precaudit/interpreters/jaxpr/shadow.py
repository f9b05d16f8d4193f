"""The FP64 shadow of a JAX program: ``shadow(f)(*args)`` evaluates f's own jaxpr with every float in FP64.

Casts between float formats and roundings to them vanish, products and sums are FP64. What is left of the program is its
formula: candidate − shadow is rounding, shadow − an independent reference is a formula that differs. What happens to
every primitive is in docs/shadow.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr import large
from precaudit.interpreters.jaxpr.jax_versions import bind, body_of_call, source, walk
from precaudit.interpreters.jaxpr.labels import of_equation
from precaudit.interpreters.jaxpr.loops import LOOPS, shard_map
from precaudit.interpreters.jaxpr.primitives import PRODUCTS, lifting
from precaudit.interpreters.jaxpr.rules import RULES
from precaudit.interpreters.jaxpr.wide import argument_value, traced_as, up, wide_dtype

# Parameters that name a format.
DTYPES = ("preferred_element_type", "dtype", "new_dtype", "accum_dtype", "out_dtype", "input_dtype")

# Where the operand is not lifted yet: what is cut out of it is lifted (rows of an embedding, not the table), and what
# only moves it leaves it so.
SLICES = {"gather", "slice", "dynamic_slice"}
MOVES = {"transpose", "reshape", "squeeze"}

Lift = Callable[..., Any]


class CannotLift(Exception):
    """A primitive that has no FP64 meaning of its own; ``name`` is what ``lift`` may name it by.

    ``why``: the reason; ``where``: the line of the program, empty where JAX kept none; ``said``: these in words,
    without what only commands with --lift take.
    """

    def __init__(self, name: str, why: str = "", where: str = "") -> None:
        told = (f" ({why})" if why else "") + (f" at {where}" if where else "")
        self.name, self.why, self.where, self.said = name, why, where, f"{name} cannot be lifted to FP64{told}"
        super().__init__(f"{self.said}; give its meaning with --lift {name}=module:function")


def refusal(error: Exception) -> str:
    """Return why something cannot be made in FP64, for commands that take no --lift."""
    return error.said if isinstance(error, CannotLift) else str(error)


def refused_of(equation: jex.JaxprEqn) -> CannotLift | None:
    """Return why an equation has no FP64 meaning of its own, None where it has one."""
    name = equation.primitive.name
    how = lifting(name)
    if how.kind == "refused":
        return CannotLift(_name_of(equation) or name, how.why, source(equation))
    if name == "bitcast_convert_type" and not jnp.issubdtype(equation.invars[0].aval.dtype, jnp.integer):
        return CannotLift(name, "it reads the bits of a float", source(equation))
    return None


def reads_sign(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is ``jnp.signbit``: of a float's bits it reads the one that FP64 has, too."""
    if lifting(equation.primitive.name).kind != "call" or equation.params.get("name") != "signbit":
        return False
    body = body_of_call(equation.params, lifting(equation.primitive.name).body)[0]
    return [e.primitive.name.removesuffix("_arithmetic").removesuffix("_logical") for e in body.eqns] == SIGN


def _name_of(equation: jex.JaxprEqn) -> str:
    """Return a primitive's name, or a Pallas kernel's."""
    name, params = equation.primitive.name, equation.params
    return name if name != "pallas_call" else str(params.get("name") or params.get("name_and_src_info") or "")


def shadow(function: Callable[..., Any], lift: Mapping[str, Lift] | None = None) -> Callable[..., Any]:
    """Return a function that evaluates ``function``'s jaxpr in FP64 and returns its outputs, floats in FP64.

    The jaxpr is traced with the arguments' own formats, FP64 as float32 and complex128 as complex64. Arguments, any
    pytrees, stay narrow until they are read: parameters scanned over layers are lifted one layer at a time. Complex
    numbers become complex128; integers (64-bit ones read as 32-bit) and PRNG keys stay. ``lift`` maps a primitive's or
    a Pallas kernel's name to a function on FP64 arrays. Must be called, and its results used, under
    ``jax.enable_x64(True)``. Raises CannotLift for a primitive docs/shadow.md has as refused or has not, and for one
    that does not take FP64 operands or gives another shape or format on them.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import precaudit
    >>> third = lambda x: x / 3
    >>> with jax.enable_x64(True):
    ...     wide = float(precaudit.shadow(third)(jnp.float32(1)))
    >>> wide, float(third(jnp.float32(1)))
    (0.3333333333333333, 0.3333333432674408)
    """
    known = dict(lift or {})

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        jaxpr, structure = trace_jaxpr(function, args, kwargs)
        with jax.enable_x64(True):
            out = Shadow(known).run(jaxpr.jaxpr, jaxpr.consts, leaves(jaxpr, args, kwargs))
            return jax.tree.unflatten(structure, [up(x) for x in out])

    return evaluate


def trace_jaxpr(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the jaxpr of a function on arguments of 32 bits or less, and the structure of its output."""
    with jax.enable_x64(False):
        seen, named = jax.tree.map(traced_as, (tuple(args), dict(kwargs)))
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*seen, **named)
    return jaxpr, jax.tree.structure(shape)


def leaves(jaxpr: jex.ClosedJaxpr, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments a traced jaxpr takes, in its order."""
    return [
        argument_value(x, a) for x, a in zip(jax.tree.leaves((tuple(args), dict(kwargs))), jaxpr.in_avals, strict=True)
    ]


def literal(variable: jex.Literal) -> Any:
    """Return a literal's value in its own format."""
    return np.asarray(variable.val, variable.aval.dtype)


def _as_stored(equation: jex.JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether an equation's first operand is still in its own narrow format: what is cut out of it is lifted alone."""
    x, aval = inputs[0], equation.invars[0].aval
    return getattr(x, "dtype", None) == aval.dtype != wide_dtype(aval.dtype)


SIGN = ["bitcast_convert_type", "shift_right", "convert_element_type"]


class Shadow:
    """Evaluates jaxprs in FP64."""

    def __init__(self, lift: Mapping[str, Lift]) -> None:
        self.lift = lift
        self.calls: list[jex.JaxprEqn] = []  # and loops, whose bodies are evaluated, outermost first

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate an open jaxpr; arguments and constants narrow or lifted."""
        return walk(jaxpr, consts, args, self.equation, literal)

    def equation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one equation."""
        name, params = equation.primitive.name, equation.params
        named = _name_of(equation)
        for key, meaning in self.lift.items():
            if key == name or (name == "pallas_call" and key in named):
                found = meaning(*map(up, inputs))
                return _check_results(
                    equation, [up(x) for x in (found if isinstance(found, list | tuple) else [found])]
                )
        if (refused := refused_of(equation)) is not None:
            raise refused
        if reads_sign(equation):
            return [jnp.signbit(up(inputs[0]))]
        how = lifting(name)
        if how.kind == "call":
            with self.body_in_place(equation) as body:
                return self.run(*body, inputs)
        if name in LOOPS or name == "shard_map":
            with self.inside_of(equation):
                return LOOPS.get(name, shard_map)(self.run, _lift_array, params, inputs)
        if name in MOVES | SLICES and _as_stored(equation, inputs):
            moved = bind(equation, inputs)
            return moved if name in MOVES else _check_results(equation, [up(x) for x in moved])
        return self.operation(equation, [x if large.stays(equation, i, x) else up(x) for i, x in enumerate(inputs)])

    @contextmanager
    def body_in_place(self, equation: jex.JaxprEqn) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Give a call's body, an open jaxpr and its constants, to be evaluated in the place of the call.

        What ``jax.checkpoint`` has a gradient compute again stands behind a barrier, unless ``prevent_cse`` is False.
        """
        params = equation.params
        body = body_of_call(params, lifting(equation.primitive.name).body)
        apart = bool(params.get("differentiated")) and params.get("prevent_cse") is not False
        if not apart:
            self.hand_over(equation.invars, body[0].invars)
        with self.inside_of(equation):
            yield body
        if not apart:
            self.hand_over(body[0].outvars, equation.outvars)

    @contextmanager
    def inside_of(self, equation: jex.JaxprEqn) -> Iterator[None]:
        """Note that an equation's bodies are evaluated."""
        self.calls.append(equation)
        try:
            yield
        finally:
            self.calls.pop()

    def equation_with_line(self, equation: jex.JaxprEqn) -> jex.JaxprEqn:
        """Return the equation that tells where an operation was written: of a function of JAX's own, its call."""
        return next((e for e in (equation, *reversed(self.calls)) if of_equation(e).stack), equation)

    def hand_over(self, given: Sequence[Any], taken: Sequence[jex.Var]) -> None:
        """Take note that variables (``taken``) are others, or literals (``given``), by another name."""

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation on lifted operands; what it raises and what it gives wrongly are CannotLift."""
        name = equation.primitive.name
        try:
            if any(large.stays(equation, i, x) for i, x in enumerate(inputs)):
                out = [large.large_product(equation, inputs)]
            elif name in RULES:
                out = RULES[name](self.run, equation.params, inputs)
            else:
                out = bind(equation, inputs, _raised_params(equation))
        except (TypeError, ValueError, NotImplementedError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CannotLift(name, why, source(equation)) from error
        return _check_results(equation, out)


def _lift_array(x: ArrayLike) -> Any:
    """Return what a loop carries: lifted, and an array."""
    return up(jnp.asarray(x))


def _raised_params(equation: jex.JaxprEqn) -> dict[str, Any]:
    """Return an equation's parameters with formats raised, and without the precision of a product."""
    params = {k: wide_dtype(v) if k in DTYPES and v is not None else v for k, v in equation.params.items()}
    return params | ({"precision": None} if equation.primitive.name in PRODUCTS.split() else {})


def _check_results(equation: jex.JaxprEqn, out: list[Any]) -> list[Any]:
    """Return an equation's results; raises CannotLift unless they have its shapes and its formats, lifted."""
    wanted = [(wide_dtype(v.aval.dtype), v.aval.shape) for v in equation.outvars if hasattr(v.aval, "dtype")]
    made = [(x.dtype, np.shape(x)) for x in out if hasattr(x, "dtype")]
    if made != wanted or len(out) != len(equation.outvars):
        told = [", ".join(f"{dtype}{list(shape)}" for dtype, shape in each) for each in (made, wanted)]
        raise CannotLift(equation.primitive.name, f"it gives {told[0]} for {told[1]}", source(equation))
    return out

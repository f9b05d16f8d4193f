"""Lines inside Pallas kernels that round to less than float32, and the kernels with some of them kept in float32.

A kernel's body is never evaluated here: its equations are rewritten, and it runs as it did, compiled or interpreted.
What is stored where a reference to memory is of a narrow format is rounded there still.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from precaudit.interpreters.jaxpr.jax_versions import bodies, source, with_bodies
from precaudit.interpreters.jaxpr.raised import WIDE
from precaudit.interpreters.jaxpr.rounding import EXACT
from precaudit.interpreters.jaxpr.sums import float_bits

CALL, GIVEN = "pallas_call", "what follows"
READS, WRITES = {"get", "masked_load"}, {"swap", "addupdate", "masked_swap"}
FORMAT = {"convert_element_type": "new_dtype", "dot_general": "preferred_element_type"}  # parameters that name it


def narrow_places(jaxpr: jex.Jaxpr) -> dict[str, list[Any]]:
    """Return where Pallas kernels in an open jaxpr round to less than float32, in words, and the equations there.

    Left out: what only moves or reads, and what is stored at once where nothing wider fits. In the backward pass of a
    function that is jitted by itself JAX keeps no lines, hence the kernel's name and what reads the result.
    """
    found: dict[str, list[Any]] = {}
    for e in jaxpr.eqns:
        for body in (body for value in e.params.values() for body in bodies(value)):
            if e.primitive.name == CALL:
                for place, equation in _rounding(body, _name(e, body)):
                    found.setdefault(place, []).append(equation)
            else:
                for place, equations in narrow_places(body).items():
                    found.setdefault(place, []).extend(equations)
    return found


def runs_interpreted(jaxpr: jex.Jaxpr) -> bool:
    """Whether an open jaxpr holds Pallas kernels, and they run in interpret mode: there is nothing but CPUs."""
    return jax.default_backend() == "cpu" and _pallas(jaxpr)


def _pallas(jaxpr: jex.Jaxpr) -> bool:
    return any(
        e.primitive.name == CALL or any(map(_pallas, bodies(value))) for e in jaxpr.eqns for value in e.params.values()
    )


def _name(call: Any, body: Any) -> str:
    """Return what a Pallas kernel is called: its name, or that of its function."""
    return str(call.params.get("name") or body.debug_info.func_src_info or "a kernel").partition(" ")[0]


def _rounding(jaxpr: jex.Jaxpr, kernel: str) -> Iterator[tuple[str, Any]]:
    for e in jaxpr.eqns:
        inside = [body for value in e.params.values() for body in bodies(value)]
        for body in inside:
            yield from _rounding(body, kernel)
        if inside or e.primitive.name in EXACT | READS | WRITES:
            continue
        for v in filter(_narrow, e.outvars):
            read = reading_primitives(v, jaxpr)
            if read and not read <= WRITES:
                shape = f"{v.aval.dtype.name}[{','.join(map(str, v.aval.shape))}]"
                yield f"{source(e)}: {shape} for {', '.join(sorted(read))} in {kernel}", e
                break


def reading_primitives(v: jex.Var | jex.Literal, jaxpr: jex.Jaxpr) -> set[str]:
    """Return the primitives that read a variable, or what is moved of it; GIVEN: a jaxpr gives it out."""
    found: set[str] = set()
    for e in jaxpr.eqns:
        if any(x is v for x in e.invars):
            moved = e.primitive.name in EXACT
            found |= set().union(*(reading_primitives(x, jaxpr) for x in e.outvars)) if moved else {e.primitive.name}
    return found | ({GIVEN} if any(x is v for x in jaxpr.outvars) else set())


def raise_kernel_equations(jaxpr: jex.ClosedJaxpr, equations: Collection[Any]) -> Callable[..., list[Any]]:
    """Return a closed jaxpr as a function of its leaves, with equations inside its Pallas kernels in float32."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(_calls(jaxpr.jaxpr, frozenset(map(id, equations))), jaxpr.consts))


def _calls(jaxpr: jex.Jaxpr, lifted: frozenset[int]) -> Any:
    """Rewrite the kernels in an open jaxpr, and nothing else of it."""
    equations = []
    for e in jaxpr.eqns:
        change = _body if e.primitive.name == CALL else _calls
        equations.append(
            e.replace(params={n: with_bodies(v, partial(change, lifted=lifted)) for n, v in e.params.items()})
        )
    return jaxpr.replace(eqns=equations)


def _body(jaxpr: jex.Jaxpr, lifted: frozenset[int]) -> Any:
    """Rewrite a kernel's body, or one inside it; what it is given and gives keeps its formats."""
    made = _Rewritten(lifted)
    for e in jaxpr.eqns:
        made.add(e)
    return jaxpr.replace(eqns=made.equations, outvars=[made.as_declared(v) for v in jaxpr.outvars])


class _Rewritten:
    """Equations as they are, but for those that are lifted and those that read what these gave."""

    def __init__(self, lifted: frozenset[int]) -> None:
        self.lifted = lifted
        self.equations: list[Any] = []
        self.wide: dict[Any, Any] = {}  # narrow variables, and the float32 ones in their places

    def add(self, e: jex.JaxprEqn) -> None:
        """Append an equation, in float32 where it is lifted or moves what is."""
        inside = any(True for value in e.params.values() for _ in bodies(value))
        kept = inside or e.primitive.name in READS | WRITES
        lifted = id(e) in self.lifted
        if kept or not (lifted or any(self._is_wide(v) for v in e.invars)):
            params = (
                {n: with_bodies(v, partial(_body, lifted=self.lifted)) for n, v in e.params.items()}
                if inside
                else e.params
            )
            self.equations.append(e.replace(invars=[self.as_declared(v) for v in e.invars], params=params))
            return
        stays = lifted or e.primitive.name in EXACT
        params = dict(e.params)
        key = FORMAT.get(e.primitive.name)
        if key is not None and 0 < float_bits(params.get(key)) < 32:
            params[key] = WIDE
        outs = [jex.Var(v.aval.update(dtype=WIDE)) if _narrow(v) else v for v in e.outvars]
        self.equations.append(e.replace(invars=[self._up(v) for v in e.invars], outvars=outs, params=params))
        for old, new in zip(e.outvars, outs, strict=True):
            if old is new:
                continue
            if stays:
                self.wide[old] = new
            else:
                self._convert(new, old)

    def as_declared(self, v: jex.Var | jex.Literal) -> Any:
        """Return a variable in its own format, rounded to it where it is held in float32."""
        if not self._is_wide(v):
            return v
        narrow = jex.Var(v.aval)
        self._convert(self.wide[v], narrow)
        return narrow

    def _is_wide(self, v: jex.Var | jex.Literal) -> bool:
        return not isinstance(v, jex.Literal) and v in self.wide

    def _up(self, v: jex.Var | jex.Literal) -> Any:
        """Return a variable in float32 if it is of a narrow format."""
        if self._is_wide(v):
            return self.wide[v]
        if not _narrow(v):
            return v
        if isinstance(v, jex.Literal):
            return jex.Literal(jnp.asarray(v.val, WIDE), v.aval.update(dtype=WIDE))
        new = jex.Var(v.aval.update(dtype=WIDE))
        self._convert(v, new)
        return new

    def _convert(self, old: Any, new: Any) -> None:
        made = _convert_equation(old.aval, new.aval.dtype)
        self.equations.append(made.replace(invars=[old], outvars=[new]))


def _convert_equation(aval: Any, dtype: DTypeLike) -> Any:
    traced = jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return traced.jaxpr.eqns[0]


def _narrow(v: jex.Var | jex.Literal) -> bool:
    aval = v.aval
    return not hasattr(aval, "inner_aval") and 0 < float_bits(getattr(aval, "dtype", None)) < 32

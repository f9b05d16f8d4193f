"""A function and its vector-Jacobian product as one program: as it runs, in FP64, and as its equations round."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.typing import ArrayLike, DTypeLike

from precaudit.checks.gradients.rules import with_own_lines
from precaudit.interpreters.jaxpr.effort import least_effort
from precaudit.interpreters.jaxpr.emulate import emulate_program
from precaudit.interpreters.jaxpr.excess import Unrounded
from precaudit.interpreters.jaxpr.jax_versions import bodies, source
from precaudit.interpreters.jaxpr.kernel_lines import GIVEN, narrow_places, raise_kernel_equations, reading_primitives
from precaudit.interpreters.jaxpr.multiplying import TF32
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.rounding import EXACT
from precaudit.interpreters.jaxpr.shadow import leaves as in_order
from precaudit.interpreters.jaxpr.shadow import trace_jaxpr
from precaudit.interpreters.jaxpr.strict import STRICTLY
from precaudit.interpreters.jaxpr.subnormals import device_flushes
from precaudit.interpreters.jaxpr.sums import float_bits, sums_narrow
from precaudit.numbers.arrays import Array

Sums = Literal["single", "reversed", "shuffled"]
DRAWS = 8
SINGLE = 2.0**-24
CAST = "convert_element_type"
BITS = 4  # significant bits of a constant that a narrow format did not round, such as 0.5 or −1


def differentiate(function: Callable[..., Any], argnums: Sequence[int], own_lines: bool = False) -> Callable[..., Any]:
    """Return ``g(cotangents, *inputs) → (outputs, gradients)``; cotangents are cast to the outputs' formats.

    Without ``argnums`` the function is run and not differentiated. ``own_lines``: what derivative rules of the
    function's own bind keeps its line, as ``with_own_lines`` does; for tracing, since it is traced twice.
    """
    places = tuple(argnums)

    def both(cotangents: jax.Array, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        run = with_own_lines(function, inputs) if own_lines and places else function

        def on_chosen(*chosen: Any) -> Any:
            every = list(inputs)
            for i, x in zip(places, chosen, strict=True):
                every[i] = x
            return run(*every)

        if not places:
            return on_chosen(), ()
        out, pull = jax.vjp(on_chosen, *(inputs[i] for i in places))
        return out, pull(jax.tree.map(lambda c, o: jnp.asarray(c).astype(o.dtype), cotangents, out))

    return both


def as_float32(x: ArrayLike) -> Any:
    """Return a float array or scalar in float32, whatever else as an array."""
    array = jnp.asarray(x)
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def leaf_names(
    function: Callable[..., Any], outputs: object, inputs: Sequence[Any], argnums: Sequence[int]
) -> list[str]:
    """Return what the leaves of ``(outputs, gradients)`` are called: ``out``, ``out[1]``, ``dlogits``."""
    try:
        called = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        called = []
    found = ["out" + tree_util.keystr(path) for path, _ in tree_util.tree_flatten_with_path(outputs)[0]]
    for i in argnums:
        name = called[i] if i < len(called) else f"input{i}"
        found += [f"d{name}{tree_util.keystr(path)}" for path, _ in tree_util.tree_flatten_with_path(inputs[i])[0]]
    return found


@dataclass(frozen=True)
class Formula:
    """A differentiated function's jaxpr, for any inputs of the shapes and formats it was traced with.

    ``strict``: it runs, and its declared roundings are emulated, as compiled without excess precision.
    """

    jaxpr: Any
    strict: bool = False

    @classmethod
    def of(cls, both: Callable[..., Any], cotangents: jax.Array, inputs: Sequence[Any]) -> "Formula":
        """Trace ``both(cotangents, *inputs)``; scalars as arrays, 64-bit formats as those of 32."""
        return cls(trace_jaxpr(both, jax.tree.map(jnp.asarray, (cotangents, *inputs)), {})[0])

    @cached_property
    def strictly(self) -> "Formula":
        """The same function as compiled without excess precision: it makes every rounding that it declares."""
        return replace(self, strict=True)

    @cached_property
    def remade(self) -> dict[Any, Any]:
        """What was made of it with a mistake, by which: compiled once for all cases of its shapes."""
        return {}

    @cached_property
    def _exact(self) -> Callable[..., list[Any]]:
        return jax.jit(emulate_program(self.jaxpr, None), compiler_options=least_effort())

    def exact(self, cotangents: jax.Array, inputs: Sequence[Any]) -> list[Array]:
        """Return the leaves in FP64 (not float ones as they are). Raises CannotLift as ``shadow`` does."""
        with jax.enable_x64(True):
            return [np.asarray(x) for x in self._exact(0, *self.leaves(cotangents, inputs))]

    def draws(
        self, cotangents: jax.Array, inputs: Sequence[Any], device: str = "cpu", declared: bool = False
    ) -> list[list[Array]]:
        """Return 2 · DRAWS realisations, FP64 before the results are rounded: float32 sums, other grids, functions off.

        ``declared``: what the equations declare narrower is rounded so; else to float32.

        Float inputs are moved by up to a unit roundoff of float32: an algorithm that is backward stable may. In the
        first DRAWS every element by itself, in the others all of an array by one factor.
        """
        random = np.random.default_rng(20020801)
        held = self.leaves(cotangents, inputs)
        found = []
        with jax.enable_x64(True):
            for seed in range(1, 2 * DRAWS + 1):
                moved = [_perturb(x, random, together=seed > DRAWS) for x in held]
                order: Sums = "shuffled" if seed > DRAWS else "reversed" if seed % 2 == 0 else "single"
                run = self._realisation(device, order, declared)
                found.append([np.asarray(x) for x in run(np.uint64(seed), *moved)])
        return found

    def leaves(self, cotangents: jax.Array, inputs: Sequence[Any]) -> list[Any]:
        """Return what the jaxpr takes, in its order."""
        return in_order(self.jaxpr, (cotangents, *inputs), {})

    @cached_property
    def _compiled_draws(self) -> dict[tuple[str, str, bool], Callable[..., list[Any]]]:
        return {}

    def _realisation(self, device: str, sums: Sums, declared: bool) -> Callable[..., list[Any]]:
        """Return a compiled realisation; for ``reversed`` declared sums in their own narrow format, if there are."""
        if (device, sums, declared) not in self._compiled_draws:
            rounds: Unrounded = "single" if not declared else "none" if self.strict else "converted"
            how = Realisation(rounds, sums=sums, flush=device_flushes())
            if sums == "reversed" and declared and sums_narrow(self.jaxpr.jaxpr):
                how = replace(how, sums="own")
            if device == "tpu":
                how = replace(how, unit="matrix")
            elif device == "gpu":
                how = replace(how, unit="gpu", otherwise=TF32)
            self._compiled_draws[device, sums, declared] = jax.jit(
                emulate_program(self.jaxpr, how), compiler_options=least_effort()
            )
        return self._compiled_draws[device, sums, declared]

    @cached_property
    def places(self) -> dict[str, list[Any]]:
        """Where Pallas kernels in it round to less than float32."""
        return narrow_places(self.jaxpr.jaxpr)

    def with_raised_kernels(
        self, cotangents: object, inputs: Sequence[Any], narrow: Collection[str] = ()
    ) -> list[Array]:
        """Return the leaves as it gives them if the places in its Pallas kernels are in float32, but for ``narrow``."""
        key = frozenset(narrow)
        if key not in self._raised_runs:
            lifted = [e for place, equations in self.places.items() if place not in key for e in equations]
            options = STRICTLY if self.strict else None
            self._raised_runs[key] = jax.jit(raise_kernel_equations(self.jaxpr, lifted), compiler_options=options)
        return [np.asarray(x) for x in self._raised_runs[key](*self.leaves(cotangents, inputs))]

    @cached_property
    def _raised_runs(self) -> dict[frozenset[str], Callable[..., list[Any]]]:
        return {}

    def constants(self) -> list[str]:
        """Return constants of narrow formats that look rounded to them, ``0.69921875 in bfloat16 at FILE:LINE``.

        A literal beside a value that was cast to bfloat16 is bfloat16, in FP64 too: what it was meant to be is lost.
        """
        return list(dict.fromkeys(_narrow_constants(self.jaxpr.jaxpr, self.jaxpr.consts)))

    def narrow(self) -> list[str]:
        """Return the lines at which results narrower than float32 are made, kernels' inside included.

        What only moves them is left out, and what is rounded once to be given out.
        """
        return list(dict.fromkeys(_narrow_lines(self.jaxpr.jaxpr, outermost=True)))


def _perturb(x: jax.Array, random: np.random.Generator, together: bool) -> Any:
    if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
        return x
    wide = np.asarray(x).astype(np.float64)
    return wide * (1.0 + SINGLE * random.uniform(-1.0, 1.0, () if together else wide.shape))


def _narrow(dtype: DTypeLike) -> bool:
    return 0 < float_bits(dtype) < 32


def _narrow_constants(jaxpr: jex.Jaxpr, consts: Sequence[Any] = ()) -> Iterator[str]:
    for x in consts:
        if _narrow(getattr(x, "dtype", None)) and np.ndim(x) == 0 and _full(float(x)):
            yield f"{float(x)!r} in {x.dtype}"
    for e in jaxpr.eqns:
        for v in e.invars:
            if hasattr(v, "val") and _narrow(getattr(v.aval, "dtype", None)) and _full(float(v.val)):
                at = source(e)
                yield f"{float(np.asarray(v.val, v.aval.dtype))!r} in {v.aval.dtype}" + (f" at {at}" if at else "")
        for value in e.params.values():
            for body in bodies(value):
                yield from _narrow_constants(body)


def _full(x: float) -> bool:
    """Whether a number takes more significant bits than one that a narrow format is likely to hold exactly."""
    return bool(np.isfinite(x)) and np.frexp(x)[0] * 2.0**BITS % 1 != 0


def _narrow_lines(jaxpr: jex.Jaxpr, outermost: bool = False) -> Iterator[str]:
    for e in jaxpr.eqns:
        given = outermost and e.primitive.name == CAST and reading_primitives(e.outvars[0], jaxpr) <= {GIVEN}
        made = any(_narrow(getattr(v.aval, "dtype", None)) for v in e.outvars) and e.primitive.name not in EXACT
        if made and not given and source(e):
            yield source(e)
        for value in e.params.values():
            for body in bodies(value):
                yield from _narrow_lines(body)

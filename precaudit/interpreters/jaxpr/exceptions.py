"""Floating-point exceptions of a program's segments: which operations make what is not finite, and of what.

The words are those of IEEE 754-2019, §7: an overflow's result is too large for its format, an invalid operation has
no result (0/0, inf − inf), a division by zero is a pole. Every operation counts its own, as a tap beside its result.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.labels import of_equation
from precaudit.interpreters.jaxpr.plant import Values, planting
from precaudit.interpreters.jaxpr.reads import Reads, reads
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.reap import reap
from precaudit.interpreters.jaxpr.sites import sites, unique_names
from precaudit.interpreters.jaxpr.sums import float_bits

RESULT, COUNTS = "~result ", "~counts "  # begin the names of taps on what an operation gives, and on what it counts
DECLARED = Realisation(expanded=False)


class ProgramOperation(NamedTuple):
    """An operation of a program: its primitive, the format of its result, and the user's line."""

    primitive: str
    dtype: str
    source: str


class Counts(NamedTuple):
    """Elements of an operation's result, [steps of the scans that it is in]; ``largest`` is a size in FP64.

    ``nonfinite``: NaN or infinite; ``over``: finite before they were rounded to its format, ``largest`` the largest of
    these; ``invalid``: NaN of operands that are not; ``infinite``: of finite operands.
    """

    nonfinite: Any
    over: Any
    largest: Any
    invalid: Any
    infinite: Any


class Watched(NamedTuple):
    """A program's operations by number, what they count, and which of them each, and each tap, may read directly."""

    operations: Sequence[ProgramOperation]
    counts: Mapping[int, Counts]
    read: Mapping[int, frozenset[int]]
    taps: Mapping[str, frozenset[int]]


class Watching:
    """A program's segments whose operations count what is not finite, traced and compiled when first run.

    As its equations round, or ``exact``: in FP64, with the same numbers. ``steps`` as ``planting``; ``options``: for
    the compiler. Raises as ``plant`` does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        exact: bool = False,
        steps: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.exact, self.options = exact, dict(options or {})
        self.given = planting(function, self._interpreter, steps=steps)
        self.operations: list[ProgramOperation] = []
        self._run: Callable[..., Any] | None = None

    def __call__(self, values: Values, args: Sequence[Any]) -> Watched:
        """Return what operations count, ``values`` planted as ``plant`` takes them. Under ``jax.enable_x64(True)``."""
        if self._run is None:
            self._trace(values, args)
        assert self._run is not None
        found = self._run(*jax.tree.leaves((values, *args)))
        counts = {_number(n): Counts(*np.moveaxis(np.asarray(found[n]), -1, 0)) for n in self.names}
        return Watched(self.operations, counts, self.read, self.taps)

    def _interpreter(self, names: Collection[str]) -> "_Counting":
        made = _Counting(names, self.exact)
        self.operations = made.operations
        return made

    def _trace(self, values: Values, args: Sequence[Any]) -> None:
        jaxpr, shape = jax.make_jaxpr(self.given, return_shape=True)(values, *args)
        direct, outputs = reads(jaxpr.jaxpr)
        every = [s for s in sites(jaxpr.jaxpr) if s.name.startswith(COUNTS) and not s.inside]
        told = jax.tree.unflatten(jax.tree.structure(shape), outputs)
        self.names = unique_names(every)
        self.read = {_number(n): _operations(x, direct) for n, x in direct.items() if n.startswith(RESULT)}
        self.taps = {name: _operations(made, direct) for name, (made, _) in told.items()}
        counted = reap(jex.jaxpr_as_fun(jaxpr), {s.name for s in every})
        self._run = jax.jit(lambda *leaves: counted(*leaves)[1], compiler_options=self.options)


class _Counting(Emulator):
    """Evaluates segments, as their equations round or in FP64, whose operations count what is not finite."""

    def __init__(self, names: Collection[str], exact: bool) -> None:
        super().__init__({}, names, DECLARED)
        self.exact = exact
        self.operations: list[ProgramOperation] = []
        self.wide: dict[Any, Any] = {}  # an operation's results before they are rounded

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation."""
        self.wide = {}
        made = super().operation(equation, inputs)
        read = [x for x in inputs if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        return [self.tap_counts(equation, v, x, read) for v, x in zip(equation.outvars, made, strict=True)]

    def store(self, variable: jex.Var | jex.Literal, x: jax.Array, factor: float) -> Any:
        """Return a result as its format holds it, or as it is in FP64."""
        self.wide[variable] = x
        return x if self.exact else super().store(variable, x, factor)

    def tap_counts(
        self, equation: jex.JaxprEqn, variable: jex.Var | jex.Literal, x: jax.Array, read: Sequence[Any]
    ) -> Any:
        """Return a result with a tap on it, and another on what it counts."""
        dtype = getattr(variable.aval, "dtype", None)
        if not float_bits(dtype):
            return x
        number, source = len(self.operations), of_equation(self.equation_with_line(equation)).source
        self.operations.append(ProgramOperation(equation.primitive.name, np.dtype(dtype).name, source))
        checkpoint_name(_count(x, self.wide.get(variable, x), read), f"{COUNTS}{number}")
        tapped = checkpoint_name(x, f"{RESULT}{number}")
        if id(x) in self.held:
            self.keep(tapped, self.held[id(x)][1])
        return tapped


def _count(x: jax.Array, wide: Any, read: Sequence[Any]) -> Any:
    """Return the ``Counts`` of a result [5], rounded and before that, of operands; of such a shape one by one."""
    over = jnp.isfinite(wide) & ~jnp.isfinite(x)
    invalid = jnp.isnan(wide) & _of_all(lambda y: ~jnp.isnan(y), wide, read)
    infinite = jnp.isinf(wide) & _of_all(jnp.isfinite, wide, read)
    nonfinite, overs, invalids, infinites = (
        jnp.sum(mark, dtype=np.float64) for mark in (~jnp.isfinite(x), over, invalid, infinite)
    )
    largest = jnp.max(jnp.where(over, jnp.abs(wide), 0.0), initial=0.0)
    return jnp.stack(Counts(nonfinite, overs, largest, invalids, infinites))


def _of_all(holds: Callable[[Any], Any], x: jax.Array, read: Sequence[Any]) -> Any:
    """Return where something holds of all operands: one by one of those shaped as the result, else of each whole."""
    each = [holds(y) if jnp.shape(y) == jnp.shape(x) else jnp.all(holds(y)) for y in read]
    return reduce(jnp.logical_and, each, jnp.asarray(True))


def _number(name: str) -> int:
    return int(name.partition("#")[0].rpartition(" ")[2])


def _operations(names: Reads, direct: Mapping[str, Reads]) -> frozenset[int]:
    """Return the numbers of the operations among names that something reads, through the program's own taps."""
    own = {n for n in names if not n.startswith((RESULT, COUNTS))}
    known = names
    while own:
        new: Reads = frozenset().union(*(direct.get(n, frozenset()) for n in own)) - known
        known, own = known | new, {n for n in new if not n.startswith((RESULT, COUNTS))}
    return frozenset(_number(n) for n in known if n.startswith(RESULT))

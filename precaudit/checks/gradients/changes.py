"""A differentiated formula with one change: a term scaled or omitted, rows omitted, a scan one row late."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.effort import least_effort
from precaudit.interpreters.jaxpr.jax_versions import scan_counts, source
from precaudit.interpreters.jaxpr.loops import LOOPS
from precaudit.interpreters.jaxpr.shadow import Shadow
from precaudit.interpreters.jaxpr.wide import up
from precaudit.numbers.arrays import Array
from precaudit.schema.digits import digits

WHOLE = {"shard_map"} | set(LOOPS)  # what is computed inside is not changed
SITES = 96  # values that are changed, one after the other
FACTOR = "factor"
ROWS = ("only the first", "only the last", "all but the first", "all but the last")
SHIFTS = tuple((way, fill) for way in (1, -1) for fill in ("wrap", "edge", "zero"))
KINDS = (FACTOR, *ROWS, *SHIFTS)


@dataclass(frozen=True)
class Site:
    """A value of a formula that can be changed: the line it is computed at, or read at by a scan, and its rows."""

    line: str
    rows: int
    read: bool = False


@dataclass(frozen=True)
class Change:
    """What is changed at which value (``index``), by one of ``KINDS``; ``factor`` of the first kind alone."""

    index: int
    site: Site
    kind: Any
    factor: float = 1.0

    @property
    def words(self) -> str:
        """What the formula has in place of the value."""
        at = self.site.line or "a line that JAX did not keep"
        if self.kind == FACTOR:
            if not self.factor:
                return f"the term at {at} is omitted"
            return f"the term at {at} is multiplied by {digits(self.factor, 6)}"
        if self.kind in ROWS:
            return f"of the {self.site.rows:,} rows at {at} {self.kind} {'is' if 'only' in self.kind else 'are'} used"
        way, fill = self.kind
        rows = "the row before" if way > 0 else "the row after"
        return f"the scan at {at} reads {rows} in place of each row ({fill} at the border)"


class Changes:
    """One jaxpr in FP64 with any one change; compiled once."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self._sites: list[Site] = []

    @cached_property
    def _compiled(self) -> Any:
        def run(index: Any, kind: Any, factor: Any, given: Any) -> list[Any]:
            one = _Changing(index, kind, factor)
            out = [up(x) for x in one.run(self.jaxpr.jaxpr, self.jaxpr.consts, given)]
            self._sites[:] = one.sites
            return out

        return jax.jit(run, compiler_options=least_effort())

    def run(self, change: Change | None, leaves: Sequence[Any]) -> list[Array]:
        """Return the leaves in FP64 with one change; as they are without. Raises CannotLift."""
        c = change or Change(-1, Site("", 0), FACTOR)
        with jax.enable_x64(True):
            found = self._compiled(np.int32(c.index), np.int32(KINDS.index(c.kind)), np.float64(c.factor), list(leaves))
            return [np.asarray(x) for x in found]

    def every(self, leaves: Sequence[Any]) -> list[Change]:
        """Return each change that there is, a factor as one of 0."""
        if not self._sites:
            self.run(None, leaves)
        found = []
        for i, site in enumerate(self._sites):
            if site.read:
                found += [Change(i, site, kind) for kind in SHIFTS if site.rows > 1]
            else:
                found.append(Change(i, site, FACTOR, 0.0))
                found += [Change(i, site, kind) for kind in ROWS if site.rows > 2]
        return found


class _Changing(Shadow):
    """Evaluates in FP64, with one value changed: of number ``index`` in the order in which values are computed."""

    def __init__(self, index: Any, kind: Any, factor: Any) -> None:
        super().__init__({})
        self.index, self.kind, self.factor = index, kind, factor
        self.sites: list[Site] = []
        self.inside = 0

    def equation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation; what a loop reads by rows and what it gives may be changed, and nothing inside."""
        whole = equation.primitive.name in WHOLE
        if whole and not self.inside and equation.primitive.name == "scan":
            first = sum(scan_counts(equation.params))
            inputs = [*inputs[:first], *(self.shift(equation, x) for x in inputs[first:])]
        self.inside += whole
        out = super().equation(equation, inputs)
        self.inside -= whole
        return [self.change(equation, x) for x in out] if whole else out

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation and change what it gives."""
        return [self.change(equation, x) for x in super().operation(equation, inputs)]

    def _site(self, equation: jex.JaxprEqn, x: Any, read: bool) -> int | None:
        if self.inside or len(self.sites) >= SITES or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return None
        self.sites.append(Site(source(equation), np.shape(x)[0] if np.ndim(x) else 0, read))
        return len(self.sites) - 1

    def change(self, equation: jex.JaxprEqn, x: Any) -> Any:
        """Return a value scaled, or without some of its rows, where it is the one to change."""
        if (number := self._site(equation, x, False)) is None:
            return x
        n = np.shape(x)[0] if np.ndim(x) else 1
        row = jnp.arange(n)
        kept = jnp.stack([row == 0, row == n - 1, row != 0, row != n - 1])
        by_row = kept[jnp.clip(self.kind - 1, 0, len(ROWS) - 1)].astype(jnp.float64)
        factor = jnp.where(self.kind == 0, self.factor, by_row)
        factor = factor.reshape((n,) + (1,) * (np.ndim(x) - 1)) if np.ndim(x) else factor[0]
        return jnp.where(self.index == number, jnp.where(factor == 0, 0.0, x * factor), x)

    def shift(self, equation: jex.JaxprEqn, x: Any) -> Any:
        """Return what a scan reads by rows, one row further where it is the one to change."""
        if np.shape(x)[0] < 2 or (number := self._site(equation, x, True)) is None:
            return x
        first = KINDS.index(SHIFTS[0])
        made = [_shift_rows(jnp.asarray(x), way, fill) for way, fill in SHIFTS]
        kind = jnp.clip(self.kind - first, 0, len(SHIFTS) - 1)
        return jnp.where(self.index == number, jnp.stack(made)[kind], x)


def _shift_rows(x: jax.Array, way: int, fill: str) -> jax.Array:
    moved = jnp.roll(x, way, 0)
    if fill == "wrap":
        return moved
    edge = 0 if way > 0 else -1
    return moved.at[edge].set(x[edge] if fill == "edge" else jnp.zeros_like(x[edge]))

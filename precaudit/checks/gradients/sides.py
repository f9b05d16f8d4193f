"""Both sides of a gradcheck: traced, compiled for each shape, run and judged on one case after another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.checks.gradients.case import (
    KERNEL,
    REFERENCE,
    STRICT,
    ArrayFinding,
    GradientCase,
    about,
    mark_unjudged,
    mark_unknown,
)
from precaudit.checks.gradients.differences import gradient_disagreements
from precaudit.checks.gradients.formula import Formula, as_float32, differentiate, leaf_names
from precaudit.checks.gradients.infinities import range_lost
from precaudit.checks.gradients.lines import short_line
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.kernel_lines import runs_interpreted
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.interpreters.jaxpr.strict import STRICTLY, left_out
from precaudit.numbers.arrays import Array

INTERPRETED = "Pallas kernels run in interpret mode here: their float32 products are a CPU's, not a TPU's passes"


class NotApplicable(Exception):
    """A case that was made from others and that says nothing of the two sides."""


class Sides:
    """A kernel and its reference, and what was compiled of them."""

    def __init__(
        self,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        exact: Callable[..., Any] | None,
        argnums: Sequence[int] | None,
    ) -> None:
        self.sides = {KERNEL: kernel, REFERENCE: reference}
        self.exact = exact
        self.argnums = argnums
        self.notes: dict[str, None] = {}
        self.asked = False  # finite differences, on the first inputs
        self.strict: set[str] = set()  # cases that give other bits without excess precision
        self.left_out: dict[str, None] = {}  # lines of roundings that are not made
        self.compiled: dict[Any, Any] = {}

    def all_notes(self) -> Iterator[str]:
        """Yield what is to be known of every case."""
        if self.argnums is not None and not self.argnums:
            yield "outputs alone: no gradient was asked for"
        if any(runs_interpreted(x.jaxpr.jaxpr) for (_, *which), x in self.compiled.items() if which == [KERNEL]):
            yield INTERPRETED
        if self.strict:
            at = f" at {', '.join(map(short_line, self.left_out))}" if self.left_out else ""
            yield (
                f"roundings that the kernel declares{at} are skipped here: with xla_allow_excess_precision=False "
                f"it gives other bits, judged as {STRICT}, in {', '.join(sorted(self.strict))}"
            )
        yield from self.notes

    def case(self, case: str, inputs: tuple[Any, ...]) -> tuple[GradientCase, list[ArrayFinding]]:
        """Return every array of both sides."""
        places = self._places(inputs)
        _refuse_empty("an input", [inputs[i] for i in places], " " in case)
        shapes = {side: self._shape(side, f, inputs, " " in case) for side, f in self.sides.items()}
        _refuse_empty("an output", shapes, " " in case)
        _same(shapes[KERNEL], shapes[REFERENCE])
        cotangents = _cotangents(shapes[KERNEL], shapes[REFERENCE])
        both = {side: differentiate(f, places) for side, f in self.sides.items()}
        lined = {side: differentiate(f, places, own_lines=True) for side, f in self.sides.items()}
        straight, held = jax.tree.map(as_float32, (cotangents, tuple(inputs)))
        key = tuple((np.shape(x), str(jnp.asarray(x).dtype)) for x in jax.tree.leaves(inputs))
        oracle = lined[REFERENCE] if self.exact is None else differentiate(self.exact, places)
        formula = self._formula(key, "exact", oracle, straight, held)
        rounded = self._formula(key, "single", lined[REFERENCE], straight, held)
        try:
            exact = formula.exact(straight, held)
            called = leaf_names(self.sides[REFERENCE], shapes[REFERENCE], inputs, places)
            if " " not in case and not self.asked:
                self.asked = True
                for told in gradient_disagreements(formula, straight, held, places, called, exact):
                    self.notes[f"{told}: a stop_gradient, or a derivative rule of its own?"] = None
        except CannotLift as error:
            raise UserError(f"the reference: {error}, or the formula in FP64 as exact") from None
        lost = [] if self.exact is not None else rounded.constants()
        for constant in lost:
            self.notes[f"the reference holds {constant}: if that was rounded, FP64 is too; give it as an input"] = None
        draws = rounded.draws(straight, held, jax.default_backend())
        if self.exact is not None:  # draws are off their own formula, whatever that is
            own = rounded.exact(straight, held)
            draws = [about(exact, d, own) for d in draws]
        runs = {side: self._run(key, side, f, cotangents, inputs) for side, f in both.items()}
        formulas = {side: self._formula(key, side, f, cotangents, inputs) for side, f in lined.items()}
        if formulas[KERNEL].narrow():
            strict = self._run(key, STRICT, both[KERNEL], cotangents, inputs)
            if any(a.tobytes() != b.tobytes() for a, b in zip(strict, runs[KERNEL], strict=True)):
                runs[STRICT], formulas[STRICT] = strict, formulas[KERNEL].strictly
                self._differs(key, case, formulas[KERNEL], formulas[KERNEL].leaves(cotangents, inputs))
        outputs = len(jax.tree.leaves(shapes[REFERENCE]))
        c = GradientCase(case, inputs, cotangents, called, outputs, formula, exact, runs, formulas, draws)
        found = []
        for i in range(len(c.names)):
            each = _judge(c, i, KERNEL, bool(lost))
            found += list(each.values())
            if STRICT in runs:
                found.append(_judge(c, i, STRICT, bool(lost))[STRICT])
        again = self._run(key, KERNEL, both[KERNEL], cotangents, inputs)
        return c, [*found, *c.differing(again)]

    def _differs(self, key: object, case: str, own: Formula, leaves: Sequence[Any]) -> None:
        """Note a case in which roundings are left out; of plain ones, once for their shapes, at which lines."""
        self.strict.add(case)
        if " " not in case and (key, "left out") not in self.compiled:
            found = self.compiled[key, "left out"] = left_out(own.jaxpr, leaves, own.narrow())
            self.left_out |= dict.fromkeys(found)

    def _places(self, inputs: tuple[Any, ...]) -> tuple[int, ...]:
        floats = [
            i
            for i, x in enumerate(inputs)
            if all(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating) for leaf in jax.tree.leaves(x))
        ]
        if self.argnums is None:
            if not floats:
                raise UserError("no input holds floats: there is nothing to differentiate")
            return tuple(floats)
        for i in self.argnums:
            if not 0 <= i < len(inputs):
                raise UserError(f"argnums names input {i} of {len(inputs)}")
            if i not in floats:
                raise UserError(f"input {i} holds integers: it has no gradient; leave it out of argnums")
        return tuple(self.argnums)

    def _shape(self, side: str, function: Callable[..., Any], inputs: tuple[Any, ...], made: bool) -> Any:
        try:
            out = jax.eval_shape(function, *inputs)
        except Exception as error:
            if made:
                raise NotApplicable(f"the {side} does not take it") from None
            first = (str(error).strip().splitlines() or [""])[0]
            raise UserError(f"the {side} cannot be traced on these inputs: {type(error).__name__}: {first}") from None
        for leaf in jax.tree.leaves(out):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise UserError(f"the {side} returns {leaf.dtype}{list(leaf.shape)}: no gradient; return floats alone")
        if not jax.tree.leaves(out):
            raise UserError(f"the {side} returns no array")
        return out

    def _formula(self, key: Any, which: str, both: Any, cotangents: jax.Array, inputs: Any) -> Formula:
        if (key, which) not in self.compiled:
            self.compiled[key, which] = Formula.of(both, cotangents, inputs)
        found: Formula = self.compiled[key, which]
        return found

    def _run(self, key: Any, side: str, both: Any, cotangents: jax.Array, inputs: Any) -> list[Array]:
        if (key, "run", side) not in self.compiled:
            self.compiled[key, "run", side] = jax.jit(both, compiler_options=STRICTLY if side == STRICT else None)
        try:
            return [np.asarray(x) for x in jax.tree.leaves(self.compiled[key, "run", side](cotangents, *inputs))]
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            how = "differentiated" if self.argnums is None or self.argnums else "run"
            raise UserError(f"the {side} cannot be {how}: {type(error).__name__}: {first}") from None


def _judge(c: GradientCase, i: int, side: str, lost: bool) -> dict[str, ArrayFinding]:
    """Return what is found of one array of the kernel, as either side runs it, and of the reference beside it."""
    sides = (side, REFERENCE)
    each = {s: c.judge(s, i, c.draws) for s in sides}
    if all(f.record.nonfinite or range_lost(c, f) for f in each.values()):
        at = range_lost(c, each[REFERENCE])
        text = f"float32 leaves its range on both sides{f' ({at[1]} at {short_line(at[0])})' if at else ''}"
        why = {"skipped" if " " in c.name else "unknown": text}
        return {s: mark_unjudged(f, **why) for s, f in each.items()}
    if lost:
        return {s: mark_unknown(f) for s, f in each.items()}
    if each[side].verdict.status == "fail" and c.own[REFERENCE].narrow():
        looser = {s: replace(c.judge(s, i, c.wider(side)), declared=True) for s in sides}
        if all(f.verdict.status == "pass" for f in looser.values()):
            return looser
    return each


def _refuse_empty(what: str, tree: Any, made: bool) -> None:
    """Raise UserError where an input or output has no element; NotApplicable where the input was ``made`` here."""
    for leaf in jax.tree.leaves(tree):
        if not np.size(leaf):
            found = f"{what}, {jnp.result_type(leaf)}{list(np.shape(leaf))}, has no element"
            raise NotApplicable(found) if made else UserError(f"{found}: there is nothing to compare")


def _cotangents(kernel: Any, reference: Any) -> Any:
    """Return what is pulled back: 1 for a scalar, else normal, in the narrower of both outputs' formats."""
    random = np.random.default_rng(20020801)

    def one(a: Any, b: Any) -> Any:
        dtype = min((a.dtype, b.dtype), key=lambda d: jnp.finfo(d).nmant)
        x = random.standard_normal(a.shape) if a.shape else np.ones(())
        return jnp.asarray(x, jnp.float32).astype(dtype)

    return jax.tree.map(one, kernel, reference)


def _same(kernel: Any, reference: Any) -> None:
    """Raise UserError unless two outputs have one structure and the same shapes."""
    told = [", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(out)) for out in (kernel, reference)]
    if jax.tree.structure(kernel) != jax.tree.structure(reference) or [x.shape for x in jax.tree.leaves(kernel)] != [
        x.shape for x in jax.tree.leaves(reference)
    ]:
        raise UserError(f"the kernel returns {told[0]}, the reference {told[1]}: they have to be of one structure")

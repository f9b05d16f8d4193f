"""The interpreter of a program's own roundings: its planted shadow with every result rounded as a realisation says."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from precaudit.interpreters.jaxpr.algebra import Algebra
from precaudit.interpreters.jaxpr.excess import EXCESS, Excess
from precaudit.interpreters.jaxpr.expanded import EXPANDED, complex_product
from precaudit.interpreters.jaxpr.inaccuracy import INACCURATE, ULPS, inaccurate, mixed_bits, unit_interval
from precaudit.interpreters.jaxpr.jax_versions import count_readers
from precaudit.interpreters.jaxpr.multiplying import (
    MADE_OF,
    MOST,
    ROUNDED_TERMS,
    TF32,
    few_terms,
    in_own_format,
    is_compilers_choice,
    near_tie,
    of_rounded_terms,
    on_gpu,
    operand_parts,
    product_passes,
    reads_one_rounded,
    round_to_tf32,
    term_after_term,
    to_even,
)
from precaudit.interpreters.jaxpr.on_devices import sum_in_parts
from precaudit.interpreters.jaxpr.plant import Planted
from precaudit.interpreters.jaxpr.products import GROUPED, PRODUCTS, label_of
from precaudit.interpreters.jaxpr.realisations import SHARED, Realisation
from precaudit.interpreters.jaxpr.rounding import (
    EXACT,
    TO_BFLOAT16,
    UNMOVED,
    each_part,
    holds,
    reduce_on_moved_grid,
    round_on_moved_grid,
    round_once,
)
from precaudit.interpreters.jaxpr.rules import solve_alone
from precaudit.interpreters.jaxpr.shadow import SLICES, Lift, Shadow
from precaudit.interpreters.jaxpr.sites import STATE
from precaudit.interpreters.jaxpr.subnormals import KEEPS, flush_operands, flush_subnormals
from precaudit.interpreters.jaxpr.sums import (
    Ordered,
    float_bits,
    monoid,
    narrow_sum,
    order_of_terms,
    own,
    sum_in_single,
    sums_in_single,
)
from precaudit.interpreters.jaxpr.wide import up
from precaudit.schema.records.devices import SplitSum

TIE = 2 * int(ULPS)  # ulps of float32 that two makings of one value may be apart
TWO = "two of each"


class Emulator(Planted):
    """Evaluates a planted shadow with rounded results."""

    def __init__(
        self, lift: Mapping[str, Lift], names: Collection[str], how: Realisation, seed: jax.Array | None = None
    ) -> None:
        super().__init__(lift, "read", names)
        self.how, self.count = how, 0
        self.seed = how.seed if seed is None else seed
        self.drawn = seed is not None or how.seed > 0
        self.before: dict[Any, Any] = {}  # narrow variables as they were before they were rounded
        self.held: dict[int, tuple[Any, Any]] = {}  # values, by their ids, and a format that has all of theirs
        self.own: list[bool] = []  # of an equation's inputs, whether each is its format's own
        self.readers: Counter[Any] = Counter()
        self.summed = False  # whether the last operation was a sum made in its own format
        self.turns: Counter[Any] = Counter()  # how many equations have read a variable
        self.algebra = Algebra(how.unit)
        self.excess: Excess = EXCESS[how.unrounded] if how.chosen is None else how.chosen

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate an open jaxpr."""
        self.entering(jaxpr)
        return super().run(jaxpr, consts, args)

    def entering(self, jaxpr: jex.Jaxpr) -> None:
        """Note by how many equations each variable is read; nothing is known of those that it makes."""
        self.readers |= count_readers(jaxpr)
        self.algebra.entering(jaxpr)
        for v in (v for e in jaxpr.eqns for v in e.outvars):
            self.before.pop(v, None)

    def equation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation; a conversion to a wider format reads what was not rounded, where such pairs go."""
        name = equation.primitive.name
        self.own = [self.holds(v, x) for v, x in zip(equation.invars, inputs, strict=True)]
        if self.how.apart:
            self.turns.update(dict.fromkeys((v for v in equation.invars if not hasattr(v, "val")), 1))
            inputs = [self.of_two(v, x) for v, x in zip(equation.invars, inputs, strict=True)]
        inputs = [self.read(equation, i, x) for i, x in enumerate(inputs)]
        if self.how.contracted:
            inputs = self.algebra.contracted(equation, inputs, self.before, lambda v: self.readers[v] == 1)
        cut_out = name in SLICES and self.own[0]
        out = super().equation(equation, inputs)
        self.hand_on(equation, inputs)
        if cut_out:
            self.keep(out[0], equation.outvars[0].aval.dtype)
        if self.excess.rounds(equation):
            self.before.pop(equation.outvars[0], None)
        return out

    def hand_on(self, equation: jex.JaxprEqn, inputs: Sequence[Any]) -> None:
        """Note an equation's results as they are of what was not rounded yet, where this realisation has it go on."""
        known = [None if hasattr(v, "val") else self.before.get(v) for v in equation.invars]
        if self.excess.hands_on(equation) and any(x is not None for x in known):
            of = [up(x) if before is None else before for x, before in zip(inputs, known, strict=True)]
            self.before |= zip(equation.outvars, super().operation(equation, of), strict=True)

    def read(self, equation: jex.JaxprEqn, i: int, x: Any) -> Any:
        """Return an operand as its equation reads it: unrounded where this realisation says so."""
        v = equation.invars[i]
        freely = not hasattr(v, "val") and v in self.before and self.excess.reads(equation, i)
        if freely is False:
            return x
        self.own[i] = False
        return self.before[v] if freely is True else jnp.where(freely, self.before[v], x)

    def hand_over(self, given: Sequence[Any], taken: Sequence[jex.Var]) -> None:
        """Hand on what was not rounded: compilers put a call's body in its place."""
        self.algebra.hand_over(given, taken)
        known = [None if hasattr(v, "val") else self.before.get(v) for v in given]
        for v, x in zip(taken, known, strict=True):
            self.before.pop(v, None)
            self.before |= {} if x is None else {v: x}

    def keep(self, x: jax.Array, dtype: DTypeLike) -> None:
        """Note that a format has all of a value's elements."""
        if id(x) not in self.held or holds(self.held[id(x)][1], dtype):
            self.held[id(x)] = x, dtype

    def holds(self, variable: jex.Var | jex.Literal, x: ArrayLike) -> bool:
        """Whether a variable's format has all elements of its value; of a literal it does."""
        dtype = getattr(variable.aval, "dtype", None)
        if hasattr(variable, "val") or getattr(x, "dtype", None) == dtype:
            return True
        known = self.held.get(id(x))
        return known is not None and holds(dtype, known[1])

    def of_two(self, variable: jex.Var | jex.Literal, x: ArrayLike) -> Any:
        """Return a value for its next reader: for every second one the other of the two."""
        if (
            hasattr(variable, "val")
            or self.readers[variable] < 2
            or not jnp.issubdtype(jnp.result_type(x), jnp.floating)
        ):
            return x
        return x if self.turns[variable] % 2 == 1 else lax.ppermute(x, TWO, ((0, 1), (1, 0)))

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation and round what it gives."""
        self.count += 1
        self.algebra.note(equation, inputs, lambda x: super(Emulator, self).operation(equation, [x])[0])
        nothing = self.rounds_nothing(equation)
        name = equation.primitive.name
        flush = self.how.flush and name not in KEEPS
        if flush and name not in (*PRODUCTS, GROUPED):  # equal products of several realisations stay one
            inputs = flush_operands(equation, inputs)
        mark = mixed_bits(self.seed, self.count) if self.drawn else 0
        factor = 2.0 ** (0.5 + 0.5 * unit_interval(mark)) if self.drawn else 1.0
        dtype = getattr(equation.outvars[0].aval, "dtype", None) if equation.outvars else None
        self.summed, once = False, partial(self.store, equation.outvars[0] if equation.outvars else None, factor=factor)
        if self.how.sums in ("own", "lanes") and narrow_sum(equation):
            self.summed = True
            add_up = partial(own, equation, stored=partial(round_once, dtype=dtype), lanes=self.how.sums == "lanes")
            cut = self.split_of(equation)
            out = add_up(inputs) if cut is None else [self.in_parts(equation, inputs, cut, add_up)]
        elif name == "custom_linear_solve":
            return solve_alone(self.run, equation.params, inputs)
        elif name in ("dot_general", "reduce_sum") and (split := self.split_of(equation)) is not None:
            out = [self.in_parts(equation, inputs, split, partial(super().operation, equation))]
        elif term_after_term(equation, self.how.narrow_products, self.how.sums == "fused"):
            out = [in_own_format(equation, inputs, partial(round_once, dtype=dtype))]
        elif self.how.unit == "vector" and name == "dot_general" and few_terms(equation, inputs):
            out = [of_rounded_terms(equation, inputs, partial(round_once, dtype=dtype))]
        elif self.how.unit == "gpu" and name in (*PRODUCTS, GROUPED):
            out = [self.on_gpu(equation, inputs, factor)]
        elif (
            name in PRODUCTS
            and self.how.made is not None
            and is_compilers_choice(equation)
            and self.passes(equation) == 0
        ):
            known = reads_one_rounded(equation, inputs, self.how.made)
            out = [jnp.where(known, x, np.nan) for x in super().operation(equation, inputs)]
        elif name in PRODUCTS and (pairs := operand_parts(equation, inputs, self.passes(equation), TO_BFLOAT16)):
            out = [sum(super(Emulator, self).operation(equation, list(pair))[0] for pair in pairs)]
        elif self.how.sums in ("single", "reversed", "shuffled") and (
            sums_in_single(equation) or (dtype == np.complex64 and name in INACCURATE)
        ):
            self.summed = True
            out = sum_in_single(equation, inputs, factor if self.how.sums == "shuffled" else 1.0, self.sum_order)
        elif name == "mul" and dtype == np.complex64:
            out = [complex_product(inputs[0], inputs[1], partial(round_on_moved_grid, dtype=np.float32, factor=factor))]
        elif self.how.expanded and (made := self.algebra.made(equation, inputs, once)) is not None:
            out = [made]
        elif name in EXPANDED and self.how.expanded and 8 < float_bits(equation.outvars[0].aval.dtype) < 32:
            out = [EXPANDED[name](inputs[0], equation.params, once)]
        elif name == "reduce_precision":  # a rounding that no compiler leaves out
            kept = equation.params["exponent_bits"], equation.params["mantissa_bits"]
            out = [
                reduce_on_moved_grid(inputs[0], *kept, factor) if self.drawn else lax.reduce_precision(*inputs, *kept)
            ]
        elif name in ("reduce", "reduce_window") and not monoid(equation):  # its function may read no draws
            out = Shadow(self.lift).operation(equation, inputs)
        else:
            out = super().operation(equation, inputs)
        if self.drawn and name in INACCURATE and jnp.issubdtype(out[0].dtype, jnp.inexact):
            out = [each_part(x, partial(inaccurate, mark=mark)) for x in out]
        if flush:
            out = [
                flush_subnormals(x, getattr(v.aval, "dtype", None)) for x, v in zip(out, equation.outvars, strict=True)
            ]
        if self.drawn and name in UNMOVED:
            return out
        if not self.drawn and nothing:
            for x, v in zip(out, equation.outvars, strict=True):
                self.keep(x, v.aval.dtype)
            return out
        return [self.store(v, x, factor) for x, v in zip(out, equation.outvars, strict=True)]

    def rounds_nothing(self, equation: jex.JaxprEqn) -> bool:
        """Whether each result is an operand's value, and all operands' are their formats': rounding is left out."""
        name, known = equation.primitive.name, zip(equation.invars, self.own, strict=True)
        read = [(v, own) for v, own in known if jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)]
        if name == "convert_element_type":
            made = equation.outvars[0].aval.dtype
            wider = read != [] and all(holds(made, v.aval.dtype) and v not in self.before for v, _ in read)
        else:
            wider = name in EXACT
        return wider and all(own for _, own in read)

    def on_gpu(self, equation: jex.JaxprEqn, inputs: list[Any], factor: float) -> Any:
        """Return a product as a GPU makes it; not a number where it is not known how."""
        said = (self.how.made or {}).get(label_of(equation), self.how.otherwise)
        way, (x, y, *groups) = on_gpu(equation, said), inputs
        if way == ROUNDED_TERMS:
            return of_rounded_terms(equation, inputs, partial(round_once, dtype=equation.outvars[0].aval.dtype))
        passes, narrow = MADE_OF.get(way, (MOST, round_to_tf32))
        if narrow is round_to_tf32 and equation.primitive.name == "conv_general_dilated":
            narrow = to_even
        pairs = operand_parts(equation, (x, y), passes, narrow) or [(x, y)]
        product = sum(self.add_products(equation, [*pair, *groups], factor) for pair in pairs)
        if self.how.ties and way == TF32:
            for side in ((near_tie(x, TIE), jnp.abs(y)), (jnp.abs(x), near_tie(y, TIE))):
                product += super().operation(equation, [*side, *groups])[0]
        return product if way is not None else product * np.nan

    def add_products(self, equation: jex.JaxprEqn, inputs: list[Any], factor: float) -> Any:
        """Return a product of operands as they are multiplied, its sum as this realisation makes it on a GPU."""
        if self.how.sums in ("single", "reversed", "shuffled") and sums_in_single(equation):
            self.summed = True
            return sum_in_single(equation, inputs, factor if self.how.sums == "shuffled" else 1.0, self.sum_order)[0]
        if equation.primitive.name == GROUPED:  # JAX maps it over its groups alone
            alone = jax.custom_batching.sequential_vmap(
                lambda *x: super(Emulator, self).operation(equation, list(x))[0]
            )
            return alone(*inputs)
        return super().operation(equation, inputs)[0]

    def split_of(self, equation: jex.JaxprEqn) -> SplitSum | None:
        """Return in how many parts several devices make a product or a sum of 16 bits; None where one makes it."""
        split, narrow = self.how.split or {}, float_bits(equation.outvars[0].aval.dtype) == 16
        return split.get(label_of(equation)) if narrow else None

    def in_parts(
        self, equation: jex.JaxprEqn, inputs: Sequence[Any], split: SplitSum, make: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """Return a product or a sum as several devices make it; ``make``: of its operands, or of a part of them."""

        def rounded(x: object, n: int) -> Any:
            mark = unit_interval(mixed_bits(self.seed, self.count + ((n + 1) << 40))) if self.drawn else -1
            return round_on_moved_grid(x, equation.outvars[0].aval.dtype, 2.0 ** (0.5 + 0.5 * mark))

        return sum_in_parts(equation, inputs, split, make, rounded)

    def passes(self, equation: jex.JaxprEqn) -> int:
        """Return how many bfloat16 passes make a product; 0 where that is open."""
        return product_passes(equation, self.how.made, self.how.unit == "matrix")

    def store(self, variable: jex.Var | jex.Literal, x: jax.Array, factor: float) -> Any:
        """Return a result as its format holds it; a narrow one unrounded where all are."""
        dtype = getattr(variable.aval, "dtype", None)
        if dtype == np.complex64:
            return each_part(x, partial(round_on_moved_grid, dtype=np.float32, factor=factor))
        if dtype is None or not float_bits(dtype) or dtype == np.float64:
            return x
        if float_bits(dtype) < 32:
            freely = self.how.unrounded == "unshared" and self.readers[variable] < SHARED
            if (self.how.unrounded == "all" or freely) and float_bits(dtype) > 8:
                return x
            if self.how.unrounded == "single":
                return round_on_moved_grid(x, np.float32, factor, self.summed)
            self.before[variable] = x
        made = round_on_moved_grid(x, dtype, factor, self.summed)
        if not self.drawn:
            self.keep(made, dtype)
        return made

    @property
    def sum_order(self) -> Ordered | None:
        """What puts the terms of a sum into the order of this realisation."""
        return order_of_terms(self.how.sums, lambda n: mixed_bits(self.seed, self.count + (n << 32)))

    def enter(self, equation: jex.JaxprEqn, inputs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Give a segment's result, as its format holds it and before, and go on with what was recorded."""
        if equation.primitive.name != "name" or equation.params["name"].startswith(STATE):
            return super().enter(equation, inputs, values)
        read, dtype = equation.invars[0], equation.outvars[0].aval.dtype
        x = up(jnp.asarray(inputs[0]))
        before = x if hasattr(read, "val") else self.before.get(read, x)
        own = not float_bits(dtype) or dtype == np.float64 or (not hasattr(read, "val") and self.holds(read, inputs[0]))
        made, planted = x if own else round_once(x, dtype), up(values[0])
        if self.how.by_conversions and float_bits(dtype) == 16 and values[0].dtype == np.float64:
            self.before[equation.outvars[0]], planted = planted, round_once(planted, dtype)
        if self.here is None and values[0].dtype == dtype:
            self.keep(planted, dtype)
        return [self.chosen(planted, x)], [(made, before)]

    def none(self, value: jax.Array) -> Any:
        """Return what is told of a tap whose branch was not taken."""
        zeros = super().none(value)
        return None if zeros is None else (zeros, zeros)

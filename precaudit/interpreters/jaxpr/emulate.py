"""A program's own roundings emulated: its FP64 shadow with every result rounded to the format its equation declares.

Between taps, whose recorded values are planted, this makes each segment of a program again from what it read: strictly,
with the narrow roundings inside left out as a compiler may, or as other honest realisations of the same program.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.jaxpr.jax_versions import closed, equations
from precaudit.interpreters.jaxpr.multiplying import (
    MATRIX,
    MOST,
    ONE_NARROW,
    PASSES,
    ROUNDED_TERMS,
    TF32,
    chosen,
    declared,
    in_own_format,
    narrow_product,
    near_tie,
    of_rounded_terms,
    on_gpu,
    parts,
    tf32,
    to_even,
)
from precaudit.interpreters.jaxpr.plant import Planted, Values, Wanted, fitting, planting
from precaudit.interpreters.jaxpr.products import GROUPED, PRODUCTS, label_of
from precaudit.interpreters.jaxpr.shadow import SLICES, Lift, Shadow
from precaudit.interpreters.jaxpr.sites import STATE, numbered, sites
from precaudit.interpreters.jaxpr.subnormals import KEEPS, flushed, read
from precaudit.interpreters.jaxpr.sums import float_bits, in_single, monoid, narrow_sum, own, summed
from precaudit.interpreters.jaxpr.wide import up
from precaudit.schema.records import Way

ULPS = 4.0  # of a device's exp, tanh, 1/x and 1/√x in float32, as the limits are made for (numpy_decoder/ensemble.py)
INACCURATE = {
    "cbrt", "cos", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt",
    "sin", "sqrt", "tan", "tanh",
}  # fmt: skip
SHARED = 3  # equations that read a value: a norm reads its input twice, the next sum of the stream once more
TIE = 2 * int(ULPS)  # ulps of float32 that two makings of one value may be apart
TWO = "two of each"
Unrounded = Literal["none", "converted", "unshared", "all", "single"]
MOST_TERMS = 1 << 24  # of a product that a TPU's vector unit may make
# A result is an operand's value: in a format that holds the operand nothing is rounded.
EXACT = {
    "abs", "argsort", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p", "cummax", "cummin", "device_put",
    "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "max", "min", "name", "neg",
    "optimization_barrier", "pad", "real", "reduce_max", "reduce_min", "reshape", "rev", "scatter", "select_n",
    "sharding_constraint", "slice", "sort", "split", "squeeze", "stop_gradient", "tile", "top_k", "transpose",
    "unstack",
}  # fmt: skip
# On a grid of its own a maximum would equal neither of what it is of, and a whole number would be none.
UNMOVED = EXACT | {
    "ceil", "complex", "conj", "floor", "imag", "reduce_window_max", "reduce_window_min", "round", "scatter-max",
    "scatter-min", "sign",
}  # fmt: skip


@dataclass(frozen=True)
class Realisation:
    """One honest way to make a program's numbers.

    ``unrounded``: which narrow results inside segments are not rounded: none, those that the program converts to a
    wider format (a compiler removes such pairs), those that fewer than SHARED equations read (what more read, such as
    a residual stream, a compiler stores), or all, always but for formats of 8 bits, which are meant; "single": all are
    rounded to float32 instead, as the same program would that declares no narrower format. ``expanded``: logistic,
    cubes and 1 − x² of narrow formats, and quotients by what is smaller, are made of simpler operations, each rounded,
    as XLA makes them. ``seed``: 0 rounds to nearest, others round on grids moved by a factor of each equation, with
    inaccurate functions. ``sums``: exact; those of narrow formats rounded to their own after every term (what XLA:CPU
    makes of a ``reduce_sum`` in bfloat16, such as
    the gradient of a broadcast); in float32; or so from the last term to the first, or in an order and on a grid of
    each seed's. ``unit``: what makes products of floats no wider than float32. The matrix unit of a TPU makes them of
    operands in one, two or three bfloat16 parts, by the precision that their equation declares; its vector unit
    multiplies and adds, every term in the format of the result. ``made``: how the compiled program makes each product
    of float32 operands below the highest precision, by its label (``transforms.products``); what it does not say is not
    a number. A GPU ("gpu") makes products as ``made`` says, and those that it does not name as ``otherwise``; of what
    that leaves open it makes no number. ``ties``: to each product is added what its operands make of it where those
    near a tie are rounded the other way, all of it of one sign. ``apart``: values are two of each, stacked, as a
    compiler has them that makes again in each fusion what several read: of two equations that read a result the second
    reads the other. ``flush``: the device makes 0 of subnormals (``transforms.subnormals``).
    ``narrow_products``: sums of products of narrow operands and results are rounded to their own format after every
    term, which no program asks for.
    """

    unrounded: Unrounded = "none"
    expanded: bool = True
    seed: int = 0
    sums: Literal["exact", "own", "single", "reversed", "shuffled"] = "exact"
    unit: Literal["any", "matrix", "vector", "gpu"] = "any"
    made: Mapping[str, Way] | None = None
    otherwise: Way | None = None
    ties: bool = False
    apart: bool = False
    flush: bool = False
    narrow_products: bool = False


def emulated(
    function: Callable[..., Any], how: Realisation, lift: Mapping[str, Lift] | None = None,
    steps: Sequence[int] | None = None, wanted: Wanted | None = None, seed: Any = None,
) -> Callable[..., dict[str, tuple[Any, Any]]]:  # fmt: skip
    """Return ``g(values, *args) → {tap: (rounded, unrounded)}``, what its segment makes of the taps before it.

    ``values`` as ``plant`` takes them; every tap given is planted, so that each segment reads recorded inputs. Both are
    FP64 in the shape of values, as the tap's own format holds it and as it was before that: a compiler may hand a
    reader the latter. ``steps``: those of outermost scans that have values (None: all). ``wanted``: a tap, and at
    which steps it is asked for; in others only what leads there is made. ``seed``: instead of the realisation's own; a
    tracer may be one. Of values that are two of each both are as the format holds them: of the first, and of the
    second. Under ``jax.enable_x64(True)``. Raises as ``plant`` does.
    """

    def interpreter(names: Collection[str]) -> Planted:
        run = Emulated(dict(lift or {}), names, how, seed)
        run.wanted = wanted
        return run

    run = planting(function, interpreter, steps=steps)
    if not how.apart:
        return run

    def two(values: Values, *args: Any) -> dict[str, tuple[Any, Any]]:
        both = jax.vmap(lambda held: run(held, *args), axis_name=TWO)(values)
        return {name: (made[0], made[1]) for name, (made, _) in both.items()}

    return two


def exactly(
    function: Callable[..., Any], lift: Mapping[str, Lift] | None = None, steps: Sequence[int] | None = None
) -> Callable[..., Values]:
    """Return the same in FP64: what each segment makes of recorded inputs without any rounding."""
    return planting(function, lambda names: Planted(dict(lift or {}), "read", names), steps=steps)


def whole(jaxpr: Any, how: Realisation | None, lift: Mapping[str, Lift] | None = None) -> Callable[..., list[Any]]:
    """Return ``g(seed, *leaves) → outputs`` of a closed jaxpr: all of a program in FP64, or as its equations round.

    ``how``: None for FP64, where ``seed`` is not read; else each ``seed``, instead of its own, is another realisation
    of one compiled function. Leaves and outputs are FP64 where they are floats, whatever their declared formats, so
    that a call's outputs may be the next one's inputs. ``held``: values of taps, as ``plant`` takes them, that the
    program goes on with. Under ``jax.enable_x64(True)``.
    """

    def run(seed: Any, *leaves: Any, held: Values | None = None) -> list[Any]:
        def interpreter(names: Collection[str]) -> Planted:
            known = dict(lift or {})
            return Planted(known, "read", names) if how is None else Emulated(known, names, how, seed)

        return holding(interpreter, jaxpr, leaves, held)

    if how is None or not how.apart:
        return run

    def first(seed: Any, *leaves: Any, held: Values | None = None) -> list[Any]:
        seeds = jnp.stack([seed, seed + np.uint64(1 << 32)])
        both = jax.vmap(lambda one: run(one, *leaves, held=held), axis_name=TWO)(seeds)
        return [x[0] for x in both]

    return first


def holding(
    interpreter: Callable[[Collection[str]], Planted], jaxpr: Any, leaves: Sequence[Any], held: Values | None
) -> list[Any]:
    """Return the outputs of a closed jaxpr by the interpreter of the taps that have values, which it goes on with."""
    given = held or {}
    names = frozenset(n.partition("#")[0] for n in given)
    found = sites(jaxpr.jaxpr, names)
    values = [fitting(n, s, given.get(n)) for n, s in zip(numbered(found), found, strict=True)]
    out, _ = interpreter(names).planted(jaxpr.jaxpr, jaxpr.consts, leaves, values)
    return [up(jnp.asarray(x)) for x in out]


def rounded(x: Any, dtype: Any, factor: float = 1.0) -> Any:
    """Return FP64 ``x`` rounded once to a narrower format, ties to even, subnormals as the format has them.

    ``factor``: round(x · factor) / factor, the same rounding on another grid.
    """
    return _rounded(x, factor, dtype=dtype)


@partial(jax.jit, static_argnames="dtype", inline=True)  # traced once for all equations of a shape
def _rounded(x: Any, factor: Any, dtype: Any) -> Any:
    info = jnp.finfo(dtype)
    if info.bits < 16:  # formats without infinities: the conversion knows them
        return (x * factor).astype(dtype).astype(np.float64) / factor
    y = x * factor
    near = lax.reduce_precision(y, info.nexp, info.nmant)
    step = 2.0 ** (int(info.minexp) - info.nmant)  # the smallest subnormal; adding and taking away, XLA leaves out
    whole = lax.round(y * (1.0 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(y) < float(info.smallest_normal), whole, near) / factor


def moved(x: Any, dtype: Any, factor: float, summed: bool = False) -> Any:
    """Return FP64 ``x`` as a draw rounds it: on a grid moved by ``factor``, but left alone where the format has it.

    No rounding error is made of what a format holds: of whole numbers, powers of two, masks. ``summed``: a sum was
    made in float32, which has all such values: whole numbers alone are left.
    """
    near = rounded(x, dtype)
    if isinstance(factor, float) and factor == 1.0:
        return near
    held = near == x
    if summed:  # to 2**23 every half is a number of float32, too
        held &= (jnp.round(x) == x) & (jnp.abs(x) < 2.0**23)
    return jnp.where(held, x, rounded(x, dtype, factor))


TO_BFLOAT16 = partial(rounded, dtype=jnp.bfloat16)
# Passes, and the format of their parts.
ON_GPU: dict[Way | None, tuple[int, Callable[[Any], Any]]] = {
    "1 pass": (1, TO_BFLOAT16), "3 passes": (3, TO_BFLOAT16), "1 TF32 pass": (1, tf32), "3 TF32 passes": (3, tf32),
}  # fmt: skip


class Emulated(Planted):
    """Evaluates a planted shadow with rounded results."""

    def __init__(self, lift: Mapping[str, Lift], names: Collection[str], how: Realisation, seed: Any = None) -> None:
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
        self.spread: set[Any] = set()  # variables that repeat the elements of a smaller array

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate an open jaxpr."""
        self.entering(jaxpr)
        return super().run(jaxpr, consts, args)

    def entering(self, jaxpr: Any) -> None:
        """Note by how many equations each variable is read."""
        self.readers |= _readers(jaxpr)

    def equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation; a conversion to a wider format reads what was not rounded, where such pairs go."""
        name = equation.primitive.name
        if name == "broadcast_in_dim":
            self.spread.update(equation.outvars)
        self.own = [self.holds(v, x) for v, x in zip(equation.invars, inputs, strict=True)]
        if self.how.apart:
            known = [v for v in equation.invars if not hasattr(v, "val")]
            self.turns.update(dict.fromkeys(known, 1))
            inputs = [self.of_two(v, x) for v, x in zip(equation.invars, inputs, strict=True)]
        if self.how.unrounded == "converted" and name == "convert_element_type":
            read, made = equation.invars[0], equation.outvars[0].aval.dtype
            if not hasattr(read, "val") and read in self.before and float_bits(made) > float_bits(read.aval.dtype) > 8:
                inputs = [self.before[read]]
        cut_out = name in SLICES and self.own[0]
        out = super().equation(equation, inputs)
        if cut_out:
            self.keep(out[0], equation.outvars[0].aval.dtype)
        return out

    def keep(self, x: Any, dtype: Any) -> None:
        """Note that a format has all of a value's elements."""
        if id(x) not in self.held or holds(self.held[id(x)][1], dtype):
            self.held[id(x)] = x, dtype

    def holds(self, variable: Any, x: Any) -> bool:
        """Whether a variable's format has all elements of its value; of a literal it does."""
        dtype = getattr(variable.aval, "dtype", None)
        if hasattr(variable, "val") or getattr(x, "dtype", None) == dtype:
            return True
        known = self.held.get(id(x))
        return known is not None and holds(dtype, known[1])

    def of_two(self, variable: Any, x: Any) -> Any:
        """Return a value for its next reader: for every second one the other of the two."""
        if (
            hasattr(variable, "val")
            or self.readers[variable] < 2
            or not jnp.issubdtype(jnp.result_type(x), jnp.floating)
        ):
            return x
        return x if self.turns[variable] % 2 == 1 else lax.ppermute(x, TWO, ((0, 1), (1, 0)))

    def operation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation and round what it gives."""
        self.count += 1
        nothing = self.rounds_nothing(equation)
        name = equation.primitive.name
        flush = self.how.flush and name not in KEEPS
        if flush and name not in (*PRODUCTS, GROUPED):  # equal products of several realisations stay one
            inputs = read(equation, inputs)
        mark = _mixed(self.seed, self.count) if self.drawn else 0
        factor = 2.0 ** (0.5 + 0.5 * _unit(mark)) if self.drawn else 1.0
        dtype = getattr(equation.outvars[0].aval, "dtype", None) if equation.outvars else None
        self.summed = False
        if self.how.sums == "own" and narrow_sum(equation):
            self.summed = True
            out = own(equation, inputs, partial(rounded, dtype=dtype))
        elif name == "custom_linear_solve":  # roundings have no transpose, which its rule asks for
            return self.solved(equation.params, inputs)
        elif self.how.narrow_products and narrow_product(equation):
            out = [in_own_format(equation, inputs, partial(rounded, dtype=dtype))]
        elif self.how.unit == "vector" and name == "dot_general" and _few_terms(equation, inputs):
            out = [of_rounded_terms(equation, inputs, partial(rounded, dtype=dtype))]
        elif self.how.unit == "gpu" and name in (*PRODUCTS, GROUPED):
            out = [self.on_gpu(equation, inputs, factor)]
        elif name in PRODUCTS and self.how.made is not None and chosen(equation) and self.passes(equation) == 0:
            known = self.one_rounded(equation, inputs)
            out = [jnp.where(known, x, np.nan) for x in super().operation(equation, inputs)]
        elif name in PRODUCTS and (pairs := parts(equation, inputs, self.passes(equation), TO_BFLOAT16)):
            out = [sum(super(Emulated, self).operation(equation, list(pair))[0] for pair in pairs)]
        elif self.how.sums in ("single", "reversed", "shuffled") and (
            in_single(equation) or (dtype == np.complex64 and name in INACCURATE)
        ):
            self.summed = True
            out = summed(equation, inputs, factor if self.how.sums == "shuffled" else 1.0, self.ordered)
        elif name == "mul" and dtype == np.complex64:
            out = [_complex_product(inputs[0], inputs[1], partial(moved, dtype=np.float32, factor=factor))]
        elif name == "div" and self.how.expanded and self.inverted(equation):
            inverse = self.stored(equation.outvars[0], 1.0 / inputs[1], factor)
            out = [inputs[0] * inverse]
        elif name in EXPANDED and self.how.expanded and 8 < float_bits(equation.outvars[0].aval.dtype) < 32:
            out = [EXPANDED[name](inputs[0], equation.params, partial(self.stored, equation.outvars[0], factor=factor))]
        elif name == "reduce_precision":  # a rounding that no compiler leaves out
            kept = equation.params["exponent_bits"], equation.params["mantissa_bits"]
            near = lax.reduce_precision(inputs[0], *kept)
            other = lax.reduce_precision(inputs[0] * factor, *kept) / factor
            out = [jnp.where(near == inputs[0], near, other) if self.drawn else near]
        elif name in ("reduce", "reduce_window") and not monoid(equation):  # its function may read no draws
            out = Shadow(self.lift).operation(equation, inputs)
        else:
            out = super().operation(equation, inputs)
        if self.drawn and name in INACCURATE and jnp.issubdtype(out[0].dtype, jnp.inexact):
            out = [_of_parts(x, partial(_inaccurate, mark=mark)) for x in out]
        if flush:
            out = [flushed(x, getattr(v.aval, "dtype", None)) for x, v in zip(out, equation.outvars, strict=True)]
        if self.drawn and name in UNMOVED:
            return out
        if not self.drawn and nothing:
            for x, v in zip(out, equation.outvars, strict=True):
                self.keep(x, v.aval.dtype)
            return out
        return [self.stored(v, x, factor) for x, v in zip(out, equation.outvars, strict=True)]

    def rounds_nothing(self, equation: Any) -> bool:
        """Whether each result is an operand's value, and all operands' are their formats': rounding is left out."""
        name, known = equation.primitive.name, zip(equation.invars, self.own, strict=True)
        read = [(v, own) for v, own in known if jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)]
        if name == "convert_element_type":
            made = equation.outvars[0].aval.dtype
            wider = read != [] and all(holds(made, v.aval.dtype) and v not in self.before for v, _ in read)
        else:
            wider = name in EXACT
        return wider and all(own for _, own in read)

    def on_gpu(self, equation: Any, inputs: list[Any], factor: float) -> Any:
        """Return a product as a GPU makes it; not a number where it is not known how."""
        said = (self.how.made or {}).get(label_of(equation), self.how.otherwise)
        way, (x, y, *groups) = on_gpu(equation, said), inputs
        if way == ROUNDED_TERMS:
            return of_rounded_terms(equation, inputs, partial(rounded, dtype=equation.outvars[0].aval.dtype))
        passes, narrow = ON_GPU.get(way, (MOST, tf32))
        if narrow is tf32 and equation.primitive.name == "conv_general_dilated":
            narrow = to_even
        pairs = parts(equation, (x, y), passes, narrow) or [(x, y)]
        product = sum(self.added(equation, [*pair, *groups], factor) for pair in pairs)
        if self.how.ties and way == TF32:
            for side in ((near_tie(x, TIE), jnp.abs(y)), (jnp.abs(x), near_tie(y, TIE))):
                product += super().operation(equation, [*side, *groups])[0]
        return product if way is not None else product * np.nan

    def added(self, equation: Any, inputs: list[Any], factor: float) -> Any:
        """Return a product of operands as they are multiplied, its sum as this realisation makes it on a GPU."""
        if self.how.sums in ("single", "reversed", "shuffled") and in_single(equation):
            self.summed = True
            return summed(equation, inputs, factor if self.how.sums == "shuffled" else 1.0, self.ordered)[0]
        if equation.primitive.name == GROUPED:  # JAX maps it over its groups alone
            alone = jax.custom_batching.sequential_vmap(
                lambda *x: super(Emulated, self).operation(equation, list(x))[0]
            )
            return alone(*inputs)
        return super().operation(equation, inputs)[0]

    def passes(self, equation: Any) -> int:
        """Return how many bfloat16 passes make a product: 1, 3, or 6 for as good as float32; 0 where that is open.

        As many as its equation declares at least: a program that makes fewer is not excused by being compiled so.
        """
        if self.how.made is None:
            return declared(equation) if self.how.unit == "matrix" else MOST
        way = self.how.made.get(label_of(equation))
        if not chosen(equation):  # the matrix unit reads an operand that is narrow as it is held, rounded
            return 1 if way in MATRIX and all(x.aval.dtype == jnp.bfloat16 for x in equation.invars) else MOST
        return 0 if way not in PASSES else max(PASSES[way], declared(equation))

    def one_rounded(self, equation: Any, inputs: Sequence[Any]) -> Any:
        """Whether a float32 product of which the compiler holds one operand in bfloat16 reads one that is so anyhow."""
        if self.how.made is None or self.how.made.get(label_of(equation)) != ONE_NARROW:
            return False
        return jnp.any(jnp.stack([jnp.all(x == rounded(x, jnp.bfloat16)) for x in inputs]))

    def stored(self, variable: Any, x: Any, factor: float) -> Any:
        """Return a result as its format holds it; a narrow one unrounded where all are."""
        dtype = getattr(variable.aval, "dtype", None)
        if dtype == np.complex64:
            return _of_parts(x, partial(moved, dtype=np.float32, factor=factor))
        if dtype is None or not float_bits(dtype) or dtype == np.float64:
            return x
        if float_bits(dtype) < 32:
            freely = self.how.unrounded == "unshared" and self.readers[variable] < SHARED
            if (self.how.unrounded == "all" or freely) and float_bits(dtype) > 8:
                return x
            if self.how.unrounded == "single":
                return moved(x, np.float32, factor, self.summed)
            self.before[variable] = x
        made = moved(x, dtype, factor, self.summed)
        if not self.drawn:
            self.keep(made, dtype)
        return made

    def inverted(self, equation: Any) -> bool:
        """Whether XLA multiplies by an inverse, rounded: of what is smaller than the quotient; of bfloat16 on a GPU."""
        out, divisor = equation.outvars[0].aval, equation.invars[1]
        if out.dtype not in (np.float16, np.float32) and not (out.dtype == jnp.bfloat16 and self.how.unit == "gpu"):
            return False
        return hasattr(divisor, "val") or divisor.aval.size < out.size or divisor in self.spread

    @property
    def ordered(self) -> Callable[..., Any] | None:
        """What puts the terms of a sum, by an axis and which of the sum's it is, into the order of this realisation."""
        return {"reversed": _reversed, "shuffled": self.shuffled}.get(self.how.sums)

    def shuffled(self, x: Any, axis: int, n: int) -> Any:
        """Return an array with an axis in an order of this seed's, this equation's, and that axis'."""
        marks = _mixed(jnp.arange(x.shape[axis], dtype=np.uint64), _mixed(self.seed, self.count + (n << 32)))
        return jnp.take(x, jnp.argsort(marks), axis=axis)

    def solved(self, params: Any, inputs: Sequence[Any]) -> list[Any]:
        """Return what the solver of a ``custom_linear_solve`` makes, as its own equations round."""
        skipped = sum(params["const_lengths"][:2])  # of the operator, and of its transpose
        count = params["const_lengths"].solve
        own, rest = inputs[skipped : skipped + count], inputs[sum(params["const_lengths"]) :]
        return self.run(*closed(params["jaxprs"].solve), [*own, *rest])

    def enter(self, equation: Any, inputs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Give a segment's result, as its format holds it and before, and go on with what was recorded."""
        if equation.primitive.name != "name" or equation.params["name"].startswith(STATE):
            return super().enter(equation, inputs, values)
        read, dtype = equation.invars[0], equation.outvars[0].aval.dtype
        x = up(jnp.asarray(inputs[0]))
        before = x if hasattr(read, "val") else self.before.get(read, x)
        own = not float_bits(dtype) or dtype == np.float64 or (not hasattr(read, "val") and self.holds(read, inputs[0]))
        made, planted = x if own else rounded(x, dtype), up(values[0])
        if self.here is None and values[0].dtype == dtype:
            self.keep(planted, dtype)
        return [self.chosen(planted, x)], [(made, before)]

    def none(self, value: Any) -> Any:
        """Return what is told of a tap whose branch was not taken."""
        zeros = super().none(value)
        return None if zeros is None else (zeros, zeros)


def _readers(jaxpr: Any) -> Counter[Any]:
    """Return by how many equations each variable of an open jaxpr is read."""
    return Counter(v for e in jaxpr.eqns for v in {v for v in e.invars if not hasattr(v, "val")})


def elidable(jaxpr: Any) -> bool:
    """Whether a jaxpr, or a body in it, converts 16-bit floats to a wider format: a compiler may not have rounded."""
    casts = (e for e in equations(jaxpr) if e.primitive.name == "convert_element_type")
    return any(float_bits(e.outvars[0].aval.dtype) > float_bits(e.invars[0].aval.dtype) == 16 for e in casts)


def holds(wide: Any, narrow: Any) -> bool:
    """Whether a float format has every value of another."""
    if not (float_bits(wide) and float_bits(narrow)):
        return False
    w, n = jnp.finfo(wide), jnp.finfo(narrow)
    smallest = [int(f.minexp) - f.nmant for f in (w, n)]
    return w.nmant >= n.nmant and w.maxexp >= n.maxexp and smallest[0] <= smallest[1]


def _few_terms(equation: Any, inputs: Sequence[Any]) -> bool:
    """Whether a TPU's vector unit may make a product: of a narrow result, and of not too many terms."""
    contracted, _ = equation.params["dimension_numbers"]
    k = prod(inputs[0].shape[i] for i in contracted[0])
    out = equation.outvars[0].aval
    return float_bits(out.dtype) == 16 and k * out.size <= MOST_TERMS


def _mixed(x: Any, mark: Any) -> Any:
    """Return 64 bits that look random and are the same for the same two, as a function's errors are for its value.

    Multiply, shift, exclusive or: the finaliser of splitmix64 (Steele, Lea & Flood 2014, fig. 7).
    """
    like = jnp if isinstance(x, jax.Array) or isinstance(mark, jax.Array) else np
    with np.errstate(over="ignore"):
        bits = like.asarray(x, np.uint64) + like.asarray(mark, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        return bits ^ (bits >> np.uint64(31))


def _unit(bits: Any) -> Any:
    """Return numbers in [−1, 1) made of 64 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def _reversed(x: Any, axis: int, n: int) -> Any:  # noqa: ARG001 - given by name, as to ``shuffled``
    return lax.rev(x, (axis,))


def _of_parts(x: Any, function: Callable[[Any], Any]) -> Any:
    """Return a function of FP64 values, or of each part of complex ones."""
    return lax.complex(function(x.real), function(x.imag)) if jnp.iscomplexobj(x) else function(x)


@partial(jax.jit, inline=True)
def _inaccurate(x: Any, mark: Any) -> Any:
    """Return what a device's function in float32 may give for values of its."""
    return x * (1.0 + (ULPS - 0.5) * 2.0**-23 * _unit(_mixed(lax.bitcast_convert_type(x, np.uint64), mark)))


def _complex_product(x: Any, y: Any, stored: Callable[[Any], Any]) -> Any:
    """(a + bi)(c + di) = (ac − bd) + (ad + bc)i, every product rounded."""
    (a, b), (c, d) = (x.real, x.imag), (y.real, y.imag)
    return lax.complex(stored(a * c) - stored(b * d), stored(a * d) + stored(b * c))


def _logistic(x: Any, _params: Any, stored: Callable[[Any], Any]) -> Any:
    """1 / (1 + exp(−x))."""
    return 1.0 / stored(1.0 + stored(jnp.exp(-x)))


def _power(x: Any, params: Any, stored: Callable[[Any], Any]) -> Any:
    """Return x to an integer power; the cube of a rounded square."""
    return stored(x * x) * x if params["y"] == 3 else lax.integer_pow(x, params["y"])


def _one_minus_square(x: Any, _params: Any, stored: Callable[[Any], Any]) -> Any:
    """(1 − x)(1 + x), as JAX writes 1 − x²."""
    return stored(1.0 - x) * stored(1.0 + x)


EXPANDED = {"logistic": _logistic, "integer_pow": _power, "one_minus_square": _one_minus_square}

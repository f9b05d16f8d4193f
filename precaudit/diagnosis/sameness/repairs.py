"""Mistakes of meshes, each as what would mend it: a change of one operation's result on every rank (JAX)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.diagnosis.sameness.marks import subsets
from precaudit.interpreters.jaxpr.ranks import Axes, Change, Told

MeshMistake = Literal[
    "sum over another axis", "summed again", "added twice", "shard omitted", "term on each shard",
    "statistics of one shard", "sum missing", "not averaged", "mean for sum", "sum for mean", "scale on each shard",
    "shard of another rank",
]  # fmt: skip
SUMS = ("psum", "psum_invariant")
COLLECTIVES = (*SUMS, "pmax", "pmin", "ppermute", "all_to_all", "all_gather", "reduce_scatter")
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "argmax")
TERMS = ("add", "sub", "add_any")
Picked = Callable[[Sequence[Any]], Sequence[Any]]  # which values of an equation, its operands and results, are meant
HANDED_ON = 1  # the rank of a repair that leaves a ppermute out
MOST_RANKS = 16  # of which every other is tried


@dataclass(frozen=True)
class Repair:
    """What a mistake is called, what it says of a place, and the change that mends it; ``rank``: the simplest first."""

    name: MeshMistake
    says: str
    rank: int
    change: Change


def repairs(told: Told) -> Iterator[Repair]:
    """Yield what may mend what an evaluation tells of, from what operands and results are on every rank."""
    e, inputs, out, axes = told.equation, told.inputs, told.out, told.axes
    if told.key[1] == "in":
        yield from _input_repairs(out[0], axes)
    elif told.key[1] == "out":
        yield from _output_repairs(out[0], e.params["out_specs"][told.key[2]], axes)
    else:
        yield from _result_repairs(e, inputs, out, axes)
        yield from _ring_repairs(e, inputs, out, axes)


def _result_repairs(e: jex.JaxprEqn, inputs: Sequence[Any], out: Sequence[Any], axes: Axes) -> Iterator[Repair]:
    """Yield what may mend an equation's result."""
    if len(out) != 1 or not jnp.issubdtype(out[0].dtype, jnp.floating):
        return
    name = e.primitive.name
    wide = [i for i, n in enumerate(axes.sizes) if n > 1]
    choices = [tuple(wide[i] for i in some) for some in subsets(len(wide)) if some]
    for over in choices:
        count, said = int(np.prod([axes.sizes[i] for i in over])), _said(axes, over)
        apart = _differs(out[0], over)
        if name in SUMS:
            yield from _of_sums(e, axes, over, said)
        if apart and name == "reduce_max":
            yield _always("statistics of one shard", f"its maximum is of one shard along {said}", 3, _max(over))
        if apart:
            of_one = name in REDUCTIONS
            mean: MeshMistake = "statistics of one shard" if of_one else "not averaged"
            its = "its sum is of one shard" if of_one else "the sum over devices is missing"
            yield _always("statistics of one shard" if of_one else "sum missing", f"{its} along {said}", 4, _sum(over))
            text = f"its mean is of one shard along {said}" if of_one else f"it is not averaged along {said}"
            yield _always(mean, text, 5, _mean(over))
            if name in ("all_to_all", "dynamic_slice", "gather", "dot_general") and len(over) == 1:
                yield from _of_others(axes, over, name)
        if name in TERMS:
            yield from _terms(inputs, over, said, count, name)
        if name in (*SUMS, "mul", "div", "dot_general", "reduce_sum"):
            yield _times("mean for sum", f"it is divided by the {count} devices of {said}", 6, count)
            yield _times("sum for mean", f"it is counted {count} times, once on every device of {said}", 6, 1 / count)
            yield _times("scale on each shard", f"its scale is of one of the {count} shards of {said}", 9, count**0.5)
            yield _times("scale on each shard", f"its scale is of one of the {count} shards of {said}", 9, count**-0.5)
    if choices:
        yield from _without(e, inputs, out, choices, axes)


def _ring_repairs(e: jex.JaxprEqn, inputs: Sequence[Any], out: Sequence[Any], axes: Axes) -> Iterator[Repair]:
    """Yield what mends a sum that goes round the ranks and stops before it has every part: one part more.

    Of an addition the part is an operand, of a loop that carries sum and part another result.
    """
    looped = e.primitive.name in ("scan", "while")
    if not looped and e.primitive.name not in TERMS:
        return
    told, both = (out, _results) if looped else (inputs, _operands)
    for i, n in enumerate(axes.sizes):
        for to, x in enumerate(out):
            for of, y in enumerate(told):
                fits = y.shape == x.shape and jnp.issubdtype(x.dtype, jnp.floating) and not (looped and to == of)
                if 1 < n <= MOST_RANKS and fits and _differs(y, (i,)) and _differs(x, (i,)):
                    for shift in (*range(1, n),):
                        text = f"a shard along {axes.names[i]} is omitted"
                        change = partial(_with_another, to, of, i, shift, both)
                        yield Repair("shard omitted", text, 7, change)


def _output_repairs(x: Any, spec: Any, axes: Axes) -> Iterator[Repair]:
    """Yield what may mend an output of shard_map that its spec says to be the same along axes, where it is not."""
    named = {a for part in spec if part is not None for a in (part if isinstance(part, tuple) else (part,))}
    free = [i for i, (a, n) in enumerate(zip(axes.names, axes.sizes, strict=True)) if a not in named and n > 1]
    for some in subsets(len(free)):
        over = tuple(free[i] for i in some)
        if over and jnp.issubdtype(x.dtype, jnp.floating) and _differs(x, over):
            said = _said(axes, over)
            yield _always("not averaged", f"it is not averaged along {said}: each device gives its own", 1, _mean(over))
            yield _always("sum missing", f"the sum over devices is missing along {said}", 1, _sum(over))


def _input_repairs(x: Any, axes: Axes) -> Iterator[Repair]:
    """Yield what may mend an input of shard_map's body: the shard of another rank."""
    for i, n in enumerate(axes.sizes):
        if n > 1 and jnp.issubdtype(x.dtype, jnp.floating) and _differs(x, (i,)):
            yield from _of_others(axes, (i,), "")


def _of_sums(e: jex.JaxprEqn, axes: Axes, over: tuple[int, ...], said: str) -> Iterator[Repair]:
    """Yield a sum over other axes."""
    own, whole = tuple(axes.at(a) for a in e.params["axes"] if a in axes.names), partial(_whole, over)
    if e.params.get("axis_index_groups") is not None:
        yield Repair("shard omitted", f"the sum omits shards along {said}: it is of groups", 0, whole)
    elif set(over) != {i for i in own if axes.sizes[i] > 1}:
        text = f"the sum is over {_said(axes, own) or 'no axis'}, not over {said}"
        yield Repair("sum over another axis", text, 0, whole)


def _terms(inputs: Sequence[Any], over: tuple[int, ...], said: str, count: int, name: str) -> Iterator[Repair]:
    """Yield a term that is added on every rank, once alone."""
    sign = -1.0 if name == "sub" else 1.0
    for i, factor in enumerate((1.0, sign)):
        text = f"a term is added on each of the {count} devices along {said}"
        if not _differs(inputs[i], over):
            less = factor * (1 - 1 / count)
            yield Repair("term on each shard", text, 2, partial(_less, i, less))


def _without(
    e: jex.JaxprEqn, inputs: Sequence[Any], out: Sequence[Any], choices: Sequence[tuple[int, ...]], axes: Axes
) -> Iterator[Repair]:
    """Yield an operation omitted: one of its operands for its result."""
    name, shape = e.primitive.name, out[0].shape
    every = choices[-1]
    counts = [int(np.prod([axes.sizes[i] for i in over])) for over in choices]
    for i, x in enumerate(inputs):
        if x.shape != shape or x.dtype != out[0].dtype:
            continue
        other = [y for j, y in enumerate(inputs) if j != i]
        change = partial(_operand, i)
        if name == "ppermute":
            yield Repair(
                "shard of another rank", f"it is taken of another rank of {_said(axes, every)}", HANDED_ON, change
            )
        elif name in SUMS:
            yield Repair("summed again", f"what is whole is summed once more over {_said(axes, every)}", 1, change)
        elif name in ("select_n", "mul") and any(_differs(y, every) for y in other):
            yield Repair("shard omitted", f"a shard along {_said(axes, every)} is omitted", 1, change)
        elif name in TERMS and len(inputs) == 2 and bool(np.array_equal(inputs[0], inputs[1])):
            yield Repair("added twice", "it is added twice", 1, change)
        elif any(_divides(name, y, n) for y in other for n in counts):
            yield Repair("mean for sum", f"the sum over {_said(axes, every)} is divided by the devices", 1, change)
        elif name in ("mul", "div") and any(y.size < x.size or _constant(y) for y in other):
            yield Repair("scale on each shard", "its scale is applied once more on each shard", 8, change)
        elif name in TERMS and all(_differs(y, every) for y in other):
            yield Repair("added twice", "a shard is added twice", 8, change)


def _of_others(axes: Axes, over: tuple[int, ...], name: str) -> Iterator[Repair]:
    """Yield the shard of every other rank."""
    (at,), n = over, axes.sizes[over[0]]
    for shift in range(1, n if n <= MOST_RANKS else 1):
        back = min(shift, n - shift) * (1 if shift <= n - shift else -1)
        said = f"rank r of {axes.names[at]} takes what is rank r {'−' if back > 0 else '+'} {abs(back)}'s"
        rank = 7 if name != "dot_general" else 10
        yield _always("shard of another rank", said, rank, partial(_rolled, at, -shift))


def _operands(told: Sequence[Any]) -> Sequence[Any]:
    return told[1]


def _results(told: Sequence[Any]) -> Sequence[Any]:
    return told[2]


def _said(axes: Axes, over: Sequence[int]) -> str:
    return " and ".join(axes.names[i] for i in over)


def _always(name: MeshMistake, says: str, rank: int, f: Callable[[Any], Any]) -> Repair:
    return Repair(name, says, rank, lambda _e, _inputs, out, _axes: [f(out[0])])


def _times(name: MeshMistake, says: str, rank: int, factor: float) -> Repair:
    return _always(name, says, rank, lambda x: x * factor)


def _sum(over: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: np.broadcast_to(x.sum(over, keepdims=True), x.shape)


def _mean(over: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: np.broadcast_to(x.mean(over, keepdims=True), x.shape)


def _max(over: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: np.broadcast_to(x.max(over, keepdims=True), x.shape)


def _rolled(at: int, shift: int, x: Any) -> Any:
    return np.roll(x, shift, axis=at)


def _less(i: int, part: float, _e: Any, inputs: Sequence[Any], out: list[Any], _axes: Axes) -> list[Any]:
    term = inputs[i].reshape(*inputs[i].shape, *[1] * (out[0].ndim - inputs[i].ndim))  # a scalar of each rank
    return [out[0] - part * term]


def _whole(over: tuple[int, ...], _e: Any, inputs: Sequence[Any], _out: Any, _axes: Axes) -> list[Any]:
    return [_sum(over)(inputs[0])]


def _with_another(to: int, of: int, at: int, shift: int, both: Picked, *told: Any) -> list[Any]:
    """Return results with one of the values of another rank added to one."""
    out = list(told[2])
    out[to] = out[to] + np.roll(both(told)[of], shift, axis=at)
    return out


def _operand(i: int, _e: Any, inputs: Sequence[Any], _out: Any, _axes: Axes) -> list[Any]:
    return [inputs[i]]


def _differs(x: Any, over: tuple[int, ...]) -> bool:
    """Whether a value is not the same on all ranks along some axes."""
    x = np.asarray(x)  # NumPy compiles nothing
    if x.dtype == bool:
        return bool((x.any(over) != x.all(over)).any())
    return bool((x.max(over) != x.min(over)).any())


def _divides(name: str, x: Any, count: int) -> bool:
    """Whether an operand is the constant that divides by a number of devices."""
    return (
        name in ("mul", "div") and _constant(x) and float(x.reshape(-1)[0]) == (count if name == "div" else 1 / count)
    )


def _constant(x: Any) -> bool:
    x = np.asarray(x)
    return bool((x == x.reshape(-1)[0]).all())

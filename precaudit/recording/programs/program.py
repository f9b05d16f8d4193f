"""What a user hands over: a function of parameters and inputs, cases of inputs, and how one call's follow another's."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from precaudit.errors import UserError, nearest
from precaudit.schema.brief import Brief
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.policies import Policy, apply_settings, load_policy

MOST_STEPS = 1 << 16
OUTPUT = "outputs."  # before the name of an output, where points are named
OUTPUT_LOGITS = OUTPUT + LOGITS
NAME = re.compile(r"[A-Za-z_][\w.]{0,99}")
NextInputs = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]  # of a call's inputs and outputs, the next one's inputs


@dataclass(frozen=True)
class Entry:
    """An entry point that goes on where the one before it ends: decode with prefill's cache, rescore, a loss.

    ``begin(inputs, outputs)`` makes its first inputs of the last call's before it. ``call``, ``steps``, ``advance``,
    ``outputs``, ``points``, ``tokens``, ``start`` and ``lengths`` are as ``Program`` has them.
    """

    call: Callable[..., Any]
    begin: NextInputs
    steps: int = 0
    advance: NextInputs | None = None
    outputs: str | Sequence[str] | None = None
    points: Mapping[str, str] | None = None
    tokens: int | None = None
    start: int | None = None
    lengths: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before anything runs."""
        _check(self)
        if not callable(self.begin):
            raise UserError(f"Entry: begin is no function but {type(self.begin).__name__}")


@dataclass(frozen=True, repr=False)
class Program(Brief):
    """A program under audit.

    ``call(params, *inputs)``: any function ``jax.jit`` takes; arrays in, arrays out. ``params``: a tree of arrays that
    is recorded nowhere. ``cases``: {name: inputs}, all of the same shapes. Arrays of 64 bits are rounded to 32, once,
    as JAX does where 64-bit types are off. ``steps``: calls after the first, each on what ``advance(inputs, outputs)``
    makes of the one before (a decode loop with its cache). ``outputs``: names of what ``call`` returns: keys or fields
    of its result, or else in order (one name: its only result); arrays named so, and those of trees named so
    (``outputs.cache.k``), are recorded and judged by their forward error, and the one named ``logits``, [...,
    vocabulary], by its distributions too. ``points``: names of your own for automatic points, ``{"q":
    "query_proj~1"}``; their occurrences go along (``q#1``). ``policy``: the formats that it means to compute in, by the
    name of a policy, its file or itself: what a names map shows is compared with them. ``weights``: the checkpoint that
    ``params`` are meant to hold, as ``load`` takes it: the reference has its tensors, and not those of ``params``,
    which are believed without it. ``tokens``: which input, of the leaves of a call's in order, holds its token ids, [B,
    T], [T] or one; ``start``: which holds the position of the first of them, [B] or one, or of every one (None: they
    count on from call to call; a later entry point goes on where the one before ended, or begins anew where its first
    call has several rows); ``lengths``: which says how many of a call are each sequence's and no padding, [B], or which
    they are, [B, T]. ``entry``: what the entry point ``call`` is named; ``then``: the entry points that run after it,
    by name, each on the state that the one before leaves.

    Raises UserError for what is none.

    >>> import jax.numpy as jnp
    >>> import precaudit
    >>> def step(params, x):
    ...     return x @ params
    >>> x = jnp.ones((2, 4), jnp.bfloat16)
    >>> precaudit.Program(call=step, params=jnp.ones((4, 3), jnp.bfloat16), cases={"a": (x,)}, outputs="out")
    Program step
      cases: 1: a
      calls: 1
      outputs: out
    """

    call: Callable[..., Any]
    params: Any
    cases: Mapping[str, tuple[Any, ...]]
    steps: int = 0
    advance: NextInputs | None = None
    outputs: str | Sequence[str] | None = None
    points: Mapping[str, str] | None = None
    policy: str | Policy | None = None
    weights: str | None = None
    tokens: int | None = None
    start: int | None = None
    lengths: int | None = None
    entry: str = "call"
    then: Mapping[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what can be checked before anything runs."""
        _check(self)
        if not isinstance(self.cases, Mapping) or not self.cases:
            raise UserError('Program: cases is empty; give inputs by name: cases={"short": (tokens,)}')
        for name, inputs in self.cases.items():
            if not isinstance(name, str) or not isinstance(inputs, tuple):
                raise UserError(f"Program: case {name!r} must be a name with a tuple of inputs")
        if bad := [n for n in (self.entry, *self.then) if not isinstance(n, str) or not NAME.fullmatch(n)]:
            raise UserError(f"Program: entry point {bad[0]!r} is no name: letters, digits, _ and . alone")
        if not all(isinstance(e, Entry) for e in self.then.values()) or self.entry in self.then:
            raise UserError("Program: then holds entry points by names of their own: {'decode': precaudit.Entry(…)}")
        from precaudit.interpreters.jaxpr.wide import halve_widths

        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", load_policy(self.policy))
        object.__setattr__(self, "params", halve_widths(self.params))
        object.__setattr__(self, "cases", {name: halve_widths(inputs) for name, inputs in self.cases.items()})
        _check_inputs(self)

    def altered(self, **fields_by_name: Any) -> "Program":
        """Return a Program with other fields; of a model it holds what the model makes of them."""
        return Program(**{f.name: getattr(self, f.name) for f in fields(Program)} | fields_by_name)

    def some(self, cases: Collection[str]) -> "Program":
        """Return the same of some cases; raises UserError for one that it does not have."""
        if unknown := [name for name in cases if name not in self.cases]:
            raise UserError(f"no case of the program is named {unknown[0]!r}{nearest(unknown[0], list(self.cases))}")
        return self.altered(cases={name: x for name, x in self.cases.items() if name in cases})

    def announcing(self, policy: str | Policy | None, settings: Mapping[str, str] | None = None) -> "Program":
        """Return the same that announces a policy (None: its own), keys of it replaced; raises UserError."""
        announced = self.policy if policy is None else load_policy(policy) if isinstance(policy, str) else policy
        if not isinstance(announced, Policy):
            raise UserError(f"the program announces no policy whose {', '.join(settings or {})} to set: give --policy")
        return self.altered(policy=apply_settings(announced, dict(settings or {})))

    def inputs(self, leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a call's inputs from their leaves, {number: array}, as a run holds them."""
        import jax

        from precaudit.interpreters.jaxpr.keys import wrap_key
        from precaudit.interpreters.jaxpr.wide import halve_widths

        first, structure = jax.tree.flatten(next(iter(self.cases.values())))
        held = [wrap_key(leaves[str(i)], like) for i, like in enumerate(first)]
        return tuple(halve_widths(jax.tree.unflatten(structure, held)))

    def named_outputs(self, out: Any) -> dict[str, Any]:
        """Return {outputs.NAME: array} of a call's named outputs that are arrays of floats; raises UserError.

        Of a tree they are its leaves that are: ``outputs.NAME.key``.
        """
        return {n: x for n, x in self.every_output(out).items() if _floats(x)}

    def every_output(self, out: Any) -> dict[str, Any]:
        """Return the same of arrays of any format."""
        names = _names(self.outputs)
        if not names:
            return {}
        held = _by_name(out)
        if held.keys() >= set(names):
            parts = tuple(held[n] for n in names)
        else:
            parts = tuple(out) if isinstance(out, tuple | list) and not isinstance(self.outputs, str) else (out,)
        if len(parts) != len(names):
            raise UserError(f"Program: outputs names {len(names)} results, call returns {len(parts)}")
        found = {n: x for name, part in zip(names, parts, strict=True) for n, x in _leaves(OUTPUT + name, part)}
        if OUTPUT_LOGITS not in found and LOGITS in names:
            raise UserError("Program: the output named logits is no array")
        return found


def _check(of: "Program | Entry") -> None:
    """Raise UserError for what a program's entry points cannot be, the first or a later one."""
    what = type(of).__name__ if isinstance(of, Entry) else "Program"
    names = _names(of.outputs)
    if not callable(of.call):
        raise UserError(f"{what}: call is no function but {type(of.call).__name__}")
    if not 0 <= of.steps <= MOST_STEPS:
        raise UserError(f"{what}: steps = {of.steps} is outside 0 to {MOST_STEPS}")
    if of.steps and of.advance is None:
        raise UserError(f"{what}: steps need advance(inputs, outputs), which makes the next call's inputs")
    pairs = {} if of.points is None else of.points
    if not isinstance(pairs, Mapping) or not all(isinstance(x, str) and x for pair in pairs.items() for x in pair):
        raise UserError(f'{what}: points = {of.points!r} must be names by names: {{"q": "query_proj"}}')
    if bad := [name for name in pairs if not NAME.fullmatch(name)]:
        raise UserError(f"{what}: points: {bad[0]!r} is no name: letters, digits, _ and . alone")
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise UserError(f"{what}: outputs = {of.outputs!r} must be a name or several that differ")


def _check_inputs(of: Program) -> None:
    """Raise UserError where an input that a program names is none of its calls', or holds something else."""
    import jax
    import jax.numpy as jnp

    said = {n: at for n in ("tokens", "start", "lengths") if (at := getattr(of, n)) is not None}
    leaves = jax.tree.leaves(next(iter(of.cases.values()))) if said else []
    for name, at in said.items():
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(leaves):
            raise UserError(
                f"Program: {name} = {at!r}: inputs of {of.entry} are numbered 0 to {len(leaves) - 1}, the leaves of a "
                "call's tuple in order"
            )
        kind, shape = jnp.result_type(leaves[at]), jnp.shape(leaves[at])
        if name != "lengths" and not jnp.issubdtype(kind, jnp.integer):
            raise UserError(f"Program: {name} = {at}: that input of {of.entry} holds {kind} {list(shape)}, no integers")
    if of.lengths is not None and of.tokens is not None:
        ids, shape = jnp.shape(leaves[of.tokens]), jnp.shape(leaves[of.lengths])
        sequences = {1, *ids} if len(ids) == 1 else {ids[0]} if ids else {1}
        if shape != ids and prod(shape) not in sequences:
            raise UserError(
                f"Program: lengths = {of.lengths}: that input of {of.entry} is {list(shape)}, and its tokens "
                f"{list(ids)}; it says how many rows of each sequence are no padding, or which"
            )


def _names(outputs: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if outputs is None else (outputs,) if isinstance(outputs, str) else tuple(outputs)


def _by_name(out: Any) -> dict[str, Any]:
    """Return what a result holds by name: a mapping's values, a named tuple's or a dataclass's fields; else nothing."""
    if isinstance(out, Mapping):
        return dict(out)
    names = getattr(out, "_fields", ()) or tuple(getattr(out, "__dataclass_fields__", ()))
    return {n: getattr(out, n) for n in names}


def _leaves(name: str, out: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of an output, each by its own name: of a tree the name with the way to the leaf."""
    from jax.tree_util import keystr, tree_flatten_with_path

    for path, x in tree_flatten_with_path(out)[0]:
        if hasattr(x, "dtype"):
            yield ".".join((name, *(keystr((key,), simple=True) for key in path))), x


def _floats(x: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(x.dtype, jnp.floating))

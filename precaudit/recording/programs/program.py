"""What a user hands over: a function of parameters and inputs, cases of inputs, and how one call's follow another's."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precaudit.errors import UserError, nearest
from precaudit.schema.brief import Brief
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.policies import Policy, apply_settings, load_policy

MOST_STEPS = 1 << 16
OUTPUT = "outputs."  # before the name of an output, where points are named
OUTPUT_LOGITS = OUTPUT + LOGITS
NAME = re.compile(r"[A-Za-z_][\w.]{0,99}")


@dataclass(frozen=True, repr=False)
class Program(Brief):
    """A program under audit.

    ``call(params, *inputs)``: any function ``jax.jit`` takes; arrays in, arrays out. ``params``: a tree of arrays that
    is recorded nowhere. ``cases``: {name: inputs}, all of the same shapes. Arrays of 64 bits are rounded to 32, once,
    as JAX does where 64-bit types are off. ``steps``: calls after the first, each on
    what ``advance(inputs, outputs)`` makes of the one before (a decode loop with its cache). ``outputs``: names of what
    ``call`` returns, in order (one name: its only result); arrays named so are recorded and judged by their forward
    error, and the one named ``logits``, [..., vocabulary], by its distributions too. ``points``: names of your own for
    automatic points, ``{"q": "query_proj~1"}``; their occurrences go along (``q#1``). ``policy``: the formats that it
    means to compute in, by the name of a policy, its file or itself: what a names map shows is held to them.
    ``weights``: the checkpoint that ``params`` are meant to hold, as ``load`` takes it: the textbook has its tensors,
    and not those of ``params``, which are believed without it.

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
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    outputs: str | Sequence[str] | None = None
    points: Mapping[str, str] | None = None
    policy: str | Policy | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before anything runs."""
        if not callable(self.call):
            raise UserError(f"Program: call is no function but {type(self.call).__name__}")
        if not isinstance(self.cases, Mapping) or not self.cases:
            raise UserError('Program: cases is empty; give inputs by name: cases={"short": (tokens,)}')
        for name, inputs in self.cases.items():
            if not isinstance(name, str) or not isinstance(inputs, tuple):
                raise UserError(f"Program: case {name!r} must be a name with a tuple of inputs")
        if not 0 <= self.steps <= MOST_STEPS:
            raise UserError(f"Program: steps = {self.steps} is outside 0 to {MOST_STEPS}")
        if self.steps and self.advance is None:
            raise UserError("Program: steps need advance(inputs, outputs), which makes the next call's inputs")
        pairs = {} if self.points is None else self.points
        if not isinstance(pairs, Mapping) or not all(isinstance(x, str) and x for pair in pairs.items() for x in pair):
            raise UserError(f'Program: points = {self.points!r} must be names by names: {{"q": "query_proj"}}')
        if bad := [name for name in pairs if not NAME.fullmatch(name)]:
            raise UserError(f"Program: points: {bad[0]!r} is no name: letters, digits, _ and . alone")
        if not all(isinstance(name, str) and name for name in self._names) or len(set(self._names)) < len(self._names):
            raise UserError(f"Program: outputs = {self.outputs!r} must be a name or several that differ")
        from precaudit.interpreters.jaxpr.wide import narrowed

        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", load_policy(self.policy))
        object.__setattr__(self, "params", narrowed(self.params))
        object.__setattr__(self, "cases", {name: narrowed(inputs) for name, inputs in self.cases.items()})

    def some(self, cases: Collection[str]) -> "Program":
        """Return the same of some cases; raises UserError for one that it does not have."""
        if unknown := [name for name in cases if name not in self.cases]:
            raise UserError(f"no case of the program is named {unknown[0]!r}{nearest(unknown[0], list(self.cases))}")
        return replace(self, cases={name: x for name, x in self.cases.items() if name in cases})

    def announcing(self, policy: str | Policy | None, settings: Mapping[str, str] | None = None) -> "Program":
        """Return the same that announces a policy (None: its own), keys of it replaced; raises UserError."""
        announced = self.policy if policy is None else load_policy(policy) if isinstance(policy, str) else policy
        if not isinstance(announced, Policy):
            raise UserError(f"the program announces no policy whose {', '.join(settings or {})} to set: give --policy")
        return replace(self, policy=apply_settings(announced, dict(settings or {})))

    @property
    def _names(self) -> tuple[str, ...]:
        return () if self.outputs is None else (self.outputs,) if isinstance(self.outputs, str) else tuple(self.outputs)

    def inputs(self, leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a call's inputs from their leaves, {number: array}, as a run holds them."""
        import jax

        from precaudit.interpreters.jaxpr.keys import keyed
        from precaudit.interpreters.jaxpr.wide import narrowed

        first, structure = jax.tree.flatten(next(iter(self.cases.values())))
        held = [keyed(leaves[str(i)], like) for i, like in enumerate(first)]
        return tuple(narrowed(jax.tree.unflatten(structure, held)))

    def named(self, out: Any) -> dict[str, Any]:
        """Return {outputs.NAME: array} of a call's named outputs that are arrays of floats; raises UserError."""
        if not self._names:
            return {}
        parts = (out,) if isinstance(self.outputs, str) else tuple(out) if isinstance(out, tuple | list) else (out,)
        if len(parts) != len(self._names):
            raise UserError(f"Program: outputs names {len(self._names)} results, call returns {len(parts)}")
        found = {OUTPUT + n: x for n, x in zip(self._names, parts, strict=True) if hasattr(x, "dtype")}
        if OUTPUT_LOGITS not in found and LOGITS in self._names:
            raise UserError("Program: the output named logits is no array")
        return {n: x for n, x in found.items() if _floats(x)}


def _floats(x: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(x.dtype, jnp.floating))

"""What a user hands over: a function of parameters and inputs, cases of inputs, and how one call's follow another's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from precaudit.errors import UserError

MOST_STEPS = 1 << 16


@dataclass(frozen=True)
class Program:
    """A program under audit.

    ``call(params, *inputs)``: any function ``jax.jit`` takes; arrays in, arrays out. ``params``: a tree of arrays that
    is recorded nowhere. ``cases``: {name: inputs}, all of the same shapes. ``steps``: calls after the first, each on
    what ``advance(inputs, outputs)`` makes of the one before (a decode loop with its cache).

    Raises UserError for what is none.
    """

    call: Callable[..., Any]
    params: Any
    cases: Mapping[str, tuple[Any, ...]]
    steps: int = 0
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None

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

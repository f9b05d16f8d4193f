"""A model as a Program: its function, parameters and cases are made when one of them is first read."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from precaudit.recording.programs.program import Entry, NextInputs, Program
from precaudit.schema.prompts import NoTemplate, encode_prompt, shipped_prompts

if TYPE_CHECKING:
    from precaudit.recording.tracing.subject import Subject

STEPS = 8  # of decode after prefill, as trace makes them


class FromServed:
    """A field of a Program that is read from the one that ``served`` makes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        return self if x is None else getattr(x.served, self.name)


def later() -> Any:
    """Return the default of a field that is read from ``served``."""
    return FromServed()


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class ServedModel(Program):
    """A model that is a Program: prefill, decode and rescore of the shipped prompts, cut to one length.

    ``reference``: the name or path that it was opened by. Weights are read and prompts encoded at the first look at a
    field, since a model is also opened for its sizes alone.
    """

    reference: str
    call: Callable[..., Any] = field(init=False, default=later())
    params: Any = field(init=False, default=later())
    cases: Mapping[str, tuple[Any, ...]] = field(init=False, default=later())
    steps: int = field(init=False, default=later())
    advance: NextInputs | None = field(init=False, default=later())
    outputs: str | Sequence[str] | None = field(init=False, default=later())
    points: Mapping[str, str] | None = field(init=False, default=later())
    weights: str | None = field(init=False, default=later())
    tokens: int | None = field(init=False, default=later())
    start: int | None = field(init=False, default=later())
    lengths: int | None = field(init=False, default=later())
    entry: str = field(init=False, default=later())
    then: Mapping[str, Entry] = field(init=False, default=later())

    def __post_init__(self) -> None:
        """Leave all checks to the Program that is made."""

    @cached_property
    def served(self) -> Program:
        """The model as a Program over the shipped prompts that it takes; raises UserError without a tokenizer."""
        return self.serving(_encoded(cast("Subject", self).tokenizer))

    def serving(self, prompts: Mapping[str, Sequence[int]], steps: int = STEPS) -> Program:
        """Return the model as a Program over token ids, each prompt cut to the length of the shortest."""
        from precaudit.recording.programs.own import served_of

        shortest = min(map(len, prompts.values()))
        return served_of(cast("Subject", self), {name: ids[:shortest] for name, ids in prompts.items()}, steps)


def _encoded(tokenizer: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for prompt in shipped_prompts():
        with suppress(NoTemplate):
            found[prompt.id] = encode_prompt(prompt, tokenizer)[1]
    return found

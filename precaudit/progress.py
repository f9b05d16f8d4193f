"""How long work says what it has done and what is left."""

from collections.abc import Callable
from dataclasses import dataclass

Advance = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


def silent(done: int, total: int, what: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Progress:
    """Where a trace reports to: ``say`` for a line, ``advance`` for a bar."""

    say: Callable[[str], None] = lambda _line: None
    advance: Advance = silent

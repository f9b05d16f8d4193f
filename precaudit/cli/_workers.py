"""The processes that compute for a command: those of ``--jobs``, or the workers of ``--scheduler``."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precaudit.numbers.executors import Executor


def computes_apart(options: Any) -> bool:
    """Whether other processes compute."""
    return options.jobs > 1 or options.scheduler is not None


def other_processes(options: Any) -> "AbstractContextManager[Executor]":
    """Return what computes, as ``jobs``, ``scheduler`` and ``memory`` of the options say: a context."""
    from precaudit.references.comparison.compare import pieces_by

    return pieces_by(options)


def memory_lines(peaks: Mapping[str, int], memory: int | None = None) -> tuple[str, ...]:
    """Return how much memory other processes needed that computed pieces, as a line; none where none did.

    ``memory``: the most that one was allowed.
    """
    if not peaks:
        return ()
    n, most = len(peaks), max(peaks.values()) / 1e6
    allowed = "" if memory is None else f", of {memory / 1e6:,.0f} MB allowed"
    return (f"Computed by {n} other process{'es' if n > 1 else ''}: at most {most:,.0f} MB of memory in one{allowed}",)

"""The processes that compute for a command: those of ``--jobs``, or the workers of ``--scheduler``."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from precaudit.numbers.bytes_text import bytes_text

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
    n, most = len(peaks), bytes_text(max(peaks.values()))
    allowed = "" if memory is None else f", of {bytes_text(memory)} allowed"
    return (f"Computed by {n} other process{'es' if n > 1 else ''}: at most {most} of memory in one{allowed}",)

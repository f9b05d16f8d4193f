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
    """Return what computes, as ``jobs`` and ``scheduler`` of the options say: a context."""
    from precaudit.numbers.executors import executor

    return executor(options.jobs, options.scheduler)


def memory_lines(peaks: Mapping[str, int]) -> tuple[str, ...]:
    """Return how much memory other processes needed that computed pieces, as a line; none where none did."""
    if not peaks:
        return ()
    n, most = len(peaks), max(peaks.values()) / 1e6
    return (f"Computed by {n} other process{'es' if n > 1 else ''}: at most {most:,.0f} MB of memory in one",)

"""Who makes the pieces of a large task: this process with its threads, other processes of this machine, or a cluster.

A function gets what all pieces share and one piece, both of which can be pickled, and returns what can be. Whoever
makes a piece splits rows for as many cores as the process that asked, so that the bits are the same.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.threads import alone, cores, one_blas_thread
from precaudit.progress import Advance, silent

Work = Callable[[Any, Any, Advance], Any]  # of what is shared, a piece, and what is told of its progress
_here = threading.local()  # what the pieces share that this thread makes: unpickled once


class Executor(Protocol):
    """Makes pieces and returns what they give, in their order."""

    @property
    def slots(self) -> int:
        """How many pieces are made at once."""
        ...

    @property
    def here(self) -> bool:
        """Whether this process makes them, with all of its threads."""
        ...

    def map(
        self, function: Work, shared: Any, pieces: Sequence[Any], tell: Advance = silent, what: str = ""
    ) -> list[Any]:
        """Return ``function(shared, piece, tell)`` of every piece; raises what one of them raises."""
        ...


class Threads:
    """One piece after another is made in this process."""

    slots, here = 1, True

    def map(
        self,
        function: Work,
        shared: Any,
        pieces: Sequence[Any],
        tell: Advance = silent,
        what: str = "",  # noqa: ARG002 a piece tells of itself
    ) -> list[Any]:
        """Return what the pieces give."""
        return [function(shared, piece, tell) for piece in pieces]


@dataclass(frozen=True)
class Errand:
    """A function and what its pieces share, for another process; for how many cores rows are split; NumPy's state."""

    function: Work
    shared: Any
    cores: int
    errors: Any

    @classmethod
    def pickled(cls, function: Work, shared: Any) -> bytes:
        """Return the errand of this thread, as another process reads it."""
        return pickle.dumps(cls(function, shared, cores(), np.geterr()), pickle.HIGHEST_PROTOCOL)


def make_piece(key: str, errand: bytes, piece: Any) -> Any:
    """Return what a piece gives; ``key``: the name of the errand, which this thread reads once."""
    if getattr(_here, "key", None) != key:
        _here.key, _here.errand = "", None  # one errand is held, not two
        _here.errand = pickle.loads(errand)
        _here.key = key
    mine: Errand = _here.errand
    with alone(mine.cores), one_blas_thread(), np.errstate(**mine.errors):
        return mine.function(mine.shared, piece, silent)


@contextmanager
def executor(jobs: int = 1, scheduler: str | None = None) -> Iterator[Executor]:
    """Yield what makes pieces: ``jobs`` processes of this machine, or the cluster whose scheduler is at an address."""
    if scheduler is not None:
        if jobs > 1:
            raise UserError("--scheduler takes the workers that are there; leave out --jobs")
        from precaudit.numbers.cluster import open_cluster

        with open_cluster(scheduler) as cluster:
            yield cluster
    elif jobs > 1:
        from precaudit.numbers.processes import Processes

        processes = Processes(jobs)
        try:
            yield processes
        finally:
            processes.close()
    else:
        yield Threads()

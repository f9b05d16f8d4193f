"""Writing beside computing: one thread, a short queue, and its exception surfaces where the next item is put."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType

DEPTH = 2  # steps in flight: what bounds the memory


class Background:
    """Runs jobs in order on one thread. Use as a context manager: leaving it waits for the jobs."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(DEPTH)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="precaudit-writer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job, waiting while the queue is full; raises what an earlier job raised."""
        self.check()
        self._queue.put(job)

    def check(self) -> None:
        """Raise what a job raised."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and self._error is None:
            self._error = error  # skip what is still queued
        self._queue.put(None)
        self._thread.join(timeout=600)
        if kind is None:
            self.check()

"""Trials as tasks: made one after another, or ahead of what a search asks for, by threads or by processes."""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace as changed

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion, judge_figures
from precaudit.diagnosis.bisection.records import BisectionTrial, Word
from precaudit.errors import UserError, enough_memory
from precaudit.numbers.executors import Executor, executor
from precaudit.progress import Advance
from precaudit.schema.records.base import Number, json_number

Figures = dict[str, Number]
Measure = Callable[[Changes, Path], Figures]
Kind = Literal["threads", "processes"]  # of what makes trials at once


@dataclass(frozen=True)
class TrialTask:
    """A trial that can be made anywhere. ``base``: the figures of A; ``twice``: it is made twice in any case."""

    key: str
    changes: Changes
    folder: Path
    measure: Measure
    criterion: Criterion
    base: Figures
    twice: bool


def make_trial(task: TrialTask) -> BisectionTrial:
    """Make a trial: once, and once more near the limit."""
    trial = _once(task, BisectionTrial(key=task.key, changes=task.changes, answer="unknown", answers=()))
    return _once(task, trial) if trial.near or (task.twice and trial.answer != "unknown") else trial


def _once(task: TrialTask, trial: BisectionTrial) -> BisectionTrial:
    """Measure a trial once, or once more."""
    begun, figures, why = time.perf_counter(), Figures(), ""
    try:
        with enough_memory():
            figures = task.measure(task.changes, task.folder)
        word, near, why = judge_figures(task.criterion, figures, task.base if task.changes else figures)
    except UserError as error:
        word, near, why = "unknown", False, str(error)
    answers: tuple[Word, ...] = (*trial.answers, word)
    seconds = json_number(float(trial.seconds) + time.perf_counter() - begun)
    agreed: Word = word if len(set(answers)) == 1 else "unknown"
    return changed(trial, answer=agreed, answers=answers, figures=figures, near=near, why=why or None, seconds=seconds)


def _make_piece(_shared: None, task: TrialTask, _tell: Advance) -> BisectionTrial:
    return make_trial(task)


@dataclass
class Tasks:
    """Makes trials, ``jobs`` at once: those that a search will ask for next begin before it asks.

    What it never asks for is made for nothing, and no record of it is left: records are those of one job.
    ``scheduler``: of a cluster whose workers make them, as many at once as there are.
    """

    jobs: int = 1
    kind: Kind = "threads"
    scheduler: str | None = None
    begun: dict[Changes, tuple[TrialTask, "Future[BisectionTrial]"]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None
    _executor: Executor | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    def ahead(self, tasks: Sequence[TrialTask]) -> None:
        """Begin with trials; those that were begun for nothing are left out where they did not start."""
        if self.jobs < 2 and self.scheduler is None:
            return
        wanted = {t.changes for t in tasks}
        for changes, (_, future) in list(self.begun.items()):
            if changes not in wanted and future.cancel():
                del self.begun[changes]
        for task in tasks:
            if task.changes not in self.begun:
                self.begun[task.changes] = task, self._begin(task)

    def make(self, task: TrialTask) -> BisectionTrial:
        """Return a trial, once it is made."""
        found = self.begun.pop(task.changes, None)
        if found is None and self.scheduler is not None:
            return self._begin(task).result()
        return make_trial(task) if found is None else found[1].result()

    def close(self) -> None:
        """Leave nothing of what nobody asked for: processes end, and what threads make is waited for."""
        self._open.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for task, _ in self.begun.values():
            shutil.rmtree(task.folder, ignore_errors=True)
        self.begun.clear()

    def _begin(self, task: TrialTask) -> "Future[BisectionTrial]":
        if self._pool is None:
            apart = self.kind == "processes"
            if apart:
                self._executor = self._open.enter_context(executor(self.jobs, self.scheduler))
            slots = self.jobs if self._executor is None else self._executor.slots
            self._pool = ThreadPoolExecutor(slots, "precaudit-trial")
        made_by = self._executor
        if made_by is None:
            return self._pool.submit(make_trial, task)
        return self._pool.submit(lambda: made_by.map(_make_piece, None, [task], what="trials")[0])

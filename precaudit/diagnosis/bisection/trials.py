"""Trials of a bisection: each is made once, kept in a file, repeated where it is near the limit."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion
from precaudit.diagnosis.bisection.records import BisectionAsked, BisectionTrial
from precaudit.diagnosis.bisection.tasks import Figures, Measure, Tasks, TrialTask
from precaudit.errors import CannotJudge, UserError
from precaudit.recording.runs.folders import make_folder
from precaudit.schema.records.lines import decode_lines, encode, write_lines

TRIALS, FOUND, RUNS, GOOD = "trials.jsonl", "bisect.json", "runs", "good"


@dataclass
class Trials:
    """Makes trials and keeps them. ``measure(changes, folder)`` raises UserError where a trial cannot be told.

    ``base``: the figures of A, once it was measured. ``twice``: every trial is made twice, since its answer has no
    figure that could be near a limit. ``tasks``: what makes them, several at once.
    """

    asked: BisectionAsked
    criterion: Criterion
    measure: Measure
    folder: Path
    tell: Callable[[BisectionTrial], None]
    twice: bool = False
    base: Figures = field(default_factory=dict)
    kept: dict[Changes, BisectionTrial] = field(default_factory=dict)
    made: int = 0
    tasks: Tasks = field(default_factory=Tasks)

    def open(self, force: bool) -> None:
        """Read what an earlier bisection of the same request left; raises UserError for one of another."""
        path = self.folder / TRIALS
        if force and path.exists():
            for old in (path, self.folder / FOUND):
                old.unlink(missing_ok=True)
            shutil.rmtree(self.folder / RUNS, ignore_errors=True)
        if path.exists():
            lines = read_trials(path)
            if not lines or lines[0] != self.asked:
                raise UserError(f"{self.folder} holds a bisection of another request; give another -o, or --force")
            self.kept = {t.changes: t for t in lines[1:] if isinstance(t, BisectionTrial)}
        make_folder(self.folder)
        write_lines(path, [self.asked, *self.kept.values()])  # without a torn last line

    def run(self, changes: Changes) -> BisectionTrial:
        """Return the trial of A with these changes; raises CannotJudge where it answers differently twice."""
        found = self.kept.get(changes) or self._make(changes)
        if len(set(found.answers)) > 1:
            raise CannotJudge(
                f"{self.name_state(changes)} answered {', then '.join(found.answers)}: the test is not stable; "
                "it decides nothing. Give a limit farther from the figures"
            )
        return found

    def name_state(self, changes: Changes) -> str:
        """Return in words what a trial is of."""
        if not changes:
            return "A"
        return "B" if changes == self.asked.changes else f"A with {', '.join(changes)}"

    def run_folder(self, changes: Changes) -> Path:
        """Return the folder of a trial's run."""
        return self.folder / RUNS / {(): GOOD, self.asked.changes: "bad"}.get(changes, self._key(changes))

    def ahead(self, states: Sequence[Changes]) -> None:
        """Begin with trials that are likely to be asked for, where several are made at once."""
        self.tasks.ahead([self._task(changes) for changes in dict.fromkeys(states) if changes not in self.kept])

    def _task(self, changes: Changes) -> TrialTask:
        return TrialTask(
            self._key(changes), changes, self.run_folder(changes), self.measure, self.criterion, self.base, self.twice
        )

    def _key(self, changes: Changes) -> str:
        return hashlib.sha256(repr((encode(self.asked), changes)).encode()).hexdigest()[:12]

    def _make(self, changes: Changes) -> BisectionTrial:
        trial = self.tasks.make(self._task(changes))
        with (self.folder / TRIALS).open("ab") as f:
            f.write(encode(trial))
            f.flush()
            os.fsync(f.fileno())
        self.kept[changes] = trial
        self.made += 1
        self.tell(trial)
        return trial


def read_trials(path: Path) -> list[Any]:
    """Return what trials.jsonl holds, without a last line that was cut off."""
    kinds: Any = BisectionAsked | BisectionTrial
    return list(decode_lines(path.read_bytes(), kinds, str(path), tolerate_tail=True))

"""Trials of a bisection: each is made once, kept in a file, repeated where it is near the limit."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion, judge_figures, limited_figure
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
            if not lines or not self._measures_as(lines[0]):
                raise UserError(f"{self.folder} holds a bisection of another request; give another -o, or --force")
            trials = [t for t in lines[1:] if isinstance(t, BisectionTrial)]
            if lines[0] != self.asked:
                trials = rejudge_trials(self.criterion, trials)
            self.kept = {t.changes: t for t in trials}
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

    def _measures_as(self, asked: Any) -> bool:
        """Whether an earlier bisection measured what this one does: its figure may have had another limit."""
        if asked == self.asked:
            return True
        figure = limited_figure(self.asked.test)
        return (
            isinstance(asked, BisectionAsked)
            and changed(asked, test=self.asked.test) == self.asked
            and figure is not None
            and limited_figure(asked.test) == figure
        )

    def _key(self, changes: Changes) -> str:
        if changes in self.kept:
            return self.kept[changes].key
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


def rejudge_trials(test: Criterion, trials: Sequence[BisectionTrial]) -> list[BisectionTrial]:
    """Return trials as they answer to a test with another limit, without those that have to be made again.

    Measured again are a trial that was made once and is near the new limit, one that answered differently twice, and
    one that could not be told.
    """
    base = next((t.figures for t in trials if not t.changes), {})
    found = []
    for trial in trials:
        word, near, _ = judge_figures(test, trial.figures, base)
        if word != "unknown" and len(set(trial.answers)) == 1 and not (near and len(trial.answers) < 2):
            found.append(changed(trial, answer=word, answers=(word,) * len(trial.answers), near=near, why=None))
    return found


def read_trials(path: Path) -> list[Any]:
    """Return what trials.jsonl holds, without a last line that was cut off."""
    kinds: Any = BisectionAsked | BisectionTrial
    return list(decode_lines(path.read_bytes(), kinds, str(path), tolerate_tail=True))

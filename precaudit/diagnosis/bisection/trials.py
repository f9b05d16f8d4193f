"""Trials of a bisection: each is made once, kept in a file, repeated where it is near the limit."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion, judge_figures
from precaudit.diagnosis.bisection.records import BisectionAsked, BisectionTrial, Word
from precaudit.errors import CannotJudge, UserError, enough_memory
from precaudit.recording.runs.folders import make_folder
from precaudit.schema.records.base import Number, json_number
from precaudit.schema.records.lines import decode_lines, encode, write_lines

TRIALS, FOUND, RUNS, GOOD = "trials.jsonl", "bisect.json", "runs", "good"
Figures = dict[str, Number]
Measure = Callable[[Changes, Path], Figures]


@dataclass
class Trials:
    """Makes trials and keeps them. ``measure(changes, folder)`` raises UserError where a trial cannot be told.

    ``base``: the figures of A, once it was measured. ``twice``: every trial is made twice, since its answer has no
    figure that could be near a limit.
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
        key = hashlib.sha256(repr((encode(self.asked), changes)).encode()).hexdigest()[:12]
        return self.folder / RUNS / {(): GOOD, self.asked.changes: "bad"}.get(changes, key)

    def _make(self, changes: Changes) -> BisectionTrial:
        key = hashlib.sha256(repr((encode(self.asked), changes)).encode()).hexdigest()[:12]
        trial = BisectionTrial(key=key, changes=changes, answer="unknown", answers=())
        trial = self._once(trial)
        if trial.near or (self.twice and trial.answer != "unknown"):
            trial = self._once(trial)
        with (self.folder / TRIALS).open("ab") as f:
            f.write(encode(trial))
            f.flush()
            os.fsync(f.fileno())
        self.kept[changes] = trial
        self.made += 1
        self.tell(trial)
        return trial

    def _once(self, trial: BisectionTrial) -> BisectionTrial:
        """Measure a trial once, or once more."""
        begun, figures, why = time.perf_counter(), Figures(), ""
        try:
            with enough_memory():
                figures = self.measure(trial.changes, self.run_folder(trial.changes))
            base = self.base if trial.changes else figures
            word, near, why = judge_figures(self.criterion, figures, base)
        except UserError as error:
            word, near, why = "unknown", False, str(error)
        answers: tuple[Word, ...] = (*trial.answers, word)
        seconds = json_number(float(trial.seconds) + time.perf_counter() - begun)
        agreed: Word = word if len(set(answers)) == 1 else "unknown"
        return changed(
            trial, answer=agreed, answers=answers, figures=figures, near=near, why=why or None, seconds=seconds
        )


def read_trials(path: Path) -> list[Any]:
    """Return what trials.jsonl holds, without a last line that was cut off."""
    kinds: Any = BisectionAsked | BisectionTrial
    return list(decode_lines(path.read_bytes(), kinds, str(path), tolerate_tail=True))

"""Bisection by lines of a program: a change lets one line round as it does; A has every line in float32 (JAX).

Trials are emulated, as ``diagnose`` tells what a line gains: one compiled program that takes a truth value a line,
under several realisations of its rounding, over the last calls that were recorded.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion
from precaudit.diagnosis.bisection.tasks import Figures
from precaudit.diagnosis.evidence.effects import UNLIFTED, UNNAMED
from precaudit.diagnosis.evidence.last_call import Last
from precaudit.diagnosis.evidence.raised_lines import BASE, TRIED, Trial
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.progress import Advance
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.program import OUTPUT_LOGITS
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.programs import Opened
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.traced.forward import effort
from precaudit.schema.digits import digits
from precaudit.schema.records.base import json_number


@dataclass(frozen=True)
class LineTrials:
    """Trials of a program whose lines round, all but those that are held in float32."""

    trial: Trial
    criterion: Criterion

    @property
    def changes(self) -> Changes:
        """The lines that round to less than float32."""
        return tuple(line.source for line in self.trial.sizes)

    @property
    def figure(self) -> str:
        """What its output is told by: mean KL where it is logits, else its relative distance from FP64."""
        return "kl" if self.trial.last.distributions else f"forward@{self.trial.last.output}"

    @property
    def kind(self) -> None:
        """The program is in this process: trials are made one after another."""
        return None

    def measure(self, changes: Changes, _folder: Path) -> Figures:
        """Return the figures where these lines round; raises UserError where draws do not tell them from the limit."""
        lines = self.changes
        raised = [i for i, name in enumerate(lines) if name not in changes]
        with jax.enable_x64(True), without_mesh():
            found = self.trial.measure(raised)
            if self._is_open(found.size, found.error):
                found = self.trial.measure(raised, BASE)
        if self._is_open(found.size, found.error):
            raise UserError(
                f"{self.figure} {digits(found.size)} ± {digits(found.error, 1)} over samples of rounding "
                "is at the limit"
            )
        flips: Figures = {"flips": float(found.flips)} if self.trial.last.distributions else {}
        return {self.figure: json_number(found.size), **flips}

    def _is_open(self, size: float, error: float) -> bool:
        """Whether a figure is within two standard errors of the limit."""
        return self.criterion.name == self.figure and bool(abs(size - self.criterion.limit) <= 2 * error)


def line_trials(reference: str, folder: Path, criterion: Criterion, tell: Advance) -> LineTrials:
    """Record a program and compile it for its lines to be tried; raises UserError where that is not possible."""
    program = load_program(reference)
    options = ProgramTraceOptions(reference, force=True, command=f"precaudit bisect {reference}")
    opened: Opened = trace_program(program, folder, options=options, tell=tell)
    names = [p.name for p in opened.record.outputs]
    if not names:
        raise UserError(UNNAMED)
    entry = traced_entries(opened, program)[-1]
    last = Last(entry.opened, entry.program, entry.made, OUTPUT_LOGITS if OUTPUT_LOGITS in names else names[0])
    cases = opened.record.cases[:TRIED]
    try:
        with jax.enable_x64(True), without_mesh():
            trial = Trial.of(last, cases, effort(last.made))
            if trial.sizes and not np.isfinite(trial.measure(()).size):
                trial = Trial.of(last, cases, None)
    except UNLIFTED as error:
        raise UserError(f"{reference}: {str(error).splitlines()[0]}") from None
    if len(trial.sizes) == 0:
        raise UserError(f"{reference}: no line of it rounds to less than float32: nothing to bisect")
    found = LineTrials(trial, criterion)
    if criterion.name not in (found.figure, "flips") or criterion.times:
        raise UserError(
            f"--by lines: trials measure {found.figure} and flips as numbers; --test {criterion.text} is none"
        )
    return found

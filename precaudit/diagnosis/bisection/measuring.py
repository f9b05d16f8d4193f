"""The figures of a trial: a run is recorded as ``trace`` does, compared, and judged."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precaudit.diagnosis.bisection.limits import Criterion
from precaudit.diagnosis.bisection.tasks import Figures
from precaudit.judging.figures import error_figures
from precaudit.judging.gate import gate
from precaudit.judging.recalled import recall_any
from precaudit.progress import Progress
from precaudit.recording.opening import open_any
from precaudit.recording.runs.bits import compare_bits
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.trace import TraceOptions, check_request, trace
from precaudit.references.comparison.between import compare_runs
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.records.errors import PairError
from precaudit.schema.selection import Selection


@dataclass(frozen=True)
class Measuring:
    """How trials are measured. ``against``: FP64, or the run of A; ``prompts``, ``select``: as ``trace`` takes them.

    ``good``: the folder of A's run, whose tokens all others are fed.
    """

    criterion: Criterion
    against: str
    prompts: Any
    select: Selection
    traced: TraceOptions
    compared: CompareOptions
    progress: Progress
    good: Path

    def check(self, subject: Subject) -> None:
        """Raise UserError where a model cannot be recorded so, before an end of the search cannot be told for that."""
        check_request(subject, self.prompts, self.select, self.traced)

    def measure(self, subject: Subject, folder: Path) -> Figures:
        """Record a model into a folder and return its figures."""
        fed = None if folder == self.good else self.good
        prompts = self.prompts if fed is None else None
        run = trace(subject, folder, prompts, self.select, replace(self.traced, tokens_from=fed), self.progress)
        if self.against == "fp64":
            compare(run, None, None, self.compared, self.progress.advance)
        return read_figures(folder, self.good, self.against, self.criterion)


def read_figures(folder: Path, good: Path, against: str, criterion: Criterion) -> Figures:
    """Return the figures of a run that was recorded, and compared where it is held against FP64; ``good``: A's run."""
    if criterion.name == "differing":
        return {"differing": float(compare_bits(open_any(good), open_any(folder)).differing)}
    if against == "good":
        return error_figures(compare_runs(folder, good).errors, PairError)
    figures = error_figures(recall_any(folder).errors)
    return figures | ({"verdict": float(gate(folder).exit_code)} if criterion.name == "verdict" else {})


def points_for(criterion: Criterion, given: str | None) -> str | None:
    """Return the points that a model's trials record: those asked for, else logits and what the test is about."""
    if given is not None:
        return given
    if criterion.name in ("verdict", "differing"):
        return None
    return ",".join(dict.fromkeys(("logits", criterion.point or "logits")))

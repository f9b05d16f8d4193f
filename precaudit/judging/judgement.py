"""What the gate decided: verdicts, counts of each status, and the exit code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from precaudit.judging.baselines import Drift
from precaudit.judging.farthest import Farthest
from precaudit.judging.verdicts import Status, Verdict, exit_code
from precaudit.schema.brief import Brief
from precaudit.schema.frames import flat, frame, list_column, worst_columns


@dataclass(frozen=True, repr=False)
class Judgement(Brief):
    """Every verdict that is no pass, how many there are of each status, and what a reader should know.

    ``verdicts``: by status, then in program order; a tuple, or where they are many a sequence that is in a file.
    ``places``: every layer and point that was judged; ``sources``: the ``FILE:LINE`` that made a program's point;
    ``of``: what the records are of; ``besides``: what makes a run's errors besides rounding, and is meant
    (``policies.besides``); ``farthest``: how far values are from FP64, whatever explains it.
    """

    name: str
    verdicts: Sequence[Verdict]
    counts: dict[Status, int]
    notes: tuple[str, ...] = ()
    drift: tuple[Drift, ...] = ()
    places: tuple[tuple[int | None, str], ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    of: Literal["errors", "rollouts"] = "errors"
    besides: str = ""
    farthest: Farthest | None = None

    @property
    def exit_code(self) -> int:
        """0 all that ran pass, 1 a fail or nonfinite, 3 otherwise; nothing judged is 3 (docs/exit-codes.md)."""
        return exit_code(self.counts)

    def raise_for_failure(self) -> None:
        """Raise AssertionError, with the first verdict's sentence, where the exit code is not 0."""
        __tracebackhide__ = True
        if self.exit_code:
            first = next((v for v in self.verdicts if v.status != "not run"), None)
            what = "nothing was judged" if first is None else f"{first.point}: {first.status}: {first.text}"
            raise AssertionError(f"{self.name}: {what}")

    def frame(self) -> Any:
        """Return the verdicts that are no pass as a pandas DataFrame, always with the same columns."""
        return frame(self.verdicts, (*flat(Verdict), list_column("index"), *worst_columns()))

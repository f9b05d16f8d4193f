"""What compare has written beside a run of any kind: its error records, and where they come from."""

from functools import singledispatch
from pathlib import Path
from typing import Any

from precaudit.judging.baselines import BaselineRecord, provenance
from precaudit.judging.programs import program_provenance
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.opening import AnyRun, open_any
from precaudit.recording.runs.compared_programs import recall_program
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison, recall


def recall_any(run: AnyRun | Path | str) -> Comparison[Any]:
    """Return what compare found of a run, of a model, a dump of one, or a program; its records stay in their file.

    Raises UserError where it was not compared.
    """
    return _recalled(open_any(run, partial=True, held=False))


@singledispatch
def _recalled(run: Any) -> Comparison[Any]:
    raise TypeError(f"{type(run).__name__} is no run")


@_recalled.register
def _(run: Run) -> Comparison[Run]:
    return recall(run, held=False)


@_recalled.register
def _(run: Imported) -> Comparison[Run]:
    return recall(run.folder, held=False)


@_recalled.register
def _(run: Opened) -> Comparison[Opened]:
    return recall_program(run)


@singledispatch
def provenance_of(run: Any) -> BaselineRecord:
    """Return where the errors of a run come from."""
    raise TypeError(f"{type(run).__name__} is no run")


@provenance_of.register
def _(run: Run) -> BaselineRecord:
    return provenance(run)


@provenance_of.register
def _(run: Opened) -> BaselineRecord:
    return program_provenance(run)

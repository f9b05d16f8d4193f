"""What compare has written beside a run of any kind: its error records, and where they come from."""

from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

from precaudit.judging.baselines import BaselineRecord, provenance
from precaudit.judging.programs import program_provenance
from precaudit.recording.opening import AnyRun, open_any
from precaudit.recording.runs.compared_programs import filed_errors
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison, recall
from precaudit.schema.records.errors import ErrorRecord


def recall_any(run: AnyRun | Path | str) -> Comparison | Opened:
    """Return a run whose records stay in their files: of a model, or a dump of one, with what compare found.

    Raises UserError where a run of a model was not compared; of a program ``filed_errors`` does.
    """
    opened = open_any(run, partial=True, held=False)
    if isinstance(opened, Opened):
        return opened
    return recall(opened if isinstance(opened, Run) else opened.folder, held=False)


@singledispatch
def records_of(found: Any) -> Sequence[ErrorRecord]:
    """Return the error records of what ``recall_any`` gives; raises UserError where there are none."""
    raise TypeError(f"{type(found).__name__} is no run")


@records_of.register
def _(found: Comparison) -> Sequence[ErrorRecord]:
    return found.errors


@records_of.register
def _(found: Opened) -> Sequence[ErrorRecord]:
    return filed_errors(found)


@singledispatch
def provenance_of(found: Any) -> BaselineRecord:
    """Return where the errors of what ``recall_any`` gives come from."""
    raise TypeError(f"{type(found).__name__} is no run")


@provenance_of.register
def _(found: Comparison) -> BaselineRecord:
    return provenance(found.run)


@provenance_of.register
def _(found: Opened) -> BaselineRecord:
    return program_provenance(found)

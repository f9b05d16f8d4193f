"""Two runs of models against each other, as pieces of some layers of a prompt, by whichever executor. No JAX."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from precaudit.errors import UserError
from precaudit.numbers.executors import Executor, in_waves
from precaudit.progress import Advance
from precaudit.recording.opening import against_folder
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison
from precaudit.references.comparison.between import open_same
from precaudit.references.comparison.pairs import (
    PairPiece,
    differences,
    divide_cases,
    no_common_text,
    pair_errors,
    side_of,
    tokens_note,
)
from precaudit.references.comparison.selected import verify
from precaudit.schema.filed import Filed
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord
from precaudit.schema.records.lines import write_lines
from precaudit.writing import made_folder


@dataclass(frozen=True)
class ModelPair:
    """Two runs of models, the candidate first, and what is selected; another process opens them again."""

    runs: tuple[Run, Run]
    selected: Selected

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Another process has nothing open."""
        return _open_again, (self.selected, *((x.folder.absolute(), x.record.id) for x in self.runs))

    @cached_property
    def parts(self) -> tuple[Callable[[str], Run], ...]:
        """What gives the part of a prompt, of each run."""
        return tuple(x.by_prompt() for x in self.runs)

    def of(self, prompt: str) -> list[Recorded]:
        """Return a prompt of the runs that have it, the candidate first."""
        return [
            Recorded.of(part(prompt)) for part, run in zip(self.parts, self.runs, strict=True) if prompt in run.prompts
        ]


class PairRecords(NamedTuple):
    """The records of a piece, and what a reader should know."""

    records: list[ErrorRecord]
    notes: list[str]


def _open_again(selected: Selected, *given: tuple[Path, str]) -> ModelPair:
    a, b = (open_same(*one) for one in given)
    return ModelPair((a, b), selected)


def pair_records(shared: ModelPair, piece: PairPiece, tell: Advance) -> PairRecords:
    """Return the records of a piece; every tensor of the candidate's layers is read, compared or not."""
    selected, (a, *others) = shared.selected, shared.of(piece.case)
    layers = piece.of((*selected.layers, None))
    verify(a, (piece.case,), layers, tell)
    found = PairRecords([], [])
    for b in others:
        note = tokens_note(side_of(a), side_of(b), piece.case)
        found.notes.extend([note] if note and not piece.part else [])
        for layer, phase, point in product(layers, selected.phases, selected.points):
            if POINTS[point].per_layer == (layer is not None):
                found.records.extend(pair_errors(a, b, Place(piece.case, phase, 0, layer, point)))
    return found


def compare_models(pair: ModelPair, held: bool, tell: Advance, by: Executor) -> Comparison[Run]:
    """Compare two runs, a prompt at a time; files go to RUN/against/<AGAINST>/. ``held``: as ``compare_runs`` has it.

    Raises UserError where they have no prompt in common.
    """
    run, against = pair.runs
    prompts = pair.selected.prompts
    if not any(p in against.prompts for p in prompts):
        said = no_common_text((run.folder, prompts), (against.folder, [*against.prompts]), "prompts")
        raise UserError(f"{said}. Next: precaudit trace with --tokens-from {against.folder}, which runs the same")
    notes = differences(run.record, against.record)

    def errors() -> Iterator[ErrorRecord]:
        for some in in_waves(by, pair_records, pair, divide_cases(prompts, by), tell):
            notes.extend(some.notes)
            yield from some.records

    folder = against_folder(run.folder, against.folder)
    with made_folder(folder):
        write_lines(folder / "errors.jsonl", errors())
    filed = Filed(folder / "errors.jsonl", ERROR_KINDS)
    return Comparison(run, list(filed) if held else filed, [], tuple(notes), folder, against, peaks=by.peaks)

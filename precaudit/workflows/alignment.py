"""``align``: which parameter of one side is which tensor of the other, by values alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from precaudit.recording.programs.loading import is_reference, load_program
from precaudit.recording.programs.program import Program
from precaudit.workflows.keywords import progress_of
from precaudit.workflows.signatures import Telling

if TYPE_CHECKING:
    from precaudit.references.alignment.records import Aligned


def align(own: object, theirs: object, *, points: bool = False, progress: Telling = None) -> "Aligned":
    """Return which parameters of ``own`` are which tensors of ``theirs``, found by values.

    Each: a Program, ``FILE.py:NAME``, a checkpoint as ``trace`` takes it, or a tree of arrays of floats.
    ``points``: also which points of a Program are which of the model's reference, for which it runs.
    ``progress=True`` shows a bar.

    Raises UserError for what cannot be opened, CannotJudge where nothing is common or a value is NaN.

    >>> precaudit.align({"w": x.T}, {"weight": x}).parts[0].tensors  # doctest: +SKIP
    'weight'
    """
    from precaudit.references.alignment.align import align_sides
    from precaudit.references.alignment.program_points import program_points
    from precaudit.references.alignment.records import Aligned
    from precaudit.references.alignment.sides import side_of

    with progress_of(progress) as told:
        given, label = _loaded(own, "the first")
        found = align_sides(side_of(given, label), side_of(*_loaded(theirs, "the second")), told.advance)
        config, tensors = found.theirs.config, found.theirs.tensors
        if not points or not isinstance(given, Program) or config is None:
            return Aligned(found)
        return Aligned(found, program_points(given, config, lambda name: tensors[name].read()))


def _loaded(subject: Any, label: str) -> tuple[Any, str]:
    """Return what is aligned, a program that is named loaded, and what it is called."""
    named = isinstance(subject, str | Path)
    return (load_program(str(subject)), str(subject)) if named and is_reference(str(subject)) else (subject, label)

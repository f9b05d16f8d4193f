"""Where a program's run has values: its points, and the recorded steps of the scans that each is in."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from precaudit.recording.runs.programs import CARRIED, ProgramPoint, ProgramRun

if TYPE_CHECKING:
    from precaudit.numbers.arrays import Array


def judged_places(run: ProgramRun) -> Iterator[tuple[ProgramPoint, int | None]]:
    """Yield every point that is judged, with each recorded step of its scans, counted through; None where in none."""
    return ((p, layer) for p in run.judged_points for layer in steps_of(run, p))


def steps_of(run: ProgramRun, p: ProgramPoint) -> Iterator[int | None]:
    """Yield the recorded steps of a point's scans, counted through; None where it is in none."""
    for i in range(prod(p.stacked)) if p.stacked else (None,):
        yield i if i is None or run.layers is None else _layer(p, i, run.layers)


def recomputed_places(run: ProgramRun) -> Iterator[tuple[ProgramPoint, int | None]]:
    """Yield the same but for the states of loops, which no operation of their own makes: what has local records."""
    return ((p, layer) for p, layer in judged_places(run) if p.primitive != CARRIED)


def compared_places(run: ProgramRun) -> list[tuple[ProgramPoint, int | None]]:
    """Return what has forward records: every point that is judged, with each step of its scans, and the outputs."""
    return [*judged_places(run), *((p, None) for p in run.outputs)]


def index_of(run: ProgramRun, p: ProgramPoint, layer: int | None) -> int:
    """Return where a step of a point's scans lies among those that were recorded."""
    if layer is None or run.layers is None:
        return layer or 0
    inner = prod(p.stacked[1:])
    return run.layers.index(layer // inner) * inner + layer % inner


def _layer(p: ProgramPoint, i: int, layers: tuple[int, ...]) -> int:
    inner = prod(p.stacked[1:])
    return layers[i // inner] * inner + i % inner


def step_values(run: ProgramRun, p: ProgramPoint, layer: int | None, x: "Array") -> "Array":
    """Return a step of a point's recorded values, in the point's own shape."""
    return x.reshape(-1, *p.shape)[index_of(run, p, layer)]


def not_taken(run: ProgramRun, p: ProgramPoint, layer: int | None, taps: "Mapping[str, Array]") -> str | None:
    """Return why a point was not run in a step of its loops: a branch that was not taken, or a loop that had ended.

    None where it was run.
    """
    marks = taps.get(f"{p.name}@taken")
    if marks is None:
        return None
    taken = marks.reshape(-1)  # of the loops around the branch; the point may be in more, within it
    if taken[index_of(run, p, layer) * len(taken) // max(prod(p.stacked), 1)]:
        return None
    return "its loop had ended, or its branch was not taken" if run.loops and p.stacked else "its branch was not taken"

"""Faults of the shipped decoder that its auditor was never told of, after public bug reports and papers."""

from benchmarks.cells.activations import ACTIVATIONS
from benchmarks.cells.caches import CACHES
from benchmarks.cells.cell import Cell
from benchmarks.cells.configurations import CONFIGURATIONS
from benchmarks.cells.logits import LOGITS
from benchmarks.cells.masks import MASKS
from benchmarks.cells.norms import NORMS
from benchmarks.cells.numerics import NUMERICS
from benchmarks.cells.quantised import QUANTISED
from benchmarks.cells.rope import ROPE
from benchmarks.cells.scores import SCORES
from benchmarks.cells.stream import STREAM
from benchmarks.cells.weights import WEIGHTS

THEMES: dict[str, tuple[Cell, ...]] = {
    "norms": NORMS, "scores": SCORES, "masks": MASKS, "rope": ROPE, "weights": WEIGHTS, "activations": ACTIVATIONS,
    "caches": CACHES, "stream": STREAM, "logits": LOGITS, "quantised": QUANTISED, "numerics": NUMERICS,
    "configurations": CONFIGURATIONS,
}  # fmt: skip
CELLS = tuple(cell for cells in THEMES.values() for cell in cells)

__all__ = ["CELLS", "THEMES", "Cell"]

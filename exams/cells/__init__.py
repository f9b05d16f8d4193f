"""Faults of the shipped decoder that its auditor was never told of, after public bug reports and papers."""

from exams.cells.activations import ACTIVATIONS
from exams.cells.caches import CACHES
from exams.cells.cell import Cell
from exams.cells.configurations import CONFIGURATIONS
from exams.cells.logits import LOGITS
from exams.cells.masks import MASKS
from exams.cells.norms import NORMS
from exams.cells.numerics import NUMERICS
from exams.cells.quantised import QUANTISED
from exams.cells.rope import ROPE
from exams.cells.scores import SCORES
from exams.cells.stream import STREAM
from exams.cells.weights import WEIGHTS

THEMES: dict[str, tuple[Cell, ...]] = {
    "norms": NORMS, "scores": SCORES, "masks": MASKS, "rope": ROPE, "weights": WEIGHTS, "activations": ACTIVATIONS,
    "caches": CACHES, "stream": STREAM, "logits": LOGITS, "quantised": QUANTISED, "numerics": NUMERICS,
    "configurations": CONFIGURATIONS,
}  # fmt: skip
CELLS = tuple(cell for cells in THEMES.values() for cell in cells)

__all__ = ["CELLS", "THEMES", "Cell"]

"""A heat map as characters: which cell is in which row and column, and how each is drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from precaudit.reports.cells import Cell, weight
from precaudit.reports.charts import OUTSIDE, STEPS, band, bands

SHADES = ("  ", "░░", "░░", "▒▒", "▓▓", "▒▒", "▓▓", "██")  # by band: up to the limit, and beyond it
COOL, HOT = ("#35506b", "#4a78a8", "#5f9bd6"), ("#d9822b", "#e0502f", "#ff3b3b")
COLOURS = (COOL[0], COOL[0], COOL[1], COOL[1], COOL[2], *HOT)
STYLES = {"✗": "bold white on #a01c1c", "~": "bold #ffb454", "?": "bold #d7c21f", "–": "#808080"}
NOTHING = ("  ", "")
At = tuple[int, int]  # a row and a column


@dataclass(frozen=True)
class Grid:
    """The cells of a map in rows (points) and columns (layers; None, outside layers, the last)."""

    kind: str = "local"
    points: tuple[str, ...] = ()
    layers: tuple[int | None, ...] = ()
    cells: Mapping[tuple[int | None, str], Cell] = field(default_factory=dict)

    def at(self, at: At) -> Cell | None:
        """Return the cell of a row and column; None where there is none."""
        row, column = at
        if not (0 <= row < len(self.points) and 0 <= column < len(self.layers)):
            return None
        return self.cells.get((self.layers[column], self.points[row]))

    @property
    def worst(self) -> At:
        """The row and column of the cell to look at first."""
        if not self.cells:
            return 0, 0
        return self.find(max(self.cells.values(), key=weight))

    def find(self, c: Cell) -> At:
        """Return the row and column of a cell of this map or of another; the first where it has none."""
        row = self.points.index(c.point) if c.point in self.points else 0
        return row, self.layers.index(c.layer) if c.layer in self.layers else 0

    def within(self, one: At, other: At) -> Iterator[Cell]:
        """Yield the cells of the rectangle between two corners."""
        (r0, r1), (c0, c1) = sorted((one[0], other[0])), sorted((one[1], other[1]))
        every = (self.at((row, column)) for row in range(r0, r1 + 1) for column in range(c0, c1 + 1))
        yield from (c for c in every if c is not None)

    @property
    def width(self) -> int:
        """Characters of a column: its number, and a gap."""
        return max((len(head(layer)) for layer in self.layers), default=2) + 1


def grid_of(kind: str, maps: Mapping[str, Sequence[Cell]], order: Sequence[str]) -> Grid:
    """Return the grid of a map; ``order``: points as the program makes them."""
    found = {(c.layer, c.point): c for c in maps.get(kind, ())}
    there, place = {point for _, point in found}, {point: i for i, point in enumerate(order)}
    points = sorted(there, key=lambda p: (place.get(p, len(place)), p))
    layers = sorted({layer for layer, _ in found if layer is not None})
    outside = (None,) if any(layer is None for layer, _ in found) else ()
    return Grid(kind, tuple(points), (*layers, *outside), found)


def head(layer: int | None) -> str:
    """Return the name of a column."""
    return OUTSIDE if layer is None else str(layer)


def drawn(c: Cell | None, kind: str) -> tuple[str, str]:
    """Return two characters and their style: what fails or is not known by its mark, what passes by its size."""
    if c is None:
        return NOTHING
    if c.status != "pass":
        return f" {c.mark}", STYLES[c.mark]
    scale = kind if kind in STEPS else "forward"  # of a run beside another: times what rounding makes
    i = bands(scale).index(band(scale, c.size))
    return ("··", COOL[0]) if i >= len(SHADES) else (SHADES[i] if i else "··", COLOURS[i])

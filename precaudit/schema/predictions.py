"""What is said of a predicted run: whether taps changed how products are made, and what rounding may change."""

from collections.abc import Iterable, Iterator

from precaudit.schema.digits import digits
from precaudit.schema.records.base import value
from precaudit.schema.records.runs import Prediction, Products

Phase = tuple[str, Prediction | None]  # a phase, or a case of a program, and what was predicted of it
UNITS = {"passes1": "in 1 pass", "passes3": "in 3 passes", "passes6": "in 6 passes", "vector": "on the vector unit"}


def prediction_notes(phases: Iterable[Phase]) -> Iterator[str]:
    """Yield whether bare and instrumented program make the same products, and what rounding inside fusions changes."""
    found = list(dict.fromkeys((name, p) for name, p in phases if p is not None))
    if not found:
        return
    same = [f"{name}: {_products_text(p.bare)}" for name, p in found if p.bare == p.captured]
    other = [
        f"{name}: {_products_text(p.bare)}, {_products_text(p.captured)}" for name, p in found if p.bare != p.captured
    ]
    if same:
        yield f"the compiler has the same products without taps and with them ({'; '.join(dict.fromkeys(same))})"
    if other:
        yield f"the compiler has other products without taps than with them ({'; '.join(dict.fromkeys(other))})"
    if kernels := dict.fromkeys(k for _, p in found for k in p.kernels):
        yield f"Pallas kernels ran in interpret mode, with a CPU's products: {', '.join(kernels)}"
    sizes: dict[str, float] = {}
    for name, p in found:
        sizes[name] = max(sizes.get(name, 0.0), 0.0 if p.inside is None else value(p.inside))
    if any(sizes.values()):
        each = ", ".join(f"{name} by {digits(size, 2)}" for name, size in sizes.items())
        yield f"bfloat16 results inside fusions, rounded or not, change outputs (relative): {each}; taken as rounded"


def _products_text(made: Products) -> str:
    return ", ".join(f"{n} {how}" for unit, how in UNITS.items() if (n := getattr(made, unit))) or "none"

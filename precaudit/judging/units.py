"""What a compiler did with a run's products that a reader of the program would not expect, in words."""

from collections import Counter

from precaudit.recording.runs.programs import ProgramRun
from precaudit.schema.records.devices import PRODUCT, SplitSum, device_kind

ON_GPU = {
    "1 TF32 pass": "{} of float32 operands in TF32, which keeps 11 of their 24 significant bits: precision="
    '"highest", or jax.default_matmul_precision("highest") around the program, keeps all',
    "rounded products": "{} with each term rounded to its narrow format before the float32 sum, as XLA does to "
    "products with one row: preferred_element_type=float32 keeps the terms",
}


def unit_notes(run: ProgramRun) -> list[str]:
    """Return what a GPU did with products, and which sums of products several devices make in parts."""
    return [*_on_gpu(run), *_in_parts(run)]


def _on_gpu(run: ProgramRun) -> list[str]:
    if device_kind(run.device) != "gpu" or not run.neutrality:
        return []
    made = [ways for label, ways in run.neutrality[0].made.items() if label]
    counts = {way: sum(way in ways for ways in made) for way in ON_GPU}
    return [f"this GPU computes {text.format(_products(counts[way]))}" for way, text in ON_GPU.items() if counts[way]]


def _in_parts(run: ProgramRun) -> list[str]:
    counts = Counter[tuple[str, SplitSum]]()
    for noted in (run.neutrality, *(x.neutrality for x in run.then)):
        counts.update((label.partition(".")[0], how) for first in noted[:1] for label, how in first.split.items())
    return [
        f"{_products(n) if kind == PRODUCT else _sums(n)} summed over {how.parts} devices: every device rounds its "
        f"part to 16 bits, and parts are added in {how.summed}"
        + ("" if how.summed == "float32" else ": the sum is rounded with every part")
        for (kind, how), n in counts.items()
    ]


def _sums(n: int) -> str:
    return "1 gradient of a broadcast" if n == 1 else f"{n} gradients of broadcasts"


def _products(n: int) -> str:
    return f"{n} product" if n == 1 else f"{n} products"

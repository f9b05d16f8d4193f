"""What a mesh does to a model's numbers, in words: what its sums of parts cost, and how they are made."""

from precaudit.diagnosis.evidence.mesh_costs import MeshCost
from precaudit.schema.records.devices import SplitSum


def cost_text(c: MeshCost) -> str:
    """Return what a sum of parts costs, and what parts in float32 would."""
    phases = f" in {' and '.join(c.phases)}" if c.phases else ""
    head = f"the sum over model={c.model} at {c.point}{phases}"
    if c.unknown is not None:
        return f"{head}: unknown what it costs: {c.unknown}"
    if c.split is None:
        return f"{head}: no part of it is rounded to 16 bits before it is added"
    exchanged = "the same bytes" if c.bytes == 1 else f"{c.bytes:.2g} × the bytes"
    return (
        f"{head} is {split_text(c.split, c.held)}: {c.times:.2f} × the error of one device; float32 partial sums: "
        f"{c.wide:.2f} ×, {exchanged} exchanged"
    )


def split_text(split: SplitSum, held: str) -> str:
    """Return how a sum is made in parts, each rounded to the format ``held``."""
    if split.summed == held:
        return f"rounded to {held} with every one of its {split.parts} parts"
    return f"made in {split.parts} parts, each rounded to {held}, and added in {split.summed}"

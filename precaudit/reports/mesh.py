"""What a mesh does to a model's numbers, in words: what its sums of parts cost, and what they change."""

from collections.abc import Sequence

from precaudit.diagnosis.evidence.across import (
    BROKEN,
    EQUAL,
    ROUNDING,
    UNKNOWN,
    WORST,
    AcrossMeshes,
    PartedSum,
    PointAcross,
)
from precaudit.diagnosis.evidence.mesh_costs import MeshCost
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Mark, Report, Section
from precaudit.schema.digits import digits, ratio
from precaudit.schema.meshes import ONE, MeshShape
from precaudit.schema.places import point_text
from precaudit.schema.records.devices import SplitSum

VERDICTS: dict[str, tuple[Mark, str]] = {
    EQUAL: ("✓", "on every mesh the run's tokens give its bits."),
    ROUNDING: ("✓", "on every mesh the run's tokens give its numbers, up to rounding."),
    BROKEN: ("✗", "a mesh changes the run's numbers by more than rounding."),
    UNKNOWN: ("?", "not every point can be judged on every mesh."),
}


def cost_text(c: MeshCost) -> str:
    """Return what a sum of parts costs, and what parts in float32 would."""
    phases = f" in {' and '.join(c.phases)}" if c.phases else ""
    head = f"the sum over model={c.model} at {c.point}{phases}"
    if c.unknown is not None:
        return f"{head}: unknown what it costs: {c.unknown}"
    if c.split is None:
        return f"{head}: no part of it is rounded to 16 bits before it is added"
    exchanged = "the same bytes" if c.bytes == 1 else f"{digits(c.bytes, 2)} × the bytes"
    return (
        f"{head} is {split_text(c.split, c.held)}: {ratio(c.times)} × the error of one device; float32 partial sums: "
        f"{ratio(c.wide)} ×, {exchanged} exchanged"
    )


def split_text(split: SplitSum, held: str) -> str:
    """Return how a sum is made in parts, each rounded to the format ``held``."""
    if split.summed == held:
        return f"rounded to {held} with every one of its {split.parts} parts"
    return f"computed in {split.parts} parts, each rounded to {held}, and added in {split.summed}"


def across_report(found: Sequence[AcrossMeshes], own: MeshShape) -> Report:
    """Return what meshes change of a run: where that begins and by which sums, then every point on every mesh."""
    worst = max((w.status for w in found), key=WORST.index, default=UNKNOWN)
    mark, sentence = VERDICTS[worst]
    lines = [
        f"Sharding: {_mesh_text(w.mesh)} against the run's {_mesh_text(own)}: {w.status}{_begins(w)}" for w in found
    ]
    lines += [f"  {p.point}: {p.why}" for w in found for p in w.points if p.status in (BROKEN, UNKNOWN) and p.why]
    points = dict.fromkeys(p.point for w in found for p in w.points)
    cells = {(w.mesh, p.point): _cell(p) for w in found for p in w.points}
    rows = tuple((point, *(cells.get((w.mesh, point), "") for w in found)) for point in points)
    columns = ("point", *(_mesh_text(w.mesh) for w in found))
    table = Table("farthest from the run, × the noise of rounding", columns, rows, columns)
    return Report(Headline(mark, sentence), (Section(lines=tuple(dict.fromkeys(lines)), tables=(table,)),))


def _mesh_text(mesh: MeshShape) -> str:
    """Return a mesh in words."""
    return "one device" if mesh == ONE else ",".join(f"{name}={n}" for name, n in mesh.axes.items() if n > 1)


def _begins(w: AcrossMeshes) -> str:
    """Return where bits part first, and the sums of parts that are made until there."""
    if w.first is None:
        return ""
    if w.status == BROKEN and w.fails is not None:
        fails = f"first beyond rounding at {point_text(w.fails)} in {w.fails.phase}"
        return f", {fails}, whose own error fails on only one of the two"
    if w.status == BROKEN:
        return f", bits first differ at {point_text(w.first)} in {w.first.phase}; no operation's own error fails"
    causes = "; ".join(dict.fromkeys(map(_sum_text, w.sums)))
    why = causes or "no other sum of parts is before it; the compiler adds up or fuses differently"
    return f", first at {point_text(w.first)} in {w.first.phase}: {why}"


def _sum_text(s: PartedSum) -> str:
    how = "of parts that are not rounded, in another order" if s.split is None else split_text(s.split, s.held)
    return f"the sum over model={s.model} at {s.point} is {how}"


def _cell(p: PointAcross) -> str:
    return p.status if p.noises != p.noises or p.status == EQUAL else f"{p.status}, {digits(p.noises, 2)} ×"

"""Which tensors a run holds when it holds all that was requested: the plan of trace, the yardstick of compare."""

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from precaudit.numbers.formats import FORMATS
from precaudit.schema.graphs.decoder import (
    BETWEEN_LAYERS,
    CACHES,
    LOGITS,
    POINTS,
    STREAM,
    inputs_of,
    present,
    shape_of,
)
from precaudit.schema.policies import Policy
from precaudit.schema.records.runs import Requested
from precaudit.schema.selection import parse_positions

if TYPE_CHECKING:
    from precaudit.schema.configuration import DecoderConfig

HASH_FORMAT, HASH_BYTES = "uint32", 4  # of a row of a cache (numbers/row_hashes.py)
LANES = 2
SUMS, WORDS = ".sums", 5  # of rows: after the name of their point; words of a row (precaudit/numbers/row_sums.py)
Key = tuple[str, int, int | None, str]


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor: where it belongs, which positions it holds along T (caches: along S), and whether as support.

    ``hashed``: a hash of every row instead of the rows (numbers/row_hashes.py). ``summed``: the layers of which it
    holds sums of every row instead (precaudit/numbers/row_sums.py).
    """

    phase: str
    step: int
    layer: int | None
    point: str
    positions: tuple[int, ...]
    keys: int
    support: bool
    hashed: bool = False
    summed: int = 0

    @property
    def axes(self) -> str:
        """Its axes: the point's, or rows and words of their hashes; layers, rows and words of sums."""
        return "LTW" if self.summed else "SW" if self.hashed else POINTS[self.point].axes

    @property
    def source(self) -> str:
        """The point whose value it is made of."""
        return self.point.removesuffix(SUMS)

    @property
    def key(self) -> Key:
        """What identifies it within a prompt."""
        return (self.phase, self.step, self.layer, self.point)

    def shape(self, config: "DecoderConfig") -> tuple[int, ...]:
        """Its shape, without batch."""
        if self.summed:
            return (self.summed, len(self.positions), WORDS)
        if self.hashed:
            return (self.keys, LANES)
        return shape_of(self.axes, config, len(self.positions), self.keys)


def config_of(recorded: dict[str, Any]) -> "DecoderConfig":
    """Return the configuration that run.json holds; raises msgspec.ValidationError where it is none."""
    import msgspec

    from precaudit.schema.configuration import DecoderConfig

    return msgspec.convert(recorded, DecoderConfig)


def formula_keys(requested: Requested, config: "DecoderConfig", phases: Collection[str]) -> Iterator[Key]:
    """Yield every place the program's FP64 shadow is compared with the reference, of any one prompt.

    All layers, of the points recorded, attn_out, resid_out and logits: what comes before shows in them. Scores and
    probs show in attn_out, and grow with the square of the length.
    """
    recorded = {*requested.points, *requested.support}
    wanted = {p.name for p in POINTS.values() if (p.name in recorded or p.milestone) and not p.over_keys}
    for phase in phases:
        for step in decode_steps_of(requested) if phase == "decode" else range(1):
            for point in (p for p in POINTS if p in wanted and (phase == "decode" or not POINTS[p].state)):
                for layer in range(config.layers) if POINTS[point].per_layer else (None,):
                    yield (phase, step, layer, point)


def decode_steps_of(requested: Requested) -> Sequence[int]:
    """The decode steps: decode0, and those that continue it; of an imported dump, those that it has."""
    every = range(requested.decode_steps + 1)
    return [s for s in every if recorded_in(requested, "decode", s)] if requested.calls else every


def recorded_in(requested: Requested, phase: str, step: int) -> tuple[str, ...]:
    """Return the points that a call was asked for; of an imported dump, those that it has of the call."""
    if requested.calls:
        return requested.calls.get(f"{phase} {step}", ())
    return (*requested.points, *requested.support)


def has_inputs(requested: Requested, config: "DecoderConfig", key: Key) -> bool:
    """Whether what an operation reads was asked for, so that it has a local error.

    It always is, but in an imported dump, which may hold a point and not what the point is made of.
    """
    if not requested.calls:
        return True
    phase, step, layer, point = key
    row, names = POINTS[point], set(inputs_of(point, config.sparse))
    if not names <= set(recorded_in(requested, phase, step)):
        return False
    if phase == "decode" and row.reads_keys:
        every = [("prefill", 0), *(("decode", s) for s in range(1, requested.decode_steps + 1))]
        return all(names & CACHES.keys() <= set(recorded_in(requested, *call)) for call in every)
    outside = layer is not None or not any(POINTS[n].per_layer for n in names)
    return outside or config.layers - 1 in requested.layers


def is_handed_on(requested: Requested, phase: str, step: int, layer: int | None) -> bool:
    """Whether what a layer was handed was asked for: layer 0, and layers whose predecessor is recorded, too."""
    if layer is None or (layer and layer - 1 not in requested.layers):
        return False
    return layer == 0 or not requested.calls or STREAM in recorded_in(requested, phase, step)


def judged_by_sums(points: Collection[str], support: Collection[str], sparse: bool) -> tuple[str, ...]:
    """Return the points that sums of their rows judge where ``points`` and their ``support`` are recorded.

    The residual stream, by the sums of its summands; norms that are support, and operations that can be made from what
    is recorded of their layer. In program order.
    """
    held = {*points, *support}

    def is_judged(name: str) -> bool:
        row = POINTS[name]
        if row.kind == "norm":
            return name in support
        if name in support or not row.per_layer:
            return False
        if row.kind == "projection":
            return unrecorded_path(name, held, sparse) is not None
        return row.kind == "sum" or (row.kind == "score" and held.issuperset(row.inputs))

    return tuple(name for name in present(sparse) if name not in points and is_judged(name))


def summed_places(requested: Requested, layers: int, sparse: bool, phase: str) -> Iterator[tuple[int | None, str]]:
    """Yield the layer and point of everything that sums of rows judge in a phase, of a model of so many layers.

    In decode what reads keys is made again from recorded caches.
    """
    held = {*requested.points, *requested.support}
    if requested.row_sums:
        for point in judged_by_sums(requested.points, requested.support, sparse):
            row = POINTS[point]
            if (
                phase == "decode"
                and row.reads_keys
                and not held.issuperset(CACHES[i] for i in row.inputs if i in CACHES)
            ):
                continue
            if row.per_layer:
                yield from ((layer, point) for layer in requested.layers)
            elif layers - 1 in requested.layers:
                yield None, point


def unrecorded_path(name: str, recorded: Container[str], sparse: bool) -> tuple[str, ...] | None:
    """Return the operations between what is recorded of a layer and a point, in program order; None where none lead.

    A stream is known where it, or the norm of it, is recorded. Experts are not chosen again.
    """
    found: dict[str, None] = {}

    def leads(point: str) -> bool:
        for source in inputs_of(point, sparse):
            row = POINTS[source]
            if source in recorded or source in found:
                continue
            if row.kind == "stream":
                if not any(n.name in recorded for n in POINTS.values() if n.kind == "norm" and n.inputs == (source,)):
                    return False
                continue
            if row.over_keys or row.attends or row.kind in ("route", "cache") or not leads(source):
                return False
            found[source] = None
        return True

    return tuple(found) if leads(name) else None


def points_with_sums(points: Collection[str], support: Collection[str], sparse: bool) -> tuple[str, ...]:
    """Return the points whose rows' sums are recorded: those judged by them, their summands, what is handed on."""
    judged, held = judged_by_sums(points, support, sparse), {*points, *support}
    wanted = {*judged, *(i for p in judged if POINTS[p].kind == "sum" for i in inputs_of(p, sparse))}
    return tuple(p for p in POINTS if p in (wanted | BETWEEN_LAYERS).difference(held))


def expected_tensors(requested: Requested, length: int) -> Iterator[ExpectedTensor]:
    """Yield every tensor of one prompt of ``length`` tokens, phase by phase, step by step."""
    recorded = [p for p in POINTS if p in {*requested.points, *requested.support}]
    for phase, step in calls(requested):
        held = recorded_in(requested, phase, step)
        for point in (p for p in recorded if p in held):
            rows, keys = _rows(requested, phase, step, point, length)
            if rows:
                hashed = POINTS[point].state and step not in (0, requested.decode_steps)
                for layer in requested.layers if POINTS[point].per_layer else (None,):
                    yield ExpectedTensor(phase, step, layer, point, rows, keys, point not in requested.points, hashed)
        if phase in requested.phases:
            for point in requested.row_sums:
                rows, keys = _rows(requested, phase, step, point, length, summed=True)
                if rows:
                    yield ExpectedTensor(
                        phase, step, None, point + SUMS, rows, keys, True, summed=len(requested.layers)
                    )


def calls(requested: Requested) -> list[tuple[str, int]]:
    """The (phase, step) whose tensors are recorded; k and v of prefill are support of decode's caches."""
    found: list[tuple[str, int]] = []
    if "prefill" in requested.phases or ("decode" in requested.phases and needs_rows(requested)):
        found.append(("prefill", 0))
    if "decode" in requested.phases:
        found += [("decode", s) for s in decode_steps_of(requested)]
    if "rescore" in requested.phases:
        found.append(("rescore", 0))
    return found


def needs_rows(requested: Requested) -> bool:
    """Whether every k and v row is needed, as attention's inputs or to check the caches."""
    return any(POINTS[p].reads_keys or POINTS[p].state for p in (*requested.points, *requested.support))


def _rows(
    requested: Requested, phase: str, step: int, point: str, n: int, summed: bool = False
) -> tuple[tuple[int, ...], int]:
    """Return (positions recorded, number of keys); ``summed``: of sums of rows, which are no inputs of attention."""
    last = n + requested.decode_steps
    if phase == "decode":
        if POINTS[point].state:
            whole = requested.cache_hashes or step in (0, requested.decode_steps)
            return (tuple(range(n + step)), n + step) if whole else ((), 0)
        return (n - 1 + step,), n + step
    if POINTS[point].state:
        return (), 0
    only_support = phase == "prefill" and "prefill" not in requested.phases
    if only_support and point not in CACHES:
        return (), 0
    end = n if phase == "prefill" else last
    new = range(n) if phase == "prefill" else range(n - 1, last)
    if point in CACHES and needs_rows(requested) and not summed:
        return tuple(range(end)), end
    logit_rows = tuple(range(end)) if requested.every_logit else ((n - 1,) if phase == "prefill" else tuple(new))
    row = POINTS[point]
    if row.kind == "head" or (not row.per_layer and point not in requested.points):
        return logit_rows, end
    chosen = {p for p in parse_positions(requested.positions, end) if p in new}
    if not row.per_layer and LOGITS in requested.points:
        chosen |= set(logit_rows)
    return tuple(sorted(chosen)), end


class Misfit(NamedTuple):
    """In what a recorded tensor is not as requested; ``absent``: it lacks positions."""

    text: str
    absent: bool


def misfit(
    entry: ExpectedTensor, rows: Sequence[int], shape: tuple[int, ...], config: "DecoderConfig"
) -> Misfit | None:
    """Return in what a recorded tensor of ``shape`` that holds ``rows`` is not as requested, or None."""
    there = set(rows)
    lost = [p for p in entry.positions if p not in there]
    if lost:
        return Misfit(f"{len(lost)} of {len(entry.positions)} positions are not there, first {lost[0]}", True)
    if shape != entry.shape(config):
        return Misfit(f"shape {list(shape)}, expected {list(entry.shape(config))}", False)
    return None


def entry_format(policy: Policy, entry: ExpectedTensor) -> str:
    """Return the format a tensor is recorded in."""
    return HASH_FORMAT if entry.hashed or entry.summed else point_format(policy, entry.point)


def point_format(policy: Policy, point: str) -> str:
    """Return the format a policy stores a point in."""
    name = policy.format_of(POINTS[point].format)
    return policy.activations if name == "int8" else name  # what is read of integers


def predicted_bytes(requested: Requested, config: "DecoderConfig", policy: Policy, lengths: list[int]) -> int:
    """Return the bytes of all tensors of prompts of these lengths."""
    total = 0
    for length in lengths:
        for entry in expected_tensors(requested, length):
            name = entry_format(policy, entry)
            size = HASH_BYTES if entry.hashed or entry.summed else FORMATS[name].itemsize
            total += size * prod(entry.shape(config))
    return total

"""Put the exam's faults into recorded tensors, and into the program through ``Parts``; every one is a cell."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from exams.faults import FAULTS, Fault, Target, size
from precaudit.judging.rules import judge
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder import Parts
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import widen
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.textbook.local import LocalEmulations, local_errors
from precaudit.references.textbook.operations import prepare
from precaudit.schema.graphs.decoder import POINTS, present
from precaudit.schema.limits import default_limits
from precaudit.schema.metrics.sizes import arrange_axes, canonical
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.runs import PointRecord
from precaudit.schema.selection import Selection

TEXT = "def read(path):\n    with open(path) as f:\n        return [line.strip() for line in f if line]\n\n\n" * 3
COUNTS, NEAR = 8.0, 2.0
# which part makes a point: (name, call within one layer, calls a trace of the program makes)
MADE_BY = {
    "attn_norm": ("norm", 0, 3), "mlp_norm": ("norm", 1, 3), "final_norm": ("norm", 2, 3), "q": ("rope", 0, 2),
    "k": ("rope", 1, 2), "v": ("project", 2, 7), "attn_proj": ("project", 3, 7), "mlp_out": ("project", 6, 7),
    "scores": ("scores", 0, 1), "probs": ("softmax", 0, 1), "attn_out": ("attend", 0, 1), "mlp_act": ("activate", 0, 1),
}  # fmt: skip


OPERATIONS = tuple(p for p in present(False) if POINTS[p].inputs and not POINTS[p].state)
Asked = Iterable[tuple[str, Fault]]  # (point, fault), those of a point one after another


@dataclass(frozen=True)
class Altered(Run):
    """A run one of whose tensors reads as a fault left it."""

    change: Callable[[PointRecord, Any], Any] = field(default=lambda _record, x: x)

    def tensor(self, record: PointRecord) -> Any:
        return self.change(record, super().tensor(record))


@dataclass(frozen=True)
class Cell:
    """One question of the exam and its answer."""

    subject: str
    policy: str
    where: str
    fault: str
    point: str
    size: float
    status: str
    metric: str

    @property
    def flagged(self) -> bool:
        return self.status in ("fail", "nonfinite")

    @property
    def kind(self) -> str:
        return "counts" if self.size >= COUNTS else "near" if self.size >= NEAR else "small"


def altered(run: Run, change: Callable[[PointRecord, Any], Any]) -> Run:
    return Altered(**{f.name: getattr(run, f.name) for f in fields(Run)}, change=change)


def verdict(run: Run, model: Model, place: Place) -> Any:
    policy = Policy(**{f.name: run.record.policy[f.name] for f in fields(Policy)})
    records = list(local_errors(Recorded.of(run), model, True, LocalEmulations(policy, ()), place))
    assert records, place
    return judge(records[0], default_limits())


def model_of(run: Run) -> Model:
    checkpoint = open_checkpoint(run.record.model.reference).with_weights(run.record.policy["weights"])
    return Model(msgspec.convert(run.record.model.config, DecoderConfig), checkpoint.tensors.read_tensor)


def reference(run: Run, model: Model, place: Place) -> Any:
    recorded = Recorded.of(run)
    rows = recorded.rows(place.prompt, place.phase, place.layer, place.point)
    operation = prepare(recorded, model, place, rows) if rows is not None else None
    assert operation is not None, place
    return canonical(operation.evaluate([FP64])[0], POINTS[place.point].axes)


def back(x: Any, axes: str, shape: Any) -> Any:
    return x.transpose(1, 0, 2) if axes == "HTS" else x.reshape(shape)


def applies(fault: Fault, axes: str, heads: int) -> bool:
    if fault.heads:
        return heads > 1
    return not (fault.name == "channel's sign" and axes[-1] not in "KDF")


def into_files(subject: str, run: Run, layer: int, asked: Asked) -> Iterator[Cell]:
    """Put the faults that apply into recorded tensors of a layer."""
    model, prompt = model_of(run), next(iter(run.prompts))
    for point, faults in groupby(asked, lambda x: x[0]):
        axes = POINTS[point].axes
        place = Place(prompt, "prefill", 0, layer if POINTS[point].per_layer else None, point)
        stored = Recorded.of(run).tensor(*_key(place))
        truth, honest = reference(run, model, place), canonical(stored, axes)
        g = Target.of(honest)
        for fault in (f for _, f in faults if applies(f, axes, honest.shape[1])):
            with np.errstate(all="ignore"):
                made = fault.change(arrange_axes(stored, axes).astype(np.float32), g, np, stored.dtype.name)
                changed = back(made.astype(stored.dtype), axes, stored.shape)
            found = verdict(altered(run, _replacing(place, changed)), model, place)
            big = size(fault, canonical(changed, axes), honest, truth, g)
            yield Cell(subject, run.record.policy["name"], "file", fault.name, point, big, found.status, found.metric)


def _key(place: Place) -> tuple[Any, ...]:
    return (place.prompt, place.phase, place.step, place.layer, place.point)


def _replacing(place: Place, values: Any) -> Callable[[PointRecord, Any], Any]:
    def change(record: PointRecord, x: Any) -> Any:
        here = (record.prompt, record.phase, record.step, record.layer, record.point)
        return values if here == _key(place) else x

    return change


def faulty_parts(faults: list[Fault], point: str, g: Target, head_dim: int) -> Parts:
    """Return the decoder's parts with faults[b] in row b of the operation that makes ``point``, in every layer."""
    name, mine, calls = MADE_BY[point]
    honest, count = getattr(Parts(), name), 0
    axes = POINTS[point].axes

    def part(*arguments: Any) -> Any:
        nonlocal count
        y, here = honest(*arguments), count % calls
        count += 1
        if here != mine:
            return y
        x = y.reshape(*y.shape[:2], -1, head_dim) if axes == "TGK" else y  # a projection's heads are not apart yet
        return jnp.stack([_faulted(f, x[b], axes, g) for b, f in enumerate(faults)]).reshape(y.shape)

    return replace(Parts(), **{name: part})


def _faulted(fault: Fault, y: Any, axes: str, g: Target) -> Any:
    x = y.astype(jnp.float32)
    x = x.transpose(1, 0, 2) if axes == "HTS" else x[:, None, :] if x.ndim == 2 else x
    made = fault.change(x, g, jnp, y.dtype.name)
    return back(made, axes, y.shape).astype(y.dtype)


def into_program(folder: Path, subject: str, policy: str, honest: Run, layer: int, asked: Asked) -> Iterator[Cell]:
    """Trace once a point, every fault that applies in a row of the batch of its own."""
    model, prompt = model_of(honest), next(iter(honest.prompts))
    for point, some in groupby(asked, lambda x: x[0]):
        place = Place(prompt, "prefill", 0, layer if POINTS[point].per_layer else None, point)
        axes, stored = POINTS[point].axes, Recorded.of(honest).tensor(*_key(place))
        before, truth = canonical(stored, axes), reference(honest, model, place)
        g = Target.of(before)
        faults = [f for _, f in some if applies(f, axes, before.shape[1])]
        if not faults:
            continue
        select = Selection.parse(points=point, phases="prefill", layers=None if point == "final_norm" else str(layer))
        parts = faulty_parts(faults, point, g, model.config.head_dim)
        run = record(folder / "program", subject, policy, select, parts, rows=len(faults))
        for b, fault in enumerate(faults):
            found = verdict(run, model, place._replace(prompt=f"exam{b}"))
            with np.errstate(all="ignore"):
                made = fault.change(before.astype(np.float32), g, np, stored.dtype.name)
            rounded = widen(made.astype(stored.dtype))
            big = size(fault, rounded, before, truth, g)
            yield Cell(subject, policy, "program", fault.name, point, big, found.status, found.metric)


def random_tensors() -> Iterator[Cell]:
    """Faults in one of 32 tensors of 256 × 512 FP32 whose candidate is rounded to bfloat16 (facts of other tools)."""
    from precaudit import assert_close

    draw = np.random.default_rng(0)
    bf16 = FORMATS["bfloat16"].dtype
    for i, fault in enumerate(f for f in FAULTS if not f.heads):
        r = draw.standard_normal((256, 512))
        honest = r.astype(bf16)
        g = Target.of(widen(honest)[:, None])
        with np.errstate(all="ignore"):
            made = fault.change(honest.astype(np.float32)[:, None], g, np, "bfloat16")[:, 0].astype(bf16)
        status = "pass"
        try:
            assert_close(made, r, policy="bf16", name=f"tensor {i}")
        except AssertionError as error:
            status = "nonfinite" if "nonfinite" in str(error) else "fail"
        big = size(fault, widen(made)[:, None], widen(honest)[:, None], r[:, None], g)
        yield Cell("random", "bf16", "file", fault.name, "tensor", big, status, "")


def record(
    folder: Path, subject: str, policy: str, select: Selection, parts: Parts | None = None, rows: int = 1
) -> Run:
    """Trace the exam's prompt, ``rows`` times in one batch."""
    given = [Prompt(id=f"exam{b}", prompt=TEXT) for b in range(rows)]
    options = TraceOptions(force=True, decode_steps=0, batch=rows)
    return trace(load(subject, policy, None, "cpu", parts), folder, given, select, options)

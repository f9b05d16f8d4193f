"""Local errors: every operation on the candidate's own recorded inputs, in FP64 and as emulations."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from precaudit.models.numpy_decoder.accumulation import accumulating
from precaudit.models.numpy_decoder.honest import RowExecution, on_single_rows
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.passes import PRESETS
from precaudit.models.numpy_decoder.rounding import (
    FP64,
    Rounding,
    elisions,
    formula_rounding,
    of_policy,
)
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded, Rows
from precaudit.references.attribution import CLEARLY
from precaudit.references.closing import Residue, Yardstick
from precaudit.references.textbook.alternatives import Alternative, Alternatives
from precaudit.references.textbook.closing import honest, measure_yardstick, rounds_inputs
from precaudit.references.textbook.inheritance import from_between
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.references.textbook.units import (
    factor_formats,
    multiplies_integers,
    policy_at,
    tpu_chooses,
    why_undecided,
)
from precaudit.schema.coverage import has_inputs
from precaudit.schema.emulations import SUMS, Emulation
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.graphs.point import Point
from precaudit.schema.metrics.rows import measure_rows
from precaudit.schema.metrics.sizes import canonical, error_sizes, explained_share, norm, ratio
from precaudit.schema.places import Place
from precaudit.schema.policies import DevicePolicy, Policy
from precaudit.schema.records.base import json_number
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import AccumulationError, ErrorRecord, LocalError

NOT_RECORDED = "inputs were not recorded"  # why a record has no numbers
FUSED = "a TPU may not round what it reads, and the layer before was not recorded: add the last one, --layers …,-1"
PRICE = 4.0  # unit roundoffs of error from which an operation is said to amplify a rounding; others leave 1 or 2


@dataclass(frozen=True)
class LocalEmulations:
    """What to emulate: a policy, and accumulation formats."""

    policy: Policy
    accum: tuple[str, ...]

    def of(self, o: Operation, model: Model, device: str, settled: bool) -> dict[str, Rounding]:
        """Return {name: rounding}: FP64, the policy with each set of elided places, accumulations alone.

        The policy in the textbook's way, then as ``device`` makes single rows; ``settled``: its products are known.
        """
        point, decode = o.place.point, o.place.phase == "decode"
        base = of_policy(self.policy, decode)
        found = {"fp64": FP64}
        dtype = o.stored.dtype.name
        executed = RowExecution(device, decode, settled)
        for how, r in on_single_rows(base, o.row, dtype, self.policy.scores, executed).items():
            for places in elisions(point, model.config, self.policy):
                found["|".join(("policy", *places, *how))] = r.eliding(places)
        if o.row.sums:
            found |= {Emulation(accumulation=name).name: replace(FP64, dot=accumulating(name)) for name in self.accum}
        return found

    def with_accumulations(self, policies: dict[str, Rounding], point: str) -> dict[str, dict[str, Rounding]]:
        """Return {accumulation: {elision: rounding}}: the policy's roundings with another format in the sums."""
        if not POINTS[point].sums:
            return {}
        return {
            name: {elision: replace(r, dot=accumulating(name)) for elision, r in policies.items()}
            for name in self.accum
        }


@dataclass(frozen=True)
class LocalEvaluation:
    """What evaluation gave: the yardstick, emulations by name [T, H, K], and the policy's name among them.

    ``exact``: FP64 without the casts to integers that a policy means; the yardstick's reference has them.
    """

    yardstick: Yardstick
    emulated: dict[str, Array]
    label: str
    elided: tuple[str, ...]
    exact: Array
    inherits: str | None = None
    costly: str | None = None

    @cached_property
    def residue(self) -> Residue:
        """What the policy leaves."""
        return self.yardstick.residue(self.emulated[self.label])

    @cached_property
    def closes(self) -> bool:
        """Whether what the policy makes of it passes the default limits."""
        made = self.emulated[self.label]
        return made.shape == self.yardstick.candidate.shape and self.yardstick.badness(made, self.residue) <= 1

    def closed_by(self, emulated: Array) -> bool:
        """Whether an emulation closes; one of other rows does not."""
        return emulated.shape == self.yardstick.candidate.shape and self.yardstick.badness(emulated) <= 1

    def otherwise(self, other: Alternative) -> "LocalEvaluation":
        """Return the same with another honest emulation as the policy's."""
        yard, rounded = self.yardstick, self.emulated[self.label]
        yard = yard.reading_unrounded(other.emulated, rounded) if other.borders else yard
        named = {**self.emulated, self.label: other.emulated}
        return replace(self, yardstick=yard.doubting(other.emulated, other.doubt), emulated=named, elided=other.name)

    def rows(self, some: slice) -> "LocalEvaluation":
        """Return what was made of some rows."""
        cut = {name: y[some] for name, y in self.emulated.items()}
        return replace(self, yardstick=self.yardstick.rows(some), emulated=cut, exact=self.exact[some])


def local_errors(
    recorded: Recorded, model: Model, weights: bool, emulations: LocalEmulations, place: Place
) -> Iterator[ErrorRecord]:
    """Yield the local and accum records of one point of one phase (``place.step`` is ignored: all steps are yielded).

    A point whose inputs were not recorded, or whose weights are not at hand, is ``unknown`` and says so.
    """
    run = recorded.run.record.id
    if not POINTS[place.point].inputs:
        return  # resid_in is what the layer before handed over: no operation made it
    for part in parts(recorded, place):
        point, decode = place.point, place.phase == "decode"
        if not weights and POINTS[point].tensors:
            yield from _unknown(part, place, run, "weights")
            continue
        declared = emulations.policy
        missing = not_emulated(declared, point, decode, device_kind(recorded.run.record.device))
        if missing or (missing := why_undecided(recorded, declared, place)):
            yield from _unknown(part, place, run, f"no emulation of {missing}")
            continue
        operation = prepare(recorded, model, place, part)
        if operation is None:
            if has_inputs(recorded.requested, recorded.config, (place.phase, part.steps[0][0], place.layer, point)):
                yield from _unknown(part, place, run, NOT_RECORDED)
        else:
            here = replace(emulations, policy=policy_at(recorded, declared, place))
            others = Alternatives(recorded, model, operation, declared)
            device, settled = device_kind(recorded.run.record.device), tpu_chooses(recorded, declared, place)
            made = _emulate(operation, here, model, others, device, settled)
            if device == "tpu" and not made.closes and _last_layer_lacks(recorded, place):
                yield from _unknown(part, place, run, FUSED)
                continue
            yield from _records(recorded, operation, made, others, of_policy(here.policy, decode))


def _last_layer_lacks(recorded: Recorded, place: Place) -> bool:
    """Whether what an operation after the layers reads was made of values of a layer that was not recorded."""
    made = inputs_of(place.point, recorded.config.sparse)
    of_layers = any(POINTS[n].per_layer for name in made for n in inputs_of(name, recorded.config.sparse))
    return place.layer is None and of_layers and recorded.config.layers - 1 not in recorded.requested.layers


def not_emulated(policy: Policy, point: str, decode: bool, device: str) -> str | None:
    """Return the policy setting inside ``point``'s operation that no Rounding emulates yet, or None.

    ``policy``: as its device makes it (``policies.on_device``).
    """
    row = POINTS[point]
    if row.arithmetic is not None and (key := getattr(policy, row.arithmetic)) != "float32":
        return f"{row.arithmetic} = {key}"
    if "mlp" in row.inner and policy.mlp not in ("float32", policy.activations):
        return f"mlp = {policy.mlp}"
    # narrow rows times integers are exact in float32, and a GPU adds them up in it (seen on an H100)
    exact = device == "cpu" or (device == "gpu" and policy.activations in ("bfloat16", "float16"))
    if multiplies_integers(policy, row) and not exact:
        return f"weights = {policy.weights} on {device or 'an unknown device'}"
    exact = device == "cpu" or policy.matmul in ("highest", "F32_F32_F32", *PRESETS)
    if row.sums and "float32" in factor_formats(policy, row, decode) and not exact:
        return f"float32 products at matmul = {policy.matmul} on {device or 'an unknown device'}"
    return _unknown_parts(policy, row, decode) if isinstance(policy, DevicePolicy) else None


def _unknown_parts(policy: DevicePolicy, row: Point, decode: bool) -> str | None:
    """Return why it is not known how several devices make a point's products in parts; None where it is."""
    if policy.unread and row.shares_terms:
        return "products whose terms lie on several devices: the compiled program was not read"
    ways = policy.ways(row.name, decode)
    if len(ways) < 2 and (row.shares_terms or not ways):
        return None
    each = (f"{way.parts} parts added in {way.summed}" if way.parts > 1 else "whole" for way in ways)
    return f"products split over devices in several ways: {', '.join(each)}"


def _unknown(part: Rows, place: Place, run: str, why: str) -> Iterator[ErrorRecord]:
    for step, _ in part.steps:
        yield place._replace(step=step).record(LocalError, run, "fp64", unknown=why)


def _emulate(
    o: Operation, emulations: LocalEmulations, model: Model, others: Alternatives, device: str, settled: bool
) -> LocalEvaluation:
    """Evaluate the operation in FP64 and under every emulation, and choose the policy's best elision."""
    point, axes, policy = o.place.point, o.axes, emulations.policy
    roundings = emulations.of(o, model, device, settled)
    alone = {name: r for name, r in roundings.items() if name.startswith(SUMS)}
    first = {name: r for name, r in roundings.items() if name not in alone}
    members = honest(o, model, policy, of_policy(policy, o.place.phase == "decode"))
    # below float32 the textbook's policies stand first among the members: each is made once
    textbook = len(elisions(point, model.config, policy))
    shared = 0 if o.stored.dtype == np.float32 else textbook
    every = [canonical(y, axes) for y in o.evaluate([*first.values(), *members[shared:]])]
    arrays = dict(zip(first, every, strict=False))
    policies = [name for name in roundings if name.startswith("policy")]
    made = [*(arrays[p] for p in policies[:shared]), *every[len(first) :]]
    centre = formula_rounding(policy)
    meant = arrays["fp64"] if centre == FP64 else canonical(o.evaluate([centre])[0], axes)
    known = settled and rounds_inputs(o, model)
    yard = measure_yardstick(o, model, policy, meant, made, arrays[policies[0]] if known else None)
    wide = np.nan_to_num(yard.candidate, nan=0.0, posinf=0.0, neginf=0.0)
    best = min(policies, key=lambda name: norm(wide - arrays[name]))
    label = Emulation(policy.name).name
    named = {label: arrays[best]}
    # Where the policy alone explains the error its elision is known; elsewhere every one is tried with every sum.
    share = explained_share(wide, norm(wide - arrays["fp64"]), arrays[best])
    tried = [best] if share >= CLEARLY else policies
    elided = tuple(best.split("|")[1:])
    if share < CLEARLY:
        near = min(others.reading_unrounded(), key=lambda other: norm(wide - other.emulated), default=None)
        if near is not None and norm(wide - near.emulated) < norm(wide - arrays[best]):
            elided, named[label] = near.name, near.emulated
            yard = yard.reading_unrounded(near.emulated, arrays[best])
    for name, variants in emulations.with_accumulations({p: roundings[p] for p in tried}, point).items():
        outs = [canonical(y, axes) for y in o.evaluate([alone[Emulation(accumulation=name).name], *variants.values()])]
        named[Emulation(accumulation=name).name] = outs[0]
        if len(outs) > 1:
            named[Emulation(policy.name, name).name] = min(outs[1:], key=lambda y: norm(wide - y))
    return LocalEvaluation(
        yard,
        named,
        label,
        elided,
        arrays["fp64"],
        costly=_costly({name: arrays[name] for name in ("fp64", *policies[:textbook])}, o.stored.dtype.name),
    )


def _costly(arrays: dict[str, Array], dtype: str) -> str | None:
    """Return the place whose rounding makes most of an error of more than PRICE unit roundoffs; None below that.

    Such an operation is ill-conditioned: its inputs amplify a rounding inside it, as large scores do theirs.
    """
    exact = arrays["fp64"]
    whole = norm(arrays["policy"] - exact)
    if not whole > PRICE * FORMATS[dtype].unit_roundoff * norm(exact):
        return None
    found = {name: norm(y - exact) for name, y in arrays.items() if name.startswith("policy|")}
    enough = [name for name, left in found.items() if left < whole / 2]
    least = min(enough, key=lambda name: (name.count("|"), found[name]), default=None)
    return None if least is None else least.split("|")[-1]


def _records(
    recorded: Recorded, o: Operation, made: LocalEvaluation, others: Iterable[Alternative], base: Rounding
) -> Iterator[ErrorRecord]:
    """Yield one local and the accum records of every step."""
    for step, rows in o.part.steps:
        keyed = "S" in o.axes
        index = np.arange(len(o.positions)) if keyed else _among(o.positions, o.part.positions, rows)
        if len(index):
            one = slice(int(index[0]), int(index[-1]) + 1)
            here = replace(o, place=o.place._replace(step=step), positions=o.positions[one])
            cut = _closest(made.rows(one), others, one)
            if not cut.closes:
                between = from_between(recorded, here, step, base)
                cut = replace(cut, inherits=next((name for name, y in between if cut.closed_by(y)), None))
            yield from _step(here, o.stored if keyed else o.stored[one], cut)


def _among(some: Array, every: Array, rows: slice) -> Array:
    """Return where in ``some`` positions are those of rows of ``every``; mostly both are the same."""
    if len(some) == len(every) and (some == every).all():
        return np.arange(len(some))[rows]
    return np.flatnonzero(np.isin(some, every[rows]))


def _closest(made: LocalEvaluation, others: Iterable[Alternative], one: slice) -> LocalEvaluation:
    """Return what was made, with the first other honest emulation that closes where the policy's does not."""
    if made.closes or not np.isfinite(made.yardstick.candidate).all():
        return made
    for other in others:
        changed = made.otherwise(other.rows(one))
        if changed.closes:
            return changed
    return made


def _step(o: Operation, stored: Array, made: LocalEvaluation) -> Iterator[ErrorRecord]:
    place, yard = o.place, made.yardstick
    exact = made.exact
    back = exact.transpose(1, 0, 2) if o.row.over_keys else exact.reshape(stored.shape)
    d, numbers = measure_rows(stored, back, place.point, yard.positions, o.window)
    error, best = norm(d.error), made.emulated[made.label]
    emulated = made.emulated
    if np.isinf(yard.candidate).any():  # measured as 0 where the reference is, too
        emulated = {name: np.where(np.isinf(y) & (y == yard.candidate), 0.0, y) for name, y in emulated.items()}
    shares = {name: json_number(explained_share(d.reference + d.error, error, y)) for name, y in emulated.items()}
    found = made.residue
    for name, scope in found.scopes.items():
        numbers["scopes"].setdefault(name, {}).update(scope)
    extra: dict[str, Any] = {
        "explained": shares,
        "unexplained": found.unexplained,
        "slices": found.slices,
        "ratio": json_number(ratio(error, norm(best - exact))),
    }
    extra |= {key: y for key in ("inherits", "costly") if (y := getattr(made, key)) is not None}
    if made.elided:
        extra["elided"] = {made.label: made.elided}
    yield place.record(LocalError, o.id, "fp64", **numbers, **extra)
    for name, y in made.emulated.items():
        if name.startswith(SUMS):
            yield place.record(AccumulationError, name, "fp64", **error_sizes(y, d.reference))

"""Local errors: every operation on the candidate's own recorded inputs, in FP64 and as emulations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from precaudit.comparison.attribution import CLEARLY
from precaudit.comparison.recorded import Recorded, Rows
from precaudit.comparison.rows import Place, masked, measured
from precaudit.formats import FORMATS, Array, widen
from precaudit.metrics.residue import excesses, relative_noise, signed
from precaudit.metrics.sizes import Difference, canonical, explained, norm, own_index, ratio
from precaudit.numpy_decoder.accumulation import accumulating
from precaudit.numpy_decoder.magnitudes import attended, half_ulp, inner_roundoff, normalised, rowwise, scored
from precaudit.numpy_decoder.model import Model, all_probs, all_scores, attention_variants
from precaudit.numpy_decoder.rounding import (
    FP64,
    Rounding,
    elisions,
    in_single_precision,
    of_policy,
    sharing_products,
)
from precaudit.points import CACHES, POINTS
from precaudit.policies import Policy
from precaudit.records import ErrorRecord, Unexplained, device_kind, number

NO_SUM = ("resid_mid", "resid_out", "probs", "attn_norm", "mlp_norm", "final_norm")  # no dot product to accumulate
WITHOUT_WEIGHTS = ("scores", "probs", "attn_out", "resid_mid", "resid_out")


@dataclass(frozen=True)
class Emulations:
    """What to emulate: a policy, and accumulation formats."""

    policy: Policy
    accum: tuple[str, ...]

    def of(self, point: str, model: Model, decode: bool) -> dict[str, Rounding]:
        """Return {name: rounding}: FP64, the policy with each set of elided places, accumulations alone."""
        base = of_policy(self.policy, decode)
        found = {"fp64": FP64}
        for places in elisions(point, model.config, self.policy):
            found["policy" + "".join(f"|{p}" for p in places)] = base.eliding(places)
        if point not in NO_SUM:
            found |= {f"accum:{name}": replace(FP64, dot=accumulating(name)) for name in self.accum}
        return found

    def joined(self, policies: dict[str, Rounding], point: str) -> dict[str, dict[str, Rounding]]:
        """Return {accumulation: {elision: rounding}}: the policy's roundings with another format in the sums."""
        if point in NO_SUM:
            return {}
        return {
            name: {elision: replace(r, dot=accumulating(name)) for elision, r in policies.items()}
            for name in self.accum
        }


Evaluate = Callable[[Sequence[Rounding]], list[Array]]


@dataclass(frozen=True)
class Operation:
    """One point of one phase ready to be judged: its recorded rows, and how to make them again.

    ``evaluate`` runs the operation under roundings; ``fused`` the same on summands a compiler may not have rounded;
    ``magnitude`` returns |A|·|B| of every element.
    """

    run: str
    place: Place
    part: Rows
    positions: Array
    evaluate: Evaluate
    magnitude: Callable[[], Array]
    fused: Evaluate | None = None

    @property
    def axes(self) -> str:
        """The point's axes."""
        return POINTS[self.place.point].axes

    @property
    def stored(self) -> Array:
        """The recorded values of the rows that can be made again."""
        return self.part.values if "S" in self.axes else self.part.at(self.positions)


@dataclass(frozen=True)
class Made:
    """What evaluation gave, canonical [T, H, K]: FP64, emulations by name, honest noise, and u · |A|·|B|."""

    reference: Array
    emulated: dict[str, Array]
    noise: Array
    bound: Array
    label: str
    elided: tuple[str, ...]


def local_errors(
    recorded: Recorded, model: Model, weights: bool, emulations: Emulations, place: Place
) -> Iterator[ErrorRecord]:
    """Yield the local and accum records of one point of one phase (``place.step`` is ignored: all steps are yielded).

    A point whose inputs were not recorded, or whose weights are not at hand, is ``unknown`` and says so.
    """
    run = recorded.run.record.id
    if not POINTS[place.point].inputs:
        return  # resid_in is what the layer before handed over: no operation made it
    for part in _parts(recorded, place):
        point, decode = place.point, place.phase == "decode"
        if not weights and point not in WITHOUT_WEIGHTS:
            yield from _unknown(part, place, run, "weights")
            continue
        if missing := not_emulated(emulations.policy, point, decode, device_kind(recorded.run.record.device)):
            yield from _unknown(part, place, run, f"no emulation of {missing}")
            continue
        operation = prepare(recorded, model, place, part)
        if operation is None:
            yield from _unknown(part, place, run, "inputs were not recorded")
        else:
            yield from _records(operation, _make(operation, emulations, model, decode))


def prepare(recorded: Recorded, model: Model, place: Place, part: Rows) -> Operation | None:
    """Return the operation behind recorded rows, ready to be evaluated; None where its inputs were not recorded."""
    found = _evaluation(recorded, model, place, part)
    if found is None:
        return None
    positions, evaluate, magnitude = found
    fused = _fused_residual(recorded, model, place, positions)
    return Operation(recorded.run.record.id, place, part, positions, evaluate, magnitude, fused)


def not_emulated(policy: Policy, point: str, decode: bool, device: str) -> str | None:
    """Return the policy setting inside ``point``'s operation that no Rounding emulates yet, or None.

    Below the highest precision a TPU multiplies float32 in one or three bfloat16 passes, a GPU in TF32.
    """
    inside = {
        "norm": ("attn_norm", "mlp_norm", "final_norm"), "rope": ("q", "k"), "softmax": ("probs", "attn_out"),
    }  # fmt: skip
    for key, points in inside.items():
        if point in points and getattr(policy, key) != "float32":
            return f"{key} = {getattr(policy, key)}"
    if point == "mlp_act" and policy.mlp not in ("float32", policy.activations):
        return f"mlp = {policy.mlp}"
    factors = (policy.probs, policy.activations) if point == "attn_out" else (policy.activations,)
    if decode and policy.decode_attention == "float32" and point in ("scores", "attn_out"):
        factors = ("float32",)
    exact = device == "cpu" or policy.matmul in ("highest", "F32_F32_F32")
    if point not in NO_SUM and "float32" in factors and not exact:
        return f"float32 products at matmul = {policy.matmul} on {device or 'an unknown device'}"
    return None


def _parts(recorded: Recorded, place: Place) -> list[Rows]:
    """Return the rows to judge together: a phase's; for points over keys, whose width grows, each step's."""
    if place.phase == "decode" and "S" in POINTS[place.point].axes:
        parts = []
        for step in recorded.steps("decode"):
            values = recorded.tensor(place.prompt, "decode", step, place.layer, place.point)
            if values is not None:
                n = len(recorded.run.prompts[place.prompt].tokens)
                parts.append(Rows(values, np.asarray([n - 1 + step]), ((step, slice(0, 1)),)))
        return parts
    rows = recorded.rows(place.prompt, place.phase, place.layer, place.point)
    return [] if rows is None else [rows]


def _unknown(part: Rows, place: Place, run: str, why: str) -> Iterator[ErrorRecord]:
    for step, _ in part.steps:
        yield replace(place, step=step).record("local", run, "fp64", unknown=why)


Evaluation = tuple[Array, Evaluate, Callable[[], Array]]


def _evaluation(recorded: Recorded, model: Model, place: Place, part: Rows) -> Evaluation | None:
    """Return the positions that can be recomputed, and Operation's evaluate and magnitude; None without inputs."""
    if place.point in ("scores", "probs", "attn_out"):
        return _attention(recorded, place, part)
    layer = place.layer
    if place.point == "final_norm":
        inputs = [recorded.rows(place.prompt, place.phase, model.config.layers - 1, "resid_out")]
    else:
        inputs = [recorded.rows(place.prompt, place.phase, layer, name) for name in POINTS[place.point].inputs]
    if any(i is None for i in inputs):
        return None
    present = [i for i in inputs if i is not None]
    positions = part.positions
    for rows in present:
        positions = np.intersect1d(positions, rows.positions)
    if not len(positions):
        return None
    values = [widen(rows.at(positions)) for rows in present]

    def evaluate(roundings: Sequence[Rounding]) -> list[Array]:
        if place.point == "logits":
            return model.logits(values[0], roundings)
        shared = sharing_products(roundings)
        return [model.apply(place.point, model.context(layer, positions, r), values) for r in shared]

    return positions, evaluate, lambda: rowwise(place.point, model, layer, values)


def _fused_residual(recorded: Recorded, model: Model, place: Place, positions: Array) -> Evaluate | None:
    """Return mlp_norm of resid_in + attn_proj as it was before it was rounded to resid_mid, where both were recorded.

    A compiler that fuses the sum with the norm may never round it (docs/design.md §7, 2).
    """
    if place.point != "mlp_norm":
        return None
    parts = [recorded.rows(place.prompt, place.phase, place.layer, name) for name in ("resid_in", "attn_proj")]
    if any(p is None or len(np.setdiff1d(positions, p.positions)) for p in parts):
        return None
    total = sum(widen(p.at(positions)) for p in parts if p is not None)
    return lambda roundings: [
        model.apply("mlp_norm", model.context(place.layer, positions, r), [np.asarray(total)]) for r in roundings
    ]


def _attention(recorded: Recorded, place: Place, part: Rows) -> Evaluation | None:
    prompt, phase, layer = place.prompt, place.phase, place.layer
    assert layer is not None
    if place.point == "probs":
        return _softmax(recorded, place, part)
    q = recorded.rows(prompt, phase, layer, "q")
    keys = _keys(recorded, place, "k")
    values = _keys(recorded, place, "v") if place.point == "attn_out" else keys
    if q is None or keys is None or values is None:
        return None
    positions = np.intersect1d(part.positions, q.positions)
    if not len(positions):
        return None
    queries = widen(q.at(positions))
    k, v = [widen(x) for x in keys], [widen(x) for x in values]

    def evaluate(roundings: Sequence[Rounding]) -> list[Array]:
        if place.point == "scores":
            width = part.values.shape[2]
            source = k[-1] if len(k) > 1 and width == len(k[-1]) else k[0]
            return [all_scores(queries, source[:width], r) for r in roundings]
        out = attention_variants(queries, k[0], v[0], positions, roundings)
        if len(k) > 1 and not (np.array_equal(k[0], k[1]) and np.array_equal(v[0], v[1])):
            last = attention_variants(queries[-1:], k[1], v[1], positions[-1:], roundings)
            for whole, row in zip(out, last, strict=True):
                whole[-1:] = row
        return out

    def magnitude() -> Array:
        if place.point == "scores":
            width = part.values.shape[2]
            return scored(queries, (k[-1] if len(k) > 1 and width == len(k[-1]) else k[0])[:width])
        return attended(queries, k[0], v[0], positions)

    return positions, evaluate, magnitude


def _keys(recorded: Recorded, place: Place, point: str) -> list[Array] | None:
    """Return [rows] attention saw in a prefill; [before the last step, at the last step] in decode."""
    assert place.layer is not None
    if place.phase == "decode":
        read = recorded.keys_read(place.prompt, place.layer, CACHES[point])
        return None if read is None else list(read)
    rows = recorded.rows(place.prompt, place.phase, place.layer, point)
    return None if rows is None or len(rows.positions) <= rows.positions[-1] else [rows.values]


def _softmax(recorded: Recorded, place: Place, part: Rows) -> Evaluation | None:
    record = part.steps[0][0] if place.phase == "decode" else 0
    s = recorded.tensor(place.prompt, place.phase, record, place.layer, "scores")
    if s is None or s.shape != part.values.shape:
        return None
    wide = widen(s)
    at = part.positions
    return at, lambda roundings: [all_probs(wide, at, r) for r in roundings], lambda: normalised(wide, at)


def _make(o: Operation, emulations: Emulations, model: Model, decode: bool) -> Made:
    """Evaluate the operation in FP64 and under every emulation, and choose the policy's best elision."""
    point, axes = o.place.point, o.axes
    roundings = emulations.of(point, model, decode)
    alone = {name: r for name, r in roundings.items() if name.startswith("accum:")}
    first = {name: r for name, r in roundings.items() if name not in alone}
    arrays = dict(zip(first, [canonical(y, axes) for y in o.evaluate(list(first.values()))], strict=True))
    wide = np.nan_to_num(canonical(o.stored, axes), nan=0.0, posinf=0.0, neginf=0.0)
    policies = [name for name in roundings if name.startswith("policy")]
    if o.fused is not None and len(policies) > 1:
        extra = [canonical(y, axes) for y in o.fused([roundings[p] for p in policies])]
        arrays |= {f"{p}|resid_mid": y for p, y in zip(policies, extra, strict=True)}
        policies += [f"{p}|resid_mid" for p in policies]
    best = min(policies, key=lambda name: norm(wide - arrays[name]))
    label = f"policy:{emulations.policy.name}"
    named = {label: arrays[best]}
    # Where the policy alone explains the error its elision is known; elsewhere every one is tried with every sum.
    share = explained(wide, norm(wide - arrays["fp64"]), arrays[best])
    tried = [p for p in ([best] if share >= CLEARLY else policies) if p in roundings]
    for name, variants in emulations.joined({p: roundings[p] for p in tried}, point).items():
        outs = [canonical(y, axes) for y in o.evaluate([alone[f"accum:{name}"], *variants.values()])]
        named[f"accum:{name}"] = outs[0]
        if len(outs) > 1:
            named[f"{label}+accum:{name}"] = min(outs[1:], key=lambda y: norm(wide - y))
    other = _noise(o, roundings, best, arrays)
    bound = inner_roundoff(point, emulations.policy) * canonical(o.magnitude(), axes)
    return Made(arrays["fp64"], named, other - arrays["fp64"], bound, label, tuple(best.split("|")[1:]))


def _noise(o: Operation, roundings: dict[str, Rounding], best: str, arrays: dict[str, Array]) -> Array:
    """Return what another honest program may have made: the best emulation, float32 results with float32 arithmetic.

    Below float32 the rounding of results is all there is: sums in float32 are 2^13 times finer than float16.
    """
    if o.stored.dtype != np.float32 or best not in roundings:
        return arrays[best]
    return canonical(o.evaluate([in_single_precision(roundings[best])])[0], o.axes)


def _records(o: Operation, made: Made) -> Iterator[ErrorRecord]:
    """Yield one local and the accum records of every step."""
    relative = relative_noise(made.noise, made.reference, FORMATS[o.stored.dtype.name].unit_roundoff)
    for step, rows in o.part.steps:
        keyed = "S" in o.axes
        index = np.arange(len(o.positions)) if keyed else np.flatnonzero(np.isin(o.positions, o.part.positions[rows]))
        if len(index):
            one = slice(int(index[0]), int(index[-1]) + 1)
            here = replace(o, place=replace(o.place, step=step))
            cut = replace(
                made, reference=made.reference[one], emulated={k: v[one] for k, v in made.emulated.items()},
                noise=made.noise[one], bound=made.bound[one],
            )  # fmt: skip
            yield from _step(here, o.stored if keyed else o.stored[one], cut, o.positions[one], relative)


def _step(o: Operation, stored: Array, made: Made, positions: Array, relative: float) -> Iterator[ErrorRecord]:
    place, axes, label = o.place, o.axes, made.label
    back = made.reference.transpose(1, 0, 2) if axes == "HTS" else made.reference.reshape(stored.shape)
    d, numbers = measured(stored, back, place.point, positions)
    left = np.where(np.isfinite(d.candidate), d.candidate - made.emulated[label], 0.0)
    left = np.nan_to_num(left, nan=0.0, posinf=0.0, neginf=0.0)
    noise, hidden = made.noise, masked(place.point, positions, left.shape[2])
    if hidden is not None:
        left, noise = np.where(hidden, 0.0, left), np.where(hidden, 0.0, noise)
    error = norm(d.error)
    shares = {name: number(explained(d.reference + d.error, error, y)) for name, y in made.emulated.items()}
    unexplained, extra_scopes = _unexplained(d, left, noise, made, relative, positions, axes, stored)
    for name, found in extra_scopes.items():
        numbers["scopes"].setdefault(name, {}).update(found)
    extra: dict[str, Any] = {
        "explained": shares,
        "unexplained": unexplained,
        "ratio": number(ratio(error, norm(made.emulated[label] - made.reference))),
    }
    if made.elided:
        extra["elided"] = {label: made.elided}
    yield place.record("local", o.run, "fp64", **numbers, **extra)
    for name, y in made.emulated.items():
        if name.startswith("accum:"):
            yield place.record("accum", name, "fp64", **_small(y, d.reference))


def _unexplained(
    d: Difference, left: Array, noise: Array, made: Made, relative: float, positions: Array, axes: str, stored: Array
) -> tuple[Unexplained, dict[str, Any]]:
    """Return what the policy leaves against honest noise: of the tensor, and of the worst of every scope."""
    u = FORMATS[stored.dtype.name].unit_roundoff
    share = ratio(norm(left), norm(d.reference))
    heads = axes[-1] == "K" or axes == "HTS"
    whole, worst = excesses(left, noise, d.reference, relative, positions, axes)
    tensor, by_head = signed(left, noise, d.reference, relative, heads)
    scopes = {name: {"excess": found} for name, found in worst.items()}
    if by_head:
        scopes["head"] |= by_head
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(d.error == 0, 0.0, np.abs(d.error) / (made.bound + half_ulp(d.reference, stored.dtype.name)))
    t, h, k = (int(i) for i in np.unravel_index(int(parts.argmax()), parts.shape))
    index = own_index((t, h, k), axes)
    found = Unexplained(
        rel_l2=number(share), u=number(share / u), excess=number(whole), gain=tensor["gain"], mean=tensor["mean"],
        componentwise=(number(parts[t, h, k]), index),
    )  # fmt: skip
    return found, scopes


def _small(emulation: Array, reference: Array) -> dict[str, Any]:
    """Return the sizes of an emulation's own error."""
    with np.errstate(invalid="ignore"):
        error = emulation - reference
    bad = int((~np.isfinite(error)).sum())
    error = np.where(np.isfinite(error), error, 0.0)
    size = np.abs(error)
    return {
        "n": error.size,
        "nonfinite": bad,
        "mae": number(size.mean()),
        "max_diff": number(size.max()),
        "rel_l2": number(ratio(norm(error), norm(reference))),
    }

"""How far honest programs of an operation go from FP64: the ensemble of their roundings, and what it leaves."""

from dataclasses import replace

import numpy as np

from precaudit.models.numpy_decoder.ensemble import FEW, common, ensemble, weights
from precaudit.models.numpy_decoder.magnitudes import inner_roundoff
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.parted import WIDE
from precaudit.models.numpy_decoder.rounding import Rounding, formula_rounding, of_policy
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.references.closing import SINGLE, TIES, Yardstick
from precaudit.references.textbook.operations import Operation
from precaudit.schema.metrics.residue import Noise
from precaudit.schema.metrics.rows import masked_elements
from precaudit.schema.metrics.sizes import canonical, half_ulp
from precaudit.schema.policies import Policy
from precaudit.schema.records.devices import SplitSum

LEAST = 0.1  # of u·|A||B|, that float32 noise has in every element, whatever three realisations leave there


def yardstick(o: Operation, model: Model, policy: Policy, settled: bool = False) -> Yardstick:
    """Return the yardstick of an operation recorded under a policy; ``settled``: its products are known."""
    base = of_policy(policy, o.place.phase == "decode")
    members = honest(o, model, policy, base)
    reference, rounded, *made = (canonical(y, o.axes) for y in o.evaluate([formula_rounding(policy), base, *members]))
    return measure_yardstick(
        o, model, policy, reference, made, rounded if settled and rounds_inputs(o, model) else None
    )


def rounds_inputs(o: Operation, model: Model) -> bool:
    """Whether all that narrow products of a float32 result round is recorded: then rounding it is no noise.

    Attention rounds probabilities, and experts what they activate, of which float32 noise moves some across a tie.
    """
    made_inside = o.row.kind == "mix" or (o.row.with_experts is not None and model.config.sparse)
    return o.stored.dtype == np.float32 and not made_inside


def honest(o: Operation, model: Model, policy: Policy, base: Rounding) -> tuple[Rounding, ...]:
    """Return the ensemble of honest roundings of an operation."""
    few = o.stored.size // canonical(o.stored, o.axes).shape[1] < FEW
    return ensemble(o.place.point, model.config, policy, base, o.stored.dtype.name, few)


def measure_yardstick(
    o: Operation, model: Model, policy: Policy, reference: Array, made: list[Array], centre: Array | None = None
) -> Yardstick:
    """Return the yardstick from FP64 and what honest programs make of the operation, canonical.

    ``centre``: what they all round alike, from which they differ by noise alone; None: FP64.
    """
    point, dtype = o.place.point, o.stored.dtype.name
    hidden = masked_elements(point, o.positions, reference.shape[2], o.window)
    middle = reference if centre is None else centre
    deviations = [y - middle for y in made]
    shares = weights(len(deviations), dtype)
    noise = Noise.pool(deviations, reference, FORMATS[dtype].unit_roundoff, common(point, model.config), shares)
    u = inner_roundoff(point, policy, model.config)
    sizes, least = canonical(o.magnitude(u), o.axes), half_ulp(reference, dtype)
    # what the draws lack where a result cancels: their sums are exact below float32, and but three in float32
    summed = SINGLE * np.where(np.isfinite(sizes) & (True if hidden is None else ~hidden), sizes, 0.0)
    wide = dtype in ("float32", "float64")
    parts = part_sizes(o, model, policy, sizes)
    once = u == SINGLE and not wide and parts is None
    noise = replace(noise, power=noise.power + ((LEAST if wide else 1.0) * summed) ** 2)
    unrounded = max(u, FORMATS[policy.activations].unit_roundoff)
    least = least if parts is None else least + FORMATS[policy.activations].unit_roundoff * parts
    return Yardstick(
        o.axes,
        dtype,
        np.asarray(o.positions),
        canonical(o.stored, o.axes),
        reference,
        noise,
        allowed=np.asarray(u * sizes + least),
        fused=np.asarray(unrounded * sizes + least),
        hidden=hidden,
        sums=np.asarray(TIES * SINGLE * sizes) if once else None,
    )


def part_sizes(o: Operation, model: Model, policy: Policy, sizes: Array) -> Array | None:
    """Return Σ|part| of every element, times how often a sum of parts is rounded; None where the product is whole.

    ``sizes``: |A|·|B|, which bounds it where a norm, a bias or experts come after.
    """
    base, config = of_policy(policy, o.place.phase == "decode"), model.config
    split = dict(base.splits).get(o.place.point)
    if split is None:
        return None
    if o.row.normalises_inside(config) or config.sparse or (o.row.bias and getattr(config, o.row.bias)):
        return sizes * split.parts
    added = Rounding(part=np.abs, splits=((o.place.point, SplitSum(parts=split.parts, summed=WIDE)),))
    times = 1 if split.summed == WIDE else split.parts
    return np.asarray(canonical(o.evaluate([added])[0], o.axes) * times)

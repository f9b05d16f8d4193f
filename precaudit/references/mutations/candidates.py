"""What diagnosis tries on an operation, by point."""

from collections.abc import Iterator

from precaudit.models.configs import DecoderConfig
from precaudit.references.mutations.attention import variants_of_attention
from precaudit.references.mutations.integers import integer_variants
from precaudit.references.mutations.normalisation import norm_variants, other_weights
from precaudit.references.mutations.operands import operand_variants
from precaudit.references.mutations.products import (
    logit_variants,
    other_layers,
    projection_variants,
    residual_variants,
    route_variants,
)
from precaudit.references.mutations.rope_variants import rotation_variants
from precaudit.references.mutations.storing import other_roundings
from precaudit.references.mutations.variants import Variant, cut, stored
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import Policy


def variants(point: str, policy: Policy, config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield what may have been done instead of a point's operation under a policy; of equals the first is named."""
    yield Variant("as announced", "rounding", "the announced policy")
    row = POINTS[point]
    if row.attends:
        yield from variants_of_attention(row, policy, config, layer)
    if row.rotates:
        yield from rotation_variants(config, layer)
    yield from norm_variants(row, config)
    if row.kind == "norm":
        yield from stored(row.place, policy.activations)
        yield from cut(row.place, policy.activations)
        yield from other_weights(row, config)
        if row.norm(config) is not None:
            yield from other_layers(config, layer)
    if row.projects:
        yield from projection_variants(row, policy, config)
        yield from integer_variants(row, policy, config)
        yield from other_layers(config, layer)
    if row.kind == "route":
        yield from route_variants(config)
    if row.kind == "sum":
        yield from residual_variants(policy.residual)
    if row.kind == "head":
        yield from logit_variants(row, policy, config)
    if row.projects or row.kind == "head":
        yield from operand_variants(row, policy, config)
    yield from other_roundings(row, policy)

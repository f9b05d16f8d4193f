"""What diagnosis tries on an operation, by point."""

from collections.abc import Iterator

from precaudit.configs import DecoderConfig
from precaudit.diagnosis.attention import attention_variants
from precaudit.diagnosis.forms import ATTENTION, NORMS
from precaudit.diagnosis.normalisation import norm_variants, norms_inside
from precaudit.diagnosis.products import (
    PROJECTED,
    logit_variants,
    other_layers,
    projection_variants,
    residual_variants,
    rotation_variants,
)
from precaudit.diagnosis.variants import Variant, stored
from precaudit.policies import Policy


def variants(point: str, policy: Policy, config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield what may have been done instead of a point's operation under a policy; of equals the first is named."""
    yield Variant("as announced", "rounding", "the announced policy")
    if point in ATTENTION:
        yield from attention_variants(point, policy, config, layer)
    if point in ("q", "k"):
        yield from rotation_variants(config, layer)
    yield from norm_variants(point, config)
    if point in NORMS:
        yield from stored("norm", policy.activations)
        if norms_inside(point, config):
            yield from other_layers(config, layer)
    if point in PROJECTED:
        yield from projection_variants(point, policy, config)
        yield from other_layers(config, layer)
    if point in ("resid_mid", "resid_out"):
        yield from residual_variants()
    if point == "logits":
        yield from logit_variants(policy, config)

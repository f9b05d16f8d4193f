"""What a family's config.json has of its own, and what it sets in DecoderConfig: a row for each family.

Types and defaults are transformers' own (tests/models/test_configurations.py holds the two together).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from precaudit.errors import UserError
from precaudit.models.configs.fields import Raw, number, take

MOST_LAYERS = 10_000  # more is a broken file
TANH = "gelu_pytorch_tanh"
ACTIVATIONS = {"silu": "silu", "swish": "silu", TANH: "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class Source:
    """How a family's config.json is read.

    ``fields``: those it has beyond HANDLED; ``more``: what they set in DecoderConfig. The rest are the defaults
    transformers takes for a missing field. ``heads_if_null``: null key/value heads are as many as query heads;
    ``head_dim_null``: so may the size of a head be, the width over heads. ``divided``: the width has to be a multiple
    of the heads, head_dim or not. ``activation``: the field that names it and the one it is by default; ``curves``:
    names that mean another there.
    """

    more: Callable[[Raw], dict[str, Any]]
    fields: frozenset[str] = frozenset()
    context: int = 2048
    theta: float = 10000.0
    tied: bool = False
    head_dim: int | None = None
    eps: float = 1e-6
    kv_heads: int | None = None
    heads_if_null: bool = True
    head_dim_null: bool = False
    divided: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    curves: Mapping[str, str] = field(default_factory=dict)


def _llama(raw: Raw) -> dict[str, Any]:
    biased = take(raw, "attention_bias", bool, False)
    return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": take(raw, "mlp_bias", bool, False)}


def _kinds(raw: Raw, usual: list[str]) -> list[str]:
    """Return layer_types, or ``usual`` where there are none; raises UserError for others than a kind a layer."""
    given = raw.get("layer_types")
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != len(usual):
        raise UserError(f"layer_types = {given!r} is not a list of {len(usual)}")
    unknown = set(map(str, given)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"layer_types has {sorted(unknown)}, which is not supported")
    return given


def _windows(kinds: list[str], window: int | None) -> dict[str, Any]:
    """Return window and the layers without, of a kind for every layer."""
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if len(full) == len(kinds):
        return {}
    if window is None:
        raise UserError("layer_types has sliding_attention, and no sliding_window is set")
    return {"window": window, "full_layers": full}


def _sliding_windows(raw: Raw) -> dict[str, Any]:
    """Windows as Qwen has them: off unless use_sliding_window, from layer max_window_layers on."""
    window = take(raw, "sliding_window", int, 4096, null=True)
    if not take(raw, "use_sliding_window", bool, False):
        window = None
    first = take(raw, "max_window_layers", int, 28)
    slides = [window is not None and i >= first for i in range(raw["num_hidden_layers"])]
    return _windows(_kinds(raw, ["sliding_attention" if s else "full_attention" for s in slides]), window)


def _everywhere(raw: Raw, window: int | None) -> dict[str, Any]:
    """One window for every layer, whatever layer_types says: so transformers reads it. Refused where they differ."""
    kind = "full_attention" if window is None else "sliding_attention"
    usual = [kind] * raw["num_hidden_layers"]
    if _kinds(raw, usual) != usual:
        raise UserError(
            f"layer_types = {raw['layer_types']!r}: this family has one kind for all layers ({kind}, by sliding_window)"
        )
    return _windows(usual, window)


def _mistral(raw: Raw) -> dict[str, Any]:
    return _everywhere(raw, take(raw, "sliding_window", int, 4096, null=True))


def _qwen3(raw: Raw) -> dict[str, Any]:
    biased = take(raw, "attention_bias", bool, False)
    return {"qk_norm": "head", "qkv_bias": biased, "o_bias": biased, **_sliding_windows(raw)}


def _gemma(raw: Raw) -> dict[str, Any]:
    biased = take(raw, "attention_bias", bool, False)
    return {"norm_offset": 1.0, "embed_scale": sqrt(raw["hidden_size"]), "qkv_bias": biased, "o_bias": biased}


def _windowed_gemma(raw: Raw, pattern: int, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    usual = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(raw["num_hidden_layers"])]
    scalar = take(raw, "query_pre_attn_scalar", int, 256)
    if scalar <= 0:
        raise UserError(f"query_pre_attn_scalar = {scalar} must be positive")
    return {
        **_gemma(raw), "norms": "around", "query_scale": float(scalar) ** -0.5,
        "score_cap": take(raw, "attn_logit_softcapping", float, caps[0], null=True),
        "logit_cap": take(raw, "final_logit_softcapping", float, caps[1], null=True),
        **_windows(_kinds(raw, usual), take(raw, "sliding_window", int, 4096, null=True)),
    }  # fmt: skip


def _gemma2(raw: Raw) -> dict[str, Any]:
    return _windowed_gemma(raw, 2, (50.0, 30.0))


def _gemma3(raw: Raw) -> dict[str, Any]:
    pattern = take(raw, "sliding_window_pattern", int, 6, null=True)
    if not pattern and raw.get("layer_types") is None:
        raise UserError(f"sliding_window_pattern is {pattern}")
    found = _windowed_gemma(raw, pattern or 6, (None, None))
    if found.pop("score_cap") is not None:  # transformers reads the field and does not use it
        raise UserError("attn_logit_softcapping is not supported in gemma3_text")
    local: dict[Any, Any] = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    if set(local) - {"rope_theta", "rope_type"} or local.get("rope_type", "default") != "default":
        raise UserError(f"rope_parameters.sliding_attention = {local!r}: only the default RoPE is supported there")
    theta = number({"rope_theta": raw.get("rope_local_base_freq", 10000.0)} | local, "rope_theta")
    if not theta > 0:
        raise UserError(f"rope_theta of sliding_attention = {theta} must be positive")
    return {"qk_norm": "head", "local_rope_theta": theta if found.get("window") else None, **found}


def _phi3(raw: Raw) -> dict[str, Any]:
    return _everywhere(raw, take(raw, "sliding_window", int, None, null=True))


def _olmo2(raw: Raw) -> dict[str, Any]:
    biased = take(raw, "attention_bias", bool, False)
    return {"norms": "after", "qk_norm": "row", "qkv_bias": biased, "o_bias": biased}


def _seed_oss(raw: Raw) -> dict[str, Any]:
    take(raw, "pretraining_tp", int, 1)  # unread, and refused where it is no integer
    return {
        "qkv_bias": take(raw, "attention_bias", bool, True),
        "o_bias": take(raw, "attention_out_bias", bool, False),
        "mlp_bias": take(raw, "mlp_bias", bool, False),
    }


def _granite(raw: Raw) -> dict[str, Any]:
    scaling = number(raw, "logits_scaling", 1.0)
    if not scaling:
        raise UserError("logits_scaling is 0")
    return {
        "embed_scale": number(raw, "embedding_multiplier", 1.0),
        "residual_scale": number(raw, "residual_multiplier", 1.0),
        "query_scale": number(raw, "attention_multiplier", 1.0), "logit_scale": 1.0 / scaling, **_llama(raw),
    }  # fmt: skip


def _qwen3_moe(raw: Raw) -> dict[str, Any]:
    if raw.get("mlp_only_layers") or take(raw, "decoder_sparse_step", int, 1) != 1:
        raise UserError(
            "mlp_only_layers and decoder_sparse_step: only models whose every layer has experts are supported"
        )
    experts = take(raw, "num_experts", int, raw.get("num_local_experts", 128))
    if not 1 <= experts <= MOST_LAYERS:
        raise UserError(f"num_experts = {experts} is not between 1 and {MOST_LAYERS}")
    if take(raw, "num_local_experts", int, experts) != experts:
        raise UserError(f"num_local_experts = {raw['num_local_experts']} is not num_experts = {experts}")
    window = take(raw, "sliding_window", int, 4096, null=True)
    windows = _everywhere(raw, window if take(raw, "use_sliding_window", bool, False) else None)
    biased = take(raw, "attention_bias", bool, False)
    return {
        "qk_norm": "head", "qkv_bias": biased, "o_bias": biased, **windows,
        "mlp_width": take(raw, "moe_intermediate_size", int, 768), "experts": experts,
        "experts_used": take(raw, "num_experts_per_tok", int, 8),
        "renormalise": take(raw, "norm_topk_prob", bool, False),
    }  # fmt: skip


WINDOWS = frozenset(["sliding_window", "layer_types"])
SWITCHED = WINDOWS | {"use_sliding_window", "max_window_layers"}
EXPERTS = frozenset(
    [
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "mlp_only_layers", "decoder_sparse_step", "output_router_logits", "router_aux_loss_coef",
    ]
)  # fmt: skip
GEMMA = WINDOWS | {"attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
SEED_OSS = frozenset(["attention_bias", "attention_out_bias", "mlp_bias", "residual_dropout"])  # of training
MULTIPLIERS = frozenset(["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"])
SOURCES = {
    "llama": Source(_llama, frozenset(["attention_bias", "mlp_bias"]), head_dim_null=True, divided=True),
    "qwen2": Source(lambda raw: {"qkv_bias": True, **_sliding_windows(raw)}, SWITCHED, 32768, kv_heads=32),
    "qwen3": Source(_qwen3, SWITCHED | {"attention_bias"}, 32768, head_dim=128, kv_heads=32),
    "qwen3_moe": Source(
        _qwen3_moe, SWITCHED | EXPERTS | {"attention_bias"}, 32768, kv_heads=4, heads_if_null=False
    ),
    "mistral": Source(_mistral, WINDOWS, 4096 * 32, kv_heads=8, heads_if_null=False, head_dim_null=True),
    "gemma": Source(
        _gemma, frozenset(["attention_bias"]), 8192, tied=True, head_dim=256, kv_heads=16, heads_if_null=False,
        divided=True, activation=("hidden_act", TANH), curves={"gelu": TANH},  # as the first checkpoints say it
    ),
    "gemma2": Source(
        _gemma2, GEMMA, 8192, tied=True, head_dim=256, kv_heads=4, heads_if_null=False, divided=True,
        activation=("hidden_activation", TANH),
    ),
    "gemma3_text": Source(
        _gemma3, GEMMA | {"rope_local_base_freq", "sliding_window_pattern"}, 131072, 1e6, True, 256,
        kv_heads=4, heads_if_null=False, divided=True, activation=("hidden_activation", TANH),
    ),
    "phi3": Source(_phi3, WINDOWS, 4096, eps=1e-5),
    "olmo2": Source(_olmo2, frozenset(["attention_bias"]), eps=1e-5),
    "seed_oss": Source(
        _seed_oss, SEED_OSS, 524288, head_dim=128, kv_heads=8, head_dim_null=True
    ),
    "granite": Source(_granite, MULTIPLIERS | {"attention_bias", "mlp_bias"}),
}  # fmt: skip

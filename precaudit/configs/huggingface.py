"""Hugging Face config.json, field by field; a field that would change the mathematics and is not mapped is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

from precaudit.configs.decoder import DecoderConfig, RopeScaling
from precaudit.errors import UserError

Raw = Mapping[str, Any]

# Fields that do not change the forward computation.
IGNORED = frozenset(
    [
        "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
        "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "sep_token_id", "return_dict", "output_attentions", "id2label", "label2id", "output_hidden_states",
        "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "is_llama_config",
        "transformers.js_config", "auto_map", "resid_pdrop", "embd_pdrop", "cache_implementation",
        "_sliding_window_pattern", "unsloth_fixed", "unsloth_version", "_attn_implementation_autoset",
        "tokenizer_class", "torchscript", "gradient_checkpointing", "max_length", "do_sample", "temperature", "top_p",
        "top_k", "repetition_penalty", "mask_token_id", "tie_encoder_decoder", "max_sequence_length", "language",
        "embedding_dropout", "hidden_dropout", "head_dropout",
    ]
)  # fmt: skip
# Fields that would change it: the values under which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
    "shared_expert_intermediate_size": (0,),
}
# The same of single families, which others read.
OWN_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "phi3": {"attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"attention_bias": (True,)},
    "qwen3_moe": {"use_qk_norm": (True,), "qkv_bias": (False,)},
    "mistral": {"attention_bias": (False,), "mlp_bias": (False,)},
    "olmo2": {"mlp_bias": (False,)},
}
HANDLED = frozenset(
    [
        "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "max_position_embeddings", "original_max_position_embeddings", "tie_word_embeddings", "partial_rotary_factor",
        "hidden_act", "hidden_activation", "quantization_config",
    ]
)  # fmt: skip
MOST_LAYERS = 10_000  # more is a broken file
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_FIELDS = frozenset(
    [
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
        "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
        "short_factor", "long_factor", "partial_rotary_factor",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """How a family's config.json is read.

    ``fields``: those it has beyond HANDLED; ``more``: what they set in DecoderConfig. The rest are the defaults
    transformers takes for a missing field.
    """

    more: Callable[[Raw], dict[str, Any]]
    fields: frozenset[str] = frozenset()
    context: int = 2048
    theta: float = 10000.0
    tied: bool = False
    head_dim: int | None = None
    eps: float = 1e-6
    kv_heads: int | None = None


def _llama(raw: Raw) -> dict[str, Any]:
    biased = bool(raw.get("attention_bias", False))
    return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": bool(raw.get("mlp_bias", False))}


def _windows(raw: Raw, kinds: list[str], window: Any) -> dict[str, Any]:
    """Return window and the layers without, of a kind for every layer (``layer_types`` where it is given)."""
    layers = int(raw["num_hidden_layers"])
    given = raw.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != layers:
            raise UserError(f"layer_types = {given!r} is not a list of {layers}")
        kinds = given
    unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"layer_types has {sorted(unknown)}, which is not supported")
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if len(full) == layers or window is None:
        return {}
    return {"window": int(window), "full_layers": full}


def _switched(raw: Raw) -> dict[str, Any]:
    """Windows as Qwen has them: off unless use_sliding_window, from layer max_window_layers on."""
    layers = int(raw["num_hidden_layers"])
    if not raw.get("use_sliding_window", False):
        return _windows(raw, ["full_attention"] * layers, None)
    first = int(raw.get("max_window_layers", 28))
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _windows(raw, kinds, raw.get("sliding_window", 4096))


def _mistral(raw: Raw) -> dict[str, Any]:
    return _windows(raw, ["sliding_attention"] * int(raw["num_hidden_layers"]), raw.get("sliding_window", 4096))


def _qwen3(raw: Raw) -> dict[str, Any]:
    biased = bool(raw.get("attention_bias", False))
    return {"qk_norm": "head", "qkv_bias": biased, "o_bias": biased, **_switched(raw)}


def _gemma(raw: Raw, pattern: int, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    biased = bool(raw.get("attention_bias", False))
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(raw["num_hidden_layers"])]
    return {
        "norms": "around", "norm_offset": 1.0, "embed_scale": sqrt(raw["hidden_size"]), "qkv_bias": biased,
        "o_bias": biased, "query_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "score_cap": raw.get("attn_logit_softcapping", caps[0]),
        "logit_cap": raw.get("final_logit_softcapping", caps[1]),
        **_windows(raw, kinds, raw.get("sliding_window", 4096)),
    }  # fmt: skip


def _gemma2(raw: Raw) -> dict[str, Any]:
    return _gemma(raw, 2, (50.0, 30.0))


def _gemma3(raw: Raw) -> dict[str, Any]:
    found = _gemma(raw, int(raw.get("sliding_window_pattern", 6)), (None, None))
    if found.pop("score_cap") is not None:  # transformers reads the field and does not use it
        raise UserError("attn_logit_softcapping is not supported in gemma3_text")
    local: dict[Any, Any] = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    if set(local) - {"rope_theta", "rope_type"} or local.get("rope_type", "default") != "default":
        raise UserError(f"rope_parameters.sliding_attention = {local!r}: only the default RoPE is supported there")
    theta = float(local.get("rope_theta") or raw.get("rope_local_base_freq") or 10000.0)
    return {"qk_norm": "head", "local_rope_theta": theta if found.get("window") else None, **found}


def _phi3(raw: Raw) -> dict[str, Any]:
    return _windows(raw, ["sliding_attention"] * int(raw["num_hidden_layers"]), raw.get("sliding_window"))


def _olmo2(raw: Raw) -> dict[str, Any]:
    biased = bool(raw.get("attention_bias", False))
    return {"norms": "after", "qk_norm": "row", "qkv_bias": biased, "o_bias": biased}


def _granite(raw: Raw) -> dict[str, Any]:
    scaling = float(raw.get("logits_scaling", 1.0))
    if not scaling:
        raise UserError("logits_scaling is 0")
    return {
        "embed_scale": float(raw.get("embedding_multiplier", 1.0)),
        "residual_scale": float(raw.get("residual_multiplier", 1.0)),
        "query_scale": float(raw.get("attention_multiplier", 1.0)), "logit_scale": 1.0 / scaling, **_llama(raw),
    }  # fmt: skip


def _qwen3_moe(raw: Raw) -> dict[str, Any]:
    if raw.get("mlp_only_layers") or int(raw.get("decoder_sparse_step", 1)) != 1:
        raise UserError(
            "mlp_only_layers and decoder_sparse_step: only models whose every layer has experts are supported"
        )
    experts = int(raw.get("num_experts", raw.get("num_local_experts", 128)))
    if not 1 <= experts <= MOST_LAYERS:
        raise UserError(f"num_experts = {experts} is not between 1 and {MOST_LAYERS}")
    if int(raw.get("num_local_experts", experts)) != experts:
        raise UserError(f"num_local_experts = {raw['num_local_experts']} is not num_experts = {experts}")
    kind = "sliding_attention" if raw.get("use_sliding_window", False) else "full_attention"  # on every layer
    windows = _windows(raw, [kind] * int(raw["num_hidden_layers"]), raw.get("sliding_window", 4096))
    biased = bool(raw.get("attention_bias", False))
    return {
        "qk_norm": "head", "qkv_bias": biased, "o_bias": biased, **windows,
        "mlp_width": int(raw.get("moe_intermediate_size", 768)), "experts": experts,
        "experts_used": int(raw.get("num_experts_per_tok", 8)), "renormalise": bool(raw.get("norm_topk_prob", False)),
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
MULTIPLIERS = frozenset(["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"])
SOURCES = {
    "llama": Source(_llama, frozenset(["attention_bias", "mlp_bias"])),
    "qwen2": Source(lambda raw: {"qkv_bias": True, **_switched(raw)}, SWITCHED, 32768),
    "qwen3": Source(_qwen3, SWITCHED | {"attention_bias"}, 32768, head_dim=128),
    "qwen3_moe": Source(_qwen3_moe, SWITCHED | EXPERTS | {"attention_bias"}, 32768, kv_heads=4),
    "mistral": Source(_mistral, WINDOWS, 4096 * 32, kv_heads=8),
    "gemma2": Source(_gemma2, GEMMA, 8192, tied=True, head_dim=256),
    "gemma3_text": Source(_gemma3, GEMMA | {"rope_local_base_freq", "sliding_window_pattern"}, 131072, 1e6, True, 256),
    "phi3": Source(_phi3, WINDOWS, 4096, eps=1e-5),
    "olmo2": Source(_olmo2, frozenset(["attention_bias"]), eps=1e-5),
    "granite": Source(_granite, MULTIPLIERS | {"attention_bias", "mlp_bias"}),
}
FAMILIES = tuple(SOURCES)


def from_config_json(raw: Raw, where: str) -> DecoderConfig:
    """Map a Hugging Face config.json (already parsed) to a DecoderConfig.

    Raises UserError naming the field that is missing, contradictory, or not known to leave the mathematics unchanged.
    """
    try:
        return _mapped(raw)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except KeyError as error:
        raise UserError(f"{where}: field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a field has the wrong kind of value: {error}") from None


def _mapped(raw: Raw) -> DecoderConfig:
    family = raw.get("model_type")
    if family == "gemma3" and "text_config" in raw:
        raise UserError("a Gemma 3 with vision; only its text model (model_type gemma3_text) is supported")
    if not isinstance(family, str) or family not in SOURCES:
        raise UserError(f"model_type = {family!r} is not supported; supported are {', '.join(sorted(SOURCES))}")
    source = SOURCES[family]
    _refuse_unmapped(raw, source)
    _check_quantisation(raw.get("quantization_config"))
    if not 1 <= int(raw["num_hidden_layers"]) <= MOST_LAYERS:
        raise UserError(f"num_hidden_layers = {raw['num_hidden_layers']} must be at least 1, at most {MOST_LAYERS}")
    heads, width = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    head_dim = int(raw.get("head_dim") or source.head_dim or width // max(heads, 1))
    context = int(raw.get("max_position_embeddings", source.context))
    try:
        theta, scaling, share, context = _rope(raw, source, context)
    except KeyError as error:
        given = raw.get("rope_parameters") or raw.get("rope_scaling")
        raise UserError(f"rope_parameters or rope_scaling {given!r}: {error.args[0]!r} is missing") from None
    usual = "gelu_pytorch_tanh" if "gemma" in family else "silu"
    act = raw.get("hidden_activation") or ("gemma" not in family and raw.get("hidden_act")) or usual
    if act not in ACTIVATIONS:
        raise UserError(f"hidden_act = {act!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    known: dict[str, Any] = {
        "family": family,
        "layers": int(raw["num_hidden_layers"]),
        "width": width,
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or source.kv_heads or heads),
        "head_dim": head_dim,
        "mlp_width": int(raw["intermediate_size"]),
        "vocab": int(raw["vocab_size"]),
        "norm_eps": float(raw.get("rms_norm_eps", source.eps)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary": None if share == 1.0 else int(head_dim * share),
        "context": context,
        "tied": bool(raw.get("tie_word_embeddings", source.tied)),
        "activation": ACTIVATIONS[act],
    }
    return DecoderConfig(**(known | source.more(raw)))


def _refuse_unmapped(raw: Raw, source: Source) -> None:
    neutral = NEUTRAL | OWN_NEUTRAL.get(str(raw.get("model_type")), {})
    for key, value in raw.items():
        if key == "sliding_window_size":  # the older name of the same
            if value != raw.get("sliding_window", value):
                raise UserError(f"sliding_window_size = {value!r} is not sliding_window = {raw['sliding_window']!r}")
        elif key in neutral:
            if value not in neutral[key] and value is not None:
                raise UserError(f"{key} = {value!r} changes the model and is not supported")
        elif key not in IGNORED and key not in HANDLED and key not in source.fields:
            if key in SWITCHED and value in (None, False):
                continue
            if key == "max_window_layers":
                continue
            raise UserError(f"field {key!r} = {value!r} is not known to leave the mathematics unchanged")


def _check_quantisation(given: Any) -> None:
    """Raise UserError unless weights are stored as they are, or as float8 with scales (weights alone are quantised)."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise UserError("quantization_config is not a table")
    method = given.get("quant_method")
    compressed = method == "compressed-tensors" and given.get("format") == "float-quantized"
    if not compressed and method not in ("fp8", "fbgemm_fp8"):
        raise UserError(f"quantization_config.quant_method = {method!r} is not supported; only float8 with scales is")


def _rope(raw: Raw, source: Source, context: int) -> tuple[float, RopeScaling | None, float, int]:
    """Return RoPE's base, its scaling, the share of a head it turns, and the positions it is defined for.

    Fields as transformers writes them (rope_parameters) or wrote them (rope_theta and rope_scaling).
    """
    given = raw.get("rope_parameters") or {}
    if isinstance(given, Mapping) and "full_attention" in given:
        given = given["full_attention"] or {}
    older = raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(older, Mapping):
        raise UserError("rope_parameters and rope_scaling must be tables")
    rope: dict[str, Any] = {**given, **older}
    if unknown := set(rope) - ROPE_FIELDS:
        raise UserError(f"rope_parameters: {', '.join(sorted(unknown))} not known")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or source.theta)
    share = float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None, share, context
    original = rope.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or context
    if kind == "dynamic":  # the default up to the context; beyond it every key would be turned by another angle
        return theta, None, share, context
    factor = float(rope["factor"]) if rope.get("factor") is not None else context / int(original)
    known: dict[str, Any] = {"factor": factor, "original": int(original)}
    if kind == "linear":
        return theta, RopeScaling(kind="linear", **known), share, context
    if kind == "llama3":
        known |= {"low": float(rope["low_freq_factor"]), "high": float(rope["high_freq_factor"])}
        return theta, RopeScaling(kind="llama3", **known), share, context
    if kind == "yarn":
        known |= {
            "fast": float(rope.get("beta_fast") or 32), "slow": float(rope.get("beta_slow") or 1),
            "truncate": bool(rope.get("truncate", True)), "attention": _yarn_attention(rope, factor),
        }  # fmt: skip
        return theta, RopeScaling(kind="yarn", **known), share, context
    if kind in ("longrope", "su"):  # short factors; beyond the original context transformers changes to the long ones
        told = rope.get("attention_factor")
        length = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(int(original)))
        attention = length if told is None else float(told)
        divisors = tuple(float(x) for x in rope["short_factor"])
        scaling = RopeScaling(kind="longrope", attention=attention, divisors=divisors, **known)
        return theta, scaling, share, min(context, int(original))
    raise UserError(f"rope_type = {kind!r} is not supported")


def _yarn_attention(rope: Raw, factor: float) -> float:
    """Return YaRN's factor on cos and sin (Peng et al. 2023, eq. 22; mscale as in DeepSeek)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(float(rope["mscale"])) / scale(float(rope["mscale_all_dim"]))
    return scale(1.0)

"""Hugging Face config.json, field by field; a field that would change the mathematics and is not mapped is refused.

What is read, its type, its default and what goes before what are transformers' own
(tests/models/test_configurations.py holds the two together); what transformers refuses is refused.
"""

from collections.abc import Collection, Mapping
from typing import Any

from precaudit.errors import UserError
from precaudit.models.configs.families import ACTIVATIONS, MOST_LAYERS, SOURCES, Source
from precaudit.models.configs.fields import Raw, take
from precaudit.models.configs.rope import read_rope
from precaudit.models.configs.unread import UNREAD
from precaudit.schema.configuration import DecoderConfig

# Fields that would change the mathematics: the values under which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
    "shared_expert_intermediate_size": (0,),
    "per_layer_config": (),
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
FAMILIES = tuple(SOURCES)


def from_config_json(raw: Raw, where: str, allowed: Collection[str] = ()) -> DecoderConfig:
    """Map a Hugging Face config.json (already parsed) to a DecoderConfig; ``allowed``: unknown fields to pass over.

    Raises UserError naming the field that is missing, contradictory, of another type, or not known to leave the
    mathematics unchanged.
    """
    try:
        return _to_config(raw, allowed)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except KeyError as error:
        raise UserError(f"{where}: field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a field has the wrong kind of value: {error}") from None


def _to_config(raw: Raw, allowed: Collection[str]) -> DecoderConfig:
    family = raw.get("model_type")
    if family == "gemma3" and "text_config" in raw:
        raise UserError("a Gemma 3 with vision; only its text model (model_type gemma3_text) is supported")
    if not isinstance(family, str) or family not in SOURCES:
        raise UserError(f"model_type = {family!r} is not supported; supported are {', '.join(sorted(SOURCES))}")
    source = SOURCES[family]
    _refuse_unmapped(raw, source, allowed)
    _check_quantisation(raw.get("quantization_config"))
    layers = take(raw, "num_hidden_layers", int)
    if not 1 <= layers <= MOST_LAYERS:
        raise UserError(f"num_hidden_layers = {layers} must be at least 1, at most {MOST_LAYERS}")
    heads, width = take(raw, "num_attention_heads", int), take(raw, "hidden_size", int)
    if not 1 <= heads <= width:
        raise UserError(f"num_attention_heads = {heads} must be 1 to hidden_size = {width}")
    if width % heads and (source.divided or ("head_dim" not in raw and source.head_dim is None)):
        raise UserError(f"hidden_size = {width} is not a multiple of num_attention_heads = {heads}")
    null = source.head_dim_null and raw.get("head_dim", 0) is None
    head_dim = width // heads if null else take(raw, "head_dim", int, source.head_dim or width // heads)
    kv_heads = take(raw, "num_key_value_heads", int, source.kv_heads, source.heads_if_null)
    context = take(raw, "max_position_embeddings", int, source.context)
    eps = take(raw, "rms_norm_eps", float, source.eps)
    if eps < 0:
        raise UserError(f"rms_norm_eps = {eps} must not be negative")
    theta, scaling, share, context = read_rope(raw, source.theta, context)
    key, default = source.activation
    given = take(raw, key, str, default)
    name = source.curves.get(given, given)
    if name not in ACTIVATIONS:
        raise UserError(f"{key} = {given!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    known: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "mlp_width": take(raw, "intermediate_size", int),
        "vocab": take(raw, "vocab_size", int),
        "norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary": None if share == 1.0 else int(head_dim * share),
        "context": context,
        "tied": take(raw, "tie_word_embeddings", bool, source.tied),
        "activation": ACTIVATIONS[name],
    }
    return DecoderConfig(**(known | source.more(raw)))


def _refuse_unmapped(raw: Raw, source: Source, allowed: Collection[str]) -> None:
    neutral = NEUTRAL | OWN_NEUTRAL.get(str(raw.get("model_type")), {})
    for key, value in raw.items():
        if key == "sliding_window_size":  # the older name of the same
            if value != raw.get("sliding_window", value):
                raise UserError(f"sliding_window_size = {value!r} is not sliding_window = {raw['sliding_window']!r}")
        elif key in allowed:
            continue
        elif key in neutral:
            if value not in neutral[key] and value is not None:
                raise UserError(f"{key} = {value!r} changes the model and is not supported")
        elif key not in UNREAD and key not in HANDLED and key not in source.fields and value is not None:
            if key == "max_window_layers" or (key == "use_sliding_window" and value is False):
                continue
            if key == "layer_types" and value == ["full_attention"] * raw["num_hidden_layers"]:
                continue
            raise UserError(
                f"field {key!r} = {value!r} is not known to leave the mathematics unchanged; "
                f"if it does, --allow-field {key}"
            )


def _check_quantisation(given: object) -> None:
    """Raise UserError unless weights are stored as they are, or as float8 with scales (weights alone are quantised)."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise UserError("quantization_config is not a table")
    method = given.get("quant_method")
    compressed = method == "compressed-tensors" and given.get("format") == "float-quantized"
    if not compressed and method not in ("fp8", "fbgemm_fp8"):
        raise UserError(f"quantization_config.quant_method = {method!r} is not supported; only float8 with scales is")

"""Model configurations: config.json and GGUF metadata, mapped field by field; what is not understood is refused."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec

from precaudit.errors import UserError, nearest

FAMILIES = ("llama", "qwen2")

# Fields of config.json that do not change the forward computation.
IGNORED = frozenset(
    [
        "_name_or_path",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "return_dict",
        "output_attentions",
        "id2label",
        "label2id",
        "output_hidden_states",
        "problem_type",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "max_window_layers",
        "is_llama_config",
        "transformers.js_config",
        "auto_map",
    ]
)
# Fields that would change it: the values under which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "rope_scaling": (None,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}
HANDLED = frozenset(
    [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "layer_types",
    ]
)


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and constants of a decoder; widths in elements, ``context`` in positions."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    norm_eps: float
    rope_theta: float
    context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocab", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim} is odd; RoPE needs pairs")

    @property
    def parameters(self) -> int:
        """How many numbers the tensors hold."""
        total = 0
        for shape in expected_tensors(self).values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return total


@cache
def expected_tensors(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Return every tensor the model consists of, by Hugging Face name, with its shape [out, in]."""
    d, q, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (config.mlp_width, d),
        "mlp.up_proj.weight": (config.mlp_width, d),
        "mlp.down_proj.weight": (d, config.mlp_width),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.o_bias:
        layer |= {"self_attn.o_proj.bias": (d,)}
    if config.mlp_bias:
        f = config.mlp_width
        layer |= {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,), "mlp.down_proj.bias": (d,)}
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, d)}
    for i in range(config.layers):
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (d,)
    if not config.tied:
        tensors["lm_head.weight"] = (config.vocab, d)
    return MappingProxyType(tensors)


def _family(raw: Mapping[str, Any], where: str) -> str:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{where}: unknown architecture model_type = {family!r}{nearest(str(family), FAMILIES)}")
    return str(family)


def _refuse_unmapped(raw: Mapping[str, Any], where: str) -> None:
    for key, value in raw.items():
        if key in NEUTRAL:
            if value not in NEUTRAL[key] and value is not None:
                raise UserError(f"{where}: {key} = {value!r} changes the model and is not supported")
        elif key not in IGNORED and key not in HANDLED:
            raise UserError(f"{where}: field {key!r} = {value!r} is not known to leave the mathematics unchanged")
    types = raw.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise UserError(f"{where}: layer_types = {types!r} is not a list")
    if types is not None and any(t != "full_attention" for t in types):
        raise UserError(f"{where}: layer_types has {sorted(set(types) - {'full_attention'})}, which is not supported")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", raw.get("model_type") != "qwen2"):
        raise UserError(f"{where}: sliding_window = {raw['sliding_window']} is not supported")


def _rope_theta(raw: Mapping[str, Any], where: str) -> float:
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: rope_parameters is not a table")
    if rope.get("rope_type", "default") != "default" or set(rope) - {"rope_theta", "rope_type"}:
        raise UserError(f"{where}: rope_parameters = {dict(rope)!r}: only the default RoPE is supported")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


def from_config_json(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Map a Hugging Face config.json (already parsed) to a DecoderConfig.

    Raises UserError naming the field that is missing, contradictory, or not known to leave the mathematics unchanged.
    """
    family = _family(raw, where)
    _refuse_unmapped(raw, where)
    try:
        heads, width = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        return DecoderConfig(
            family=family,
            layers=int(raw["num_hidden_layers"]),
            width=width,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or width // max(heads, 1)),
            mlp_width=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw, where),
            context=int(raw.get("max_position_embeddings", 2048 if family == "llama" else 32768)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
            o_bias=family == "llama" and bool(raw.get("attention_bias", False)),
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        )
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None
    except KeyError as error:
        raise UserError(f"{where}: field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: a field has the wrong kind of value: {error}") from None


def from_gguf(meta: Mapping[str, Any], names: set[str], where: str) -> DecoderConfig:
    """Map GGUF metadata to a DecoderConfig; ``names`` are the tensors in the file (they say whether weights are tied).

    Raises UserError for another architecture, scaled RoPE, or a missing field.
    """
    arch = meta.get("general.architecture")
    family = _family({"model_type": arch}, where)
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", None):
        raise UserError(f"{where}: {arch}.rope.scaling.type = {scaling!r} is not supported")

    def field(name: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{name}", default)
        if value is None:
            raise UserError(f"{where}: metadata field {arch}.{name} is missing")
        return value

    if family == "llama" and {"blk.0.attn_q.bias", "blk.0.attn_k.bias"} & names:
        raise UserError(f"{where}: biases on q and k of a llama GGUF, whose row order is not known, are not supported")
    try:
        heads, width = int(field("attention.head_count")), int(field("embedding_length"))
        head_dim = int(field("attention.key_length", width // max(heads, 1)))
        if int(field("rope.dimension_count", head_dim)) != head_dim:
            raise UserError(f"{where}: partial RoPE ({field('rope.dimension_count')} of {head_dim}) is not supported")
        return DecoderConfig(
            family=family,
            layers=int(field("block_count")),
            width=width,
            heads=heads,
            kv_heads=int(field("attention.head_count_kv", heads)),
            head_dim=head_dim,
            mlp_width=int(field("feed_forward_length")),
            vocab=int(meta.get(f"{arch}.vocab_size") or len(meta.get("tokenizer.ggml.tokens", ()))),
            norm_eps=float(field("attention.layer_norm_rms_epsilon")),  # FP32 as stored: 9.99999975e-06
            rope_theta=float(field("rope.freq_base", 10000.0)),
            context=int(field("context_length")),
            tied="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            o_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
        )
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: a metadata field has the wrong kind of value: {error}") from None

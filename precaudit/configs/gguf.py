"""GGUF metadata, field by field."""

from collections.abc import Mapping
from typing import Any

from precaudit.configs.decoder import DecoderConfig
from precaudit.errors import UserError, nearest

ARCHITECTURES = ("llama", "qwen2")


def from_gguf(meta: Mapping[str, Any], names: set[str], where: str) -> DecoderConfig:
    """Map GGUF metadata to a DecoderConfig; ``names`` are the tensors in the file (they say whether weights are tied).

    Raises UserError for another architecture, scaled RoPE, or a missing field.
    """
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{where}: unknown architecture general.architecture = {arch!r}{nearest(str(arch), ARCHITECTURES)}"
        )
    family = str(arch)
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

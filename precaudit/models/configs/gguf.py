"""GGUF metadata, field by field."""

from collections.abc import Callable, Mapping, Sequence
from math import log, sqrt
from typing import Any

from precaudit.errors import UserError
from precaudit.schema.configuration import DecoderConfig, RopeScaling

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
Field = Callable[..., Any]
# What is read of a file's RoPE; ``finetuned`` changes nothing.
ROPE = frozenset(
    [
        "dimension_count",
        "freq_base",
        "freq_base_swa",
        "scale_linear",
        "scaling.type",
        "scaling.factor",
        "scaling.original_context_length",
        "scaling.attn_factor",
        "scaling.finetuned",
    ]
)


def from_gguf(
    meta: Mapping[str, Any], names: set[str], where: str, divisors: Sequence[float] | None = None
) -> DecoderConfig:
    """Map GGUF metadata to a DecoderConfig; ``names`` are the tensors in the file (they say whether weights are tied).

    ``divisors``: the tensor rope_freqs.weight, which Llama 3.x files hold in place of a scaling. Raises UserError for
    another architecture, a scaling or partial RoPE that is not supported, or a missing field.
    """
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{where}: general.architecture = {arch!r} is not supported; supported are {known}")

    def field(name: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{name}", default)
        if value is None:
            raise UserError(f"metadata field {arch}.{name} is missing")
        return value

    if arch == "llama" and {"blk.0.attn_q.bias", "blk.0.attn_k.bias"} & names:
        raise UserError(f"{where}: biases on q and k of a llama GGUF, whose row order is not known, are not supported")
    try:
        return _to_config(arch, field, meta, names, divisors)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a metadata field has the wrong kind of value: {error}") from None


def _to_config(
    arch: str, field: Field, meta: Mapping[str, Any], names: set[str], divisors: Sequence[float] | None
) -> DecoderConfig:
    heads, width = int(field("attention.head_count")), int(field("embedding_length"))
    head_dim = int(field("attention.key_length", width // max(heads, 1)))
    if int(field("rope.dimension_count", head_dim)) != head_dim:
        raise UserError(f"partial RoPE ({field('rope.dimension_count')} of {head_dim}) is not supported")
    layers, context = int(field("block_count")), int(field("context_length"))
    if not 1 <= layers <= 10_000:  # before any list of that length is made
        raise UserError(f"block_count = {layers} is not between 1 and 10000")
    more: dict[str, Any] = {}
    if arch in ("qwen3", "gemma3"):
        more["qk_norm"] = "head"
    if arch == "gemma3":
        more |= _gemma3(field, layers, width, heads, head_dim)
    return DecoderConfig(
        family=ARCHITECTURES[arch],
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=int(field("attention.head_count_kv", heads)),
        head_dim=head_dim,
        mlp_width=int(field("feed_forward_length")),
        vocab=int(meta.get(f"{arch}.vocab_size") or len(meta.get("tokenizer.ggml.tokens", ()))),
        norm_eps=float(field("attention.layer_norm_rms_epsilon")),  # FP32 as stored: 9.99999975e-06
        rope_theta=float(field("rope.freq_base", 1e6 if arch == "gemma3" else 10000.0)),
        rope_scaling=_scaling(field, meta, arch, context, divisors),
        context=context,
        tied="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        **more,
    )


def _gemma3(field: Field, layers: int, width: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without the file's saying so; reading its norms subtracts 1."""
    pattern = int(field("attention.sliding_window_pattern", 6))
    window = int(field("attention.sliding_window"))
    full = tuple(i for i in range(layers) if (i + 1) % pattern == 0)
    scalar = width / heads if layers == 62 else head_dim  # query_pre_attn_scalar: the 27 B model has its own
    cap = float(field("final_logit_softcapping", 0.0))
    return {
        "norms": "around",
        "norm_offset": 1.0,
        "embed_scale": sqrt(width),
        "query_scale": float(scalar) ** -0.5,
        "window": window,
        "full_layers": full,
        "local_rope_theta": float(field("rope.freq_base_swa", 10000.0)),
        "activation": "gelu_tanh",
        "logit_cap": cap or None,
    }


def _scaling(
    field: Field, meta: Mapping[str, Any], arch: str, context: int, divisors: Sequence[float] | None
) -> RopeScaling | None:
    for key in meta:
        if key.startswith(f"{arch}.rope.") and key.removeprefix(f"{arch}.rope.") not in ROPE:
            raise UserError(f"metadata field {key} = {meta[key]!r} is not known to leave the mathematics unchanged")
    if divisors is not None:
        return RopeScaling(kind="longrope", divisors=tuple(float(x) for x in divisors))
    factor = float(field("rope.scaling.factor", field("rope.scale_linear", 0.0)))
    kind = meta.get(f"{arch}.rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        original = int(field("rope.scaling.original_context_length", context))
        grown = 1.0 if factor <= 1 else 0.1 * log(factor) + 1.0  # llama.cpp multiplies its own factor by it
        attention = float(field("rope.scaling.attn_factor", 1.0)) * grown
        return RopeScaling(kind="yarn", factor=factor, original=original, attention=attention)
    raise UserError(f"{arch}.rope.scaling.type = {kind!r} is not supported")

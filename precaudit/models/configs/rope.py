"""RoPE's parameters in config.json, as transformers reads them: its base, its scaling, the share of a head it turns."""

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from precaudit.errors import UserError
from precaudit.models.configs.fields import Raw, number, take
from precaudit.schema.configuration import MOST, RopeScaling

ORIGINAL = "original_max_position_embeddings"
ROPE_FIELDS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "partial_rotary_factor",
    ]
)


def _table(raw: Raw, name: str) -> dict[str, Any]:
    """Return a table of RoPE's parameters, empty where there is none."""
    given = raw.get(name) or {}
    if not isinstance(given, Mapping):
        raise UserError(f"{name} must be a table")
    return dict(given)


def read_rope(raw: Raw, usual: float, context: int) -> tuple[float, RopeScaling | None, float, int]:
    """Return RoPE's base (``usual`` where none is given), its scaling, the share of a head it turns, and its positions.

    Fields as transformers writes them (rope_parameters) or wrote them (rope_theta and rope_scaling, which goes before).
    Raises UserError with the table that is wrong.
    """
    try:
        return _read_rope(raw, usual, context)
    except UserError as error:
        name = next((n for n in ("rope_scaling", "rope_parameters") if raw.get(n)), "")
        told = f", {name} = {str(raw[name])[:200]}" if name else ""
        raise UserError(f"RoPE{told}: {error}") from None


def _read_rope(raw: Raw, usual: float, context: int) -> tuple[float, RopeScaling | None, float, int]:
    family, older, newer = raw["model_type"], _table(raw, "rope_scaling"), _table(raw, "rope_parameters")
    nested = [k for k, v in newer.items() if k.endswith("_attention") or isinstance(v, Mapping)]
    if family == "gemma3_text":  # what lies beside the two tables is not read
        if set(nested) - {"full_attention", "sliding_attention"}:
            raise UserError(f"rope_parameters: {', '.join(sorted(nested))} not known")
        if older and newer and not newer.get("full_attention"):
            raise UserError("rope_scaling stands beside rope_parameters without full_attention")
        rope = (_table(newer, "full_attention") or {"rope_type": "default"}) | older
    elif nested and not older:
        raise UserError(f"rope_parameters: {', '.join(sorted(nested))}: only gemma3_text has one RoPE a kind of layer")
    else:
        rope = older or newer
    if unknown := set(rope) - ROPE_FIELDS:
        raise UserError(f"rope_parameters: {', '.join(sorted(unknown))} not known")
    rope = {"rope_theta": raw.get("rope_theta", usual)} | rope
    theta = number(rope, "rope_theta")
    if not theta > 0:
        raise UserError(f"rope_theta = {theta} must be positive")
    kind = rope.get("rope_type", rope.get("type", "default"))
    outer = number(raw, "partial_rotary_factor", 1.0, null=family != "phi3")
    share = number({"partial_rotary_factor": 1.0 if outer is None else outer} | rope, "partial_rotary_factor")
    if family == "phi3":
        take(raw, ORIGINAL, int, 4096)
        kind = "longrope" if kind in ("su", "yarn") else kind
        if kind not in ("default", "longrope"):
            raise UserError(f"rope_type = {kind!r} is not supported in phi3")
    elif kind == "default":
        share = 1.0  # transformers turns whole heads here, whatever partial_rotary_factor says
    elif share != 1.0:
        raise UserError(f"partial_rotary_factor = {share:g} with rope_type {kind!r}: only phi3 turns a part of a head")
    return (theta, *_read_scaling(raw, rope, kind, context, share))


def _read_scaling(raw: Raw, rope: Raw, kind: Any, context: int, share: float) -> tuple[RopeScaling | None, float, int]:
    """Return RoPE's scaling, the share of a head it turns, and the positions it is defined for."""
    if kind == "default":
        return None, share, context
    if kind == "dynamic":  # its base grows with the length beyond the context, without an end that is published
        factor = number(rope, "factor")
        scaling = RopeScaling(kind="dynamic", factor=factor, original=context)
        return scaling, share, min(int(context * max(factor, 1.0)), MOST["context"])
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        raise UserError(f"rope_type = {kind!r} is not supported")
    original = _original(raw, rope, kind, context)
    told = number(rope, "factor", None, null=True) if kind in ("yarn", "longrope") else number(rope, "factor")
    factor = context / original if told is None else told
    known: dict[str, Any] = {"factor": factor, "original": original}
    if kind == "llama3":
        known |= {"low": number(rope, "low_freq_factor"), "high": number(rope, "high_freq_factor")}
    if kind == "yarn":
        known |= {
            "fast": number(rope, "beta_fast", None, null=True) or 32.0,
            "slow": number(rope, "beta_slow", None, null=True) or 1.0,
            "truncate": take(rope, "truncate", bool, True),
            "attention": _yarn_attention(rope, factor),
        }
    if kind == "longrope":  # short factors up to the original context, long ones beyond it
        told = number(rope, "attention_factor", None, null=True)
        length = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
        if not isinstance(rope.get("long_factor"), list):
            raise UserError("longrope: 'long_factor' is missing")
        known |= {
            "attention": length if told is None else told,
            "divisors": tuple(number({"short_factor": x}, "short_factor") for x in rope.get("short_factor", ())),
            "long": tuple(number({"long_factor": x}, "long_factor") for x in rope["long_factor"]),
        }
    return RopeScaling(kind=kind, **known), share, context


def _original(raw: Raw, rope: Raw, kind: str, context: int) -> int:
    """Return the positions a model was trained on before its RoPE was stretched.

    Phi 3 has a field for them, which goes before that of its RoPE; elsewhere transformers' functions take one or the
    other, and two that differ are refused.
    """
    if raw["model_type"] == "phi3":
        return int(take(raw, ORIGINAL, int, 4096))
    inner = take(rope, ORIGINAL, int, None, null=True)
    outer = take(raw, ORIGINAL, int, None, null=True)
    if kind != "linear" and outer is not None and outer != (inner or context):
        raise UserError(f"{ORIGINAL} = {outer} is not RoPE's {inner or context}")
    return int(inner or context)


def _yarn_attention(rope: Raw, factor: float) -> float:
    """Return YaRN's factor on cos and sin (Peng et al. 2023, eq. 22; mscale as in DeepSeek)."""
    told = number(rope, "attention_factor", None, null=True)
    if told is not None:
        return float(told)

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * log(factor) + 1.0

    one, all_ = (number(rope, k, None, null=True) for k in ("mscale", "mscale_all_dim"))
    return scale(one) / scale(all_) if one and all_ else scale(1.0)

"""The sizes and constants of a decoder, whatever file they came from."""

from math import prod
from typing import Literal, NamedTuple

import msgspec

from precaudit.errors import UserError

# The largest sizes read, some way above any published model's: a file that claims more is broken or hostile.
MOST = {
    "layers": 1 << 12,
    "width": 1 << 18,
    "heads": 1 << 14,
    "kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "mlp_width": 1 << 20,
    "vocab": 1 << 23,
    "context": 1 << 30,
}


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How RoPE's frequencies are stretched to longer contexts.

    ``original``: positions it was trained on. llama3: ``low`` and ``high`` frequency factors. yarn: ``fast`` and
    ``slow`` rotations (β), ``truncate`` their range to whole dimensions. ``attention``: factor on cos and sin.
    ``divisors``: of each frequency (longrope's short ones), ``long``: of each beyond the original context.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "dynamic"]
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention: float = 1.0
    divisors: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the length of the sequence that is turned (precaudit/schema/lengths.py)."""
        return self.kind == "dynamic" or bool(self.long)


class Norms(NamedTuple):
    """Checkpoint names of a layer's norms; None where the family has none there."""

    attn: str | None
    attn_post: str | None
    mlp: str | None
    mlp_post: str | None


NORMS = {
    "before": Norms("input_layernorm", None, "post_attention_layernorm", None),
    "around": Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "after": Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}


NORM_ONCE = {"gemma", "gemma2", "gemma3_text", "olmo2"}


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and constants of a decoder; widths in elements, ``context`` in positions.

    ``rotary``: leading dimensions of a head that RoPE turns (None: all). ``window``: keys a row sees, itself included,
    in every layer but ``full_layers``; ``local_rope_theta``: RoPE's base in the windowed layers, unscaled. ``qk_norm``:
    over each head, or over the whole row of heads. ``norms``: before, around or after attention and MLP;
    ``norm_offset`` is added to norm weights. ``embed_scale``, ``residual_scale``, ``logit_scale``: factors;
    ``experts``: of the MLP, ``experts_used`` of them a token, ``mlp_width`` each (0: one dense MLP); ``renormalise``:
    the used ones' weights sum to 1. ``query_scale``: that of scores (None: 1/√K); ``score_cap``, ``logit_cap``:
    c · tanh(x / c).
    """

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
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    rotary: int | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    qk_norm: Literal["", "head", "row"] = ""
    norms: Literal["before", "around", "after"] = "before"
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    query_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: int = 0
    experts_used: int = 0
    renormalise: bool = False

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise UserError(f"{name} = {getattr(self, name)} must be 1 to {most}")
        if not 0 <= self.experts <= MOST["heads"]:
            raise UserError(f"experts = {self.experts} must be 0 to {MOST['heads']}")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.rotary_size % 2 or not 0 < self.rotary_size <= self.head_dim:
            raise UserError(f"RoPE turns {self.rotary_size} of {self.head_dim} dimensions; it needs pairs")
        self._check_scaling()
        if self.window is not None and self.window < 1:
            raise UserError(f"window = {self.window} must be at least 1")
        if self.sparse and not 1 <= self.experts_used <= self.experts:
            raise UserError(f"{self.experts_used} experts a token of {self.experts}")
        for name in ("score_cap", "logit_cap"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise UserError(f"{name} = {cap} must be positive")

    def _check_scaling(self) -> None:
        s = self.rope_scaling
        if s is None:
            return
        if not s.factor > 0 or not s.attention > 0:
            raise UserError(f"RoPE scaling: factor {s.factor} and attention factor {s.attention} must be positive")
        for divisors in (s.divisors, *([s.long] if s.long else [])) if s.kind == "longrope" else ():
            if len(divisors) != self.rotary_size // 2 or not all(d > 0 for d in divisors):
                raise UserError(
                    f"RoPE scaling: {len(divisors)} factors; {self.rotary_size // 2} positive ones are needed"
                )
        if s.kind == "dynamic" and (s.factor < 1 or self.rotary_size < 4):
            raise UserError(
                f"RoPE scaling: dynamic with factor {s.factor} (at least 1), {self.rotary_size} dimensions (4)"
            )
        if s.kind == "llama3" and not s.high > s.low > 0:
            raise UserError(f"RoPE scaling: high_freq_factor {s.high} must be larger than low_freq_factor {s.low} > 0")
        if (s.kind in ("llama3", "yarn") or s.by_length) and s.original < 1:
            raise UserError(f"RoPE scaling: original context {s.original} must be at least 1")

    @property
    def sparse(self) -> bool:
        """Whether the MLP is a mixture of experts."""
        return self.experts > 0

    @property
    def rotary_size(self) -> int:
        """The dimensions of a head that RoPE turns."""
        return self.head_dim if self.rotary is None else self.rotary

    @property
    def norm_names(self) -> Norms:
        """Checkpoint names of a layer's norms."""
        return NORMS[self.norms]

    @property
    def norm_once(self) -> bool:
        """Whether a norm is rounded once, after its weight, and not before it, too.

        By the family's name: a known mistake changes norm_offset, and no rounding with it.
        """
        return self.family in NORM_ONCE

    @property
    def score_scale(self) -> float:
        """The factor on q · k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window_of(self, layer: int | None) -> int | None:
        """Return how many keys a row of a layer sees; None: all before it."""
        return None if layer is None or layer in self.full_layers else self.window

    @property
    def parameters(self) -> int:
        """How many numbers the tensors hold."""
        from precaudit.schema.tensors import model_tensors

        return sum(prod(shape) for shape in model_tensors(self).values())

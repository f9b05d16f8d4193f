"""What is rounded where: FP64 with every place the identity, a policy, or an accumulation format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from precaudit.arrays import Array, identity, rescaled, rounder
from precaudit.configs import DecoderConfig
from precaudit.formats import FORMATS
from precaudit.numpy_decoder.passes import products
from precaudit.policies import Policy

Place = Callable[[Array], Array]


@dataclass(frozen=True)
class Rounding:
    """One callable per named place of the decoder, and ``dot``, the matrix product all sums go through.

    ``score_product``: that of q · kᵀ where it is another than ``dot``.

    Places inside one operation, which a compiler may keep unrounded: norm_inner (before the weight), linear (a
    projection before bias, norm or RoPE), biased (its sum with the bias, before norm or factor), score_dot (before the
    scale), score_scaled (before a cap), scores, probs, gate, up, silu, added (what is added to a residual narrower than
    it). norm_scale (1/rms), shifted (scores minus their
    maximum), exponential and curve (tanh, the logistic function) are those of float32 arithmetic inside norm, softmax
    and activation.
    """

    rope_table: Place = identity
    norm_scale: Place = identity
    norm_inner: Place = identity
    norm: Place = identity
    linear: Place = identity
    biased: Place = identity
    rows: Place = identity
    cache: Place = identity
    score_dot: Place = identity
    score_scaled: Place = identity
    scores: Place = identity
    shifted: Place = identity
    exponential: Place = identity
    probs: Place = identity
    attn_out: Place = identity
    proj: Place = identity
    residual: Place = identity
    gate: Place = identity
    up: Place = identity
    curve: Place = identity
    silu: Place = identity
    mlp_act: Place = identity
    logits: Place = identity
    added: Place = identity
    dot: Callable[[Array, Array], Array] = np.matmul
    score_product: Callable[[Array, Array], Array] | None = None

    def eliding(self, places: tuple[str, ...]) -> "Rounding":
        """Return the same with ``places`` left unrounded (excess precision kept by the compiler)."""
        unrounded: dict[str, Any] = dict.fromkeys(places, identity)
        return replace(self, **unrounded)

    def summing(self, dot: Callable[[Array, Array], Array]) -> "Rounding":
        """Return the same with another ``dot``; made for every operation, so without going through each field."""
        made = object.__new__(Rounding)
        made.__dict__.update(self.__dict__, dot=dot)
        return made

    def exact(self, place: str) -> bool:
        """Whether nothing is rounded at ``place``."""
        return getattr(self, place) is identity


FP64 = Rounding()
PLACES = tuple(f.name for f in fields(Rounding) if f.name not in ("dot", "score_product"))

# Places inside the operation that makes a point; a group is elided together.
ELIDABLE: dict[str, tuple[tuple[str, ...], ...]] = {
    "attn_norm": (("norm_inner",),),
    "scores": (("score_dot",),),
    "attn_out": (("score_dot",), ("scores",), ("probs",)),
    "mlp_norm": (("norm_inner",),),
    "mlp_act": (("gate",), ("up",), ("silu",)),
    "final_norm": (("norm_inner",),),
    "resid_mid": (("added",),),
    "resid_out": (("added",),),
}
BIASES = {"q": "qkv_bias", "k": "qkv_bias", "v": "qkv_bias", "attn_proj": "o_bias", "mlp_out": "mlp_bias"}


def elisions(point: str, config: DecoderConfig, policy: Policy) -> list[tuple[str, ...]]:
    """Return the sets of places a compiler may have left unrounded inside ``point``'s operation, the empty one first.

    Excess precision drops rounding to formats narrower than float32 between fused operations; a policy that switches
    it off has the empty set only.
    """
    groups = inner_places(point, config)
    formats = {
        "score_scaled": policy.scores,
        "score_dot": policy.scores,
        "scores": policy.scores,
        "probs": policy.probs,
        "silu": policy.mlp,
        "added": policy.residual if _narrows(policy) else "float32",
    }
    groups = tuple(g for g in groups if any(formats.get(p, policy.activations) != "float32" for p in g))
    if policy.excess_precision == "off":
        groups = ()
    chosen = [c for n in range(len(groups) + 1) for c in combinations(groups, n)]
    return [tuple(place for group in choice for place in group) for choice in chosen]


def inner_places(point: str, config: DecoderConfig) -> tuple[tuple[str, ...], ...]:
    """Return the places inside a point's operation, those that are elided together in one tuple."""
    post = {"attn_proj": config.norm_names.attn_post, "mlp_out": config.norm_names.mlp_post}.get(point)
    bias = BIASES.get(point)
    biased = bias is not None and getattr(config, bias)
    found: list[str] = []
    if point == "mlp_act" and config.mlp_bias:
        found = ["linear", "gate", "up", "silu"]
    elif point == "mlp_out" and config.sparse:
        found = ["gate", "up", "silu", "mlp_act", "linear"]
    elif point in ("q", "k"):
        found = ["linear", *(["biased"] if biased else []), *(["norm_inner", "norm"] if config.qk_norm else [])]
    elif post is not None or (point in ("attn_proj", "mlp_out") and config.residual_scale != 1.0):
        found = [*(["linear"] if biased else []), "biased", *(["norm_inner"] if post is not None else [])]
    elif biased:
        found = ["linear"]
    if found:
        return tuple((place,) for place in found)
    groups = ELIDABLE.get(point, ())
    if point in ("scores", "attn_out") and config.score_cap is not None:
        return (("score_scaled",), *groups)
    if point == "attn_out" and np.log2(config.score_scale) % 1 == 0:
        return (("score_dot", "scores"), ("probs",))  # a scale of 2^-n rounds nothing
    return groups


@cache
def of_policy(policy: Policy, decode: bool = False) -> Rounding:
    """Return the roundings ``policy`` declares; ``decode`` for attention over the cache.

    Its ``matmul`` is that of the device (``policies.on_device``).

    float32 inside norms, RoPE and softmax is 2^16 times finer than a bfloat16 result and is not emulated there.
    """
    activations = rounder(policy.activations)
    single = decode and policy.decode_attention == "float32"
    scores = rounder("float32" if single else policy.scores)
    return Rounding(
        rope_table=rounder(policy.rope),
        norm_inner=activations,
        norm=activations,
        linear=activations,
        biased=activations,
        rows=activations,
        cache=rounder(policy.kv_cache),
        score_dot=scores,
        score_scaled=scores,
        scores=scores,
        probs=rounder("float32" if single else policy.probs),
        attn_out=rounder(policy.attn_out),
        proj=activations,
        residual=rounder(policy.residual),
        gate=activations,
        up=activations,
        silu=rounder(policy.mlp),
        mlp_act=activations,
        logits=rounder(policy.logits),
        added=rounder(policy.residual) if _narrows(policy) else identity,
        dot=products(policy.matmul),
    )


def _narrows(policy: Policy) -> bool:
    """Whether what is added to the residual is rounded to its narrower format first."""
    return FORMATS[policy.residual].precision < FORMATS[policy.activations].precision


def redrawn(rounding: Rounding, seed: int) -> Rounding:
    """Return ``rounding`` with other rounding errors of the same size: every place rounds to its grid times a factor.

    round(x · s) / s with s drawn from [1, 2) for each place: the errors of a program whose values had fallen elsewhere
    between the format's numbers (in the spirit of Monte Carlo arithmetic: Parker, Pierce & Eggert 2000). Seed 0 draws
    s = 1: the policy itself.
    """
    if seed == 0:
        return rounding
    draw = np.random.default_rng(seed)
    scaled: dict[str, Any] = {}
    for place in PLACES:
        factor = float(2.0 ** draw.uniform(0.0, 1.0))
        if not rounding.exact(place):
            scaled[place] = rescaled(getattr(rounding, place), factor)
    return replace(rounding, **scaled)


def single_precision_dot(a: Array, b: Array) -> Array:
    """Return a · b summed in float32 in BLAS's order: what float32 accumulation typically does, as a size."""
    return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(np.float64)


def sharing_products(roundings: Sequence[Rounding]) -> list[Rounding]:
    """Return the roundings with their ``dot`` replaced so that each product of the same operands is computed once.

    For operations on the same arrays one after another: what is remembered holds its operands, so that an address
    stands for one array as long as the returned roundings live.
    """
    memory: dict[Any, tuple[Array, Array, Array]] = {}

    def once(dot: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
        def product(a: Array, b: Array) -> Array:
            key = (dot, a.ctypes.data, a.shape, a.strides, b.ctypes.data, b.shape, b.strides)
            if key not in memory:
                memory[key] = (a, b, dot(a, b))
            return memory[key][2]

        return product

    return [r.summing(once(r.dot)) for r in roundings]

"""What is rounded where: FP64 with every place the identity, a policy, or an accumulation format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.parted import dot_in_parts
from precaudit.models.numpy_decoder.passes import matmul_products
from precaudit.models.numpy_decoder.routing import Routing
from precaudit.numbers.arrays import Array, identity, rescale_rounding, rounder
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.integers import InRows
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import FLASH_BLOCK, DevicePolicy, Policy
from precaudit.schema.records.devices import SplitSum

Cast = Callable[[Array], Array]


@dataclass(frozen=True)
class Blocks:
    """Blocks of ``size`` keys; the first key stands at slot ``start``, and blocks begin at multiples of their size."""

    size: int
    start: int = 0

    def edges(self, keys: int) -> list[int]:
        """Return where blocks of ``keys`` keys begin, and the end."""
        return [0, *range(self.size - self.start % self.size, keys, self.size), keys]


@dataclass(frozen=True)
class Rounding:
    """One callable per named place, with the policy key of its format, and ``dot``, the product all sums go through.

    ``rope_sine``: of RoPE's sines where they are rounded otherwise than its cosines.
    ``score_product``: that of q · kᵀ where it is another than ``dot``. ``blocks``: where attention runs over blocks of
    keys under a running maximum, which ones.

    Places inside one operation, which a compiler may keep unrounded: norm_inner (before the weight), linear (a
    projection before bias, norm or RoPE), biased (its sum with the bias, before norm or factor), score_dot (before the
    scale), score_scaled (before a cap), scores, probs, gate, up, silu, added (what is added to a residual narrower than
    it). norm_scale (1/rms), shifted (scores minus their
    maximum), exponential, running (a kernel's sums of blocks) and curve (tanh, the logistic function) are those of
    float32 arithmetic inside norm, softmax, attention and activation. operand: what a layer's projections multiply,
    which no compiler leaves out. part: a part of a product, as one of several devices makes it; ``splits``: the points
    whose products are made in parts, and how these are added. ``routing``: which experts tokens use, where that is not
    decided by their logits alone.
    """

    rope_table: Annotated[Cast, "rope"] = identity
    operand: Annotated[Cast, "projection_inputs"] = identity
    norm_scale: Cast = identity
    norm_inner: Annotated[Cast, "activations"] = identity
    norm: Annotated[Cast, "activations"] = identity
    linear: Annotated[Cast, "activations"] = identity
    biased: Annotated[Cast, "activations"] = identity
    rows: Annotated[Cast, "activations"] = identity
    router: Annotated[Cast, "router"] = identity
    cache: Annotated[Cast, "kv_cache"] = identity
    score_dot: Annotated[Cast, "scores"] = identity
    score_scaled: Annotated[Cast, "scores"] = identity
    scores: Annotated[Cast, "scores"] = identity
    shifted: Cast = identity
    exponential: Cast = identity
    running: Cast = identity
    probs: Annotated[Cast, "probs"] = identity
    attn_out: Annotated[Cast, "attn_out"] = identity
    proj: Annotated[Cast, "activations"] = identity
    residual: Annotated[Cast, "residual"] = identity
    gate: Annotated[Cast, "activations"] = identity
    up: Annotated[Cast, "activations"] = identity
    curve: Cast = identity
    silu: Annotated[Cast, "mlp"] = identity
    mlp_act: Annotated[Cast, "activations"] = identity
    logits: Annotated[Cast, "logits"] = identity
    added: Annotated[Cast, "residual"] = identity
    part: Annotated[Cast, "activations"] = identity
    dot: Callable[[Array, Array], Array] = np.matmul
    score_product: Callable[[Array, Array], Array] | None = None
    rope_sine: Cast | None = None
    blocks: Blocks | None = None
    splits: tuple[tuple[str, SplitSum], ...] = ()
    routing: Routing | None = None

    def product_of(self, point: str) -> Callable[[Array, Array], Array]:
        """Return the product of a projection that makes a point."""
        split = next((split for name, split in self.splits if name == point), None)
        return self.dot if split is None else dot_in_parts(split, self.part, self.dot)

    def eliding(self, places: tuple[str, ...]) -> "Rounding":
        """Return the same with ``places`` left unrounded (excess precision kept by the compiler)."""
        unrounded: dict[str, Any] = dict.fromkeys(places, identity)
        return replace(self, **unrounded)

    def summing(self, dot: Callable[[Array, Array], Array]) -> "Rounding":
        """Return the same with another ``dot``; made for every operation, so without going through each field."""
        made = object.__new__(Rounding)
        made.__dict__.update(self.__dict__, dot=dot)
        return made

    def starting(self, slot: int) -> "Rounding":
        """Return the same where a sequence's first key stands at a slot; only blocks of keys depend on it."""
        return self if self.blocks is None or not slot else replace(self, blocks=replace(self.blocks, start=slot))

    def exact(self, place: str) -> bool:
        """Whether nothing is rounded at ``place``."""
        return getattr(self, place) is identity


FP64 = Rounding()
OTHERS = ("dot", "score_product", "rope_sine", "blocks", "splits", "routing")  # fields that are no place
PLACES = tuple(f.name for f in fields(Rounding) if f.name not in OTHERS)
_HINTS = get_type_hints(Rounding, include_extras=True)
FORMAT_OF = {name: get_args(_HINTS[name])[1] for name in PLACES if _HINTS[name] != Cast}


def elisions(point: str, config: DecoderConfig, policy: Policy) -> list[tuple[str, ...]]:
    """Return the sets of places a compiler may have left unrounded inside ``point``'s operation, the empty one first.

    Excess precision drops rounding to formats narrower than float32 between fused operations; a policy that switches
    it off has the empty set only.
    """
    groups = tuple(g for g in POINTS[point].inner_places(config) if any(_format(p, policy) != "float32" for p in g))
    if policy.excess_precision == "off":
        groups = ()
    chosen = [c for n in range(len(groups) + 1) for c in combinations(groups, n)]
    return [tuple(place for group in choice for place in group) for choice in chosen]


@cache
def of_policy(policy: Policy, decode: bool = False) -> Rounding:
    """Return the roundings ``policy`` declares; ``decode`` for attention over the cache.

    Its ``matmul`` is that of the device (``policies.on_device``).

    float32 inside norms, RoPE and softmax is 2^16 times finer than a bfloat16 result and is not emulated there.
    """
    single = ("scores", "probs") if decode and policy.decode_attention == "float32" else ()
    places: dict[str, Any] = {
        name: rounder("float32") if key in single else _cast(policy, key)
        for name, key in FORMAT_OF.items()
        if name != "added" or _narrows(policy)
    }
    blocks = Blocks(FLASH_BLOCK) if policy.attention == "flash" else None
    splits = policy.splits(decode) if isinstance(policy, DevicePolicy) else ()
    return Rounding(**places, dot=matmul_products(policy.matmul), blocks=blocks, splits=splits)


@cache
def formula_rounding(policy: Policy, decode: bool = False) -> Rounding:
    """Return FP64 with the casts to integers a policy asks for, in FP64: they are meant, and are no rounding error.

    ``decode``: the cache's, too.
    """
    operand = InRows(exact=True) if policy.projection_inputs == "int8" else identity
    return Rounding(operand=operand, cache=InRows(exact=True) if decode and policy.kv_cache == "int8" else identity)


def _cast(policy: Policy, key: str) -> Cast:
    """Return what a policy does to the values of a key; rows of a cache of integers are read as activations."""
    value = getattr(policy, key)
    if value == "int8":
        return InRows(stored=policy.activations if key == "kv_cache" else None)
    if key == "projection_inputs":
        return identity  # rows are of the activations' format already
    return rounder(policy.format_of(key))


def _format(place: str, policy: Policy) -> str:
    """Return the format that a policy rounds a place to; float32 where it rounds nothing."""
    return "float32" if place == "added" and not _narrows(policy) else policy.format_of(FORMAT_OF[place])


def _narrows(policy: Policy) -> bool:
    """Whether what is added to the residual is rounded to its narrower format first."""
    return FORMATS[policy.residual].precision < FORMATS[policy.activations].precision


def redrawn(rounding: Rounding, seed: int) -> Rounding:
    """Return ``rounding`` with other rounding errors of the same size: every place rounds to its grid times a factor.

    round(x · s) / s with s drawn from [1, 2) for each place; of integers, on a grid moved by a part of its step: the
    errors of a program whose values had fallen elsewhere between the format's numbers (in the spirit of Monte Carlo
    arithmetic: Parker, Pierce & Eggert 2000). Seed 0 draws s = 1: the policy itself.
    """
    if seed == 0:
        return rounding
    draw = np.random.default_rng(seed)
    scaled: dict[str, Any] = {}
    for place in PLACES:
        step, made = draw.uniform(0.0, 1.0), getattr(rounding, place)
        if isinstance(made, InRows):
            scaled[place] = made.on_moved_grid(step - 0.5)
        elif not rounding.exact(place):
            scaled[place] = rescale_rounding(made, float(2.0**step))
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

"""The decoder's operations, in program order: what each reads, rounds and sums (docs/files.md)."""

from collections.abc import Sequence
from math import log2
from typing import TYPE_CHECKING

from precaudit.schema.graphs.point import InsidePlaces, Point

if TYPE_CHECKING:
    from precaudit.schema.configuration import DecoderConfig


def _qk_norm(name: str, config: "DecoderConfig") -> str | None:
    return f"self_attn.{name}" if config.qk_norm else None


def _fine_scale(c: "DecoderConfig") -> bool:
    """Whether the scale rounds what it multiplies, or a cap follows: a scale of 2^-n alone rounds nothing."""
    return c.score_cap is not None or log2(c.score_scale) % 1 != 0


def _one_by_one(*places: str) -> tuple[InsidePlaces, ...]:
    return tuple(InsidePlaces((place,)) for place in places)


_NORM = _one_by_one("norm_inner")
_ADDED = _one_by_one("added")
_ACTIVATION = _one_by_one("gate", "up", "silu")
_CAPPED = InsidePlaces(("score_scaled",), lambda c: c.score_cap is not None)
_ROTATED = (
    InsidePlaces(("linear",)),
    InsidePlaces(("biased",), lambda c: c.qkv_bias),
    InsidePlaces(("norm_inner",), lambda c: bool(c.qk_norm)),
    InsidePlaces(("norm",), lambda c: bool(c.qk_norm)),
)
_PROJECTED = (
    InsidePlaces(("linear",), lambda c: c.o_bias),
    InsidePlaces(("biased",), lambda c: c.norm_names.attn_post is not None or c.residual_scale != 1.0),
    InsidePlaces(("norm_inner",), lambda c: c.norm_names.attn_post is not None),
)
_MLP_OUT = (
    *(InsidePlaces((place,), lambda c: c.sparse) for place in ("gate", "up", "silu", "mlp_act", "linear")),
    InsidePlaces(("linear",), lambda c: not c.sparse and c.mlp_bias),
    InsidePlaces(
        ("biased",), lambda c: not c.sparse and (c.norm_names.mlp_post is not None or c.residual_scale != 1.0)
    ),
    InsidePlaces(("norm_inner",), lambda c: not c.sparse and c.norm_names.mlp_post is not None),
)

POINTS = {
    p.name: p
    for p in (
        Point(
            "resid_in", "stream", "TD", (), "residual stream entering the layer",
            format="residual", handed="resid_out",
        ),
        Point(
            "attn_norm", "norm", "TD", ("resid_in",), "norm(resid_in)",
            place="norm", inner=("activations",), arithmetic="norm", inside=_NORM, norm=lambda c: c.norm_names.attn,
            shows=("norm",),
        ),
        Point(
            "q", "projection", "THK", ("attn_norm",), "queries as attention consumes them, after RoPE",
            place="rows", operands=("activations",), inner=("activations", "rope"), arithmetic="rope",
            inside=_ROTATED, norm=lambda c: _qk_norm("q_norm", c), bias="qkv_bias",
            shows=("rope",),
        ),
        Point(
            "k", "projection", "TGK", ("attn_norm",), "the key rows made in this step, after RoPE",
            cache="k_cache", place="rows", operands=("activations",), inner=("activations", "rope"), arithmetic="rope",
            inside=_ROTATED, norm=lambda c: _qk_norm("k_norm", c), bias="qkv_bias",
        ),
        Point(
            "v", "projection", "TGK", ("attn_norm",), "the value rows made in this step",
            cache="v_cache", place="rows", operands=("activations",), bias="qkv_bias",
            inside=(InsidePlaces(("linear",), lambda c: c.qkv_bias),),
        ),
        Point("k_cache", "cache", "SGK", ("k",), "the keys decode attention read", state=True, format="kv_cache"),
        Point("v_cache", "cache", "SGK", ("v",), "the values decode attention read", state=True, format="kv_cache"),
        Point(
            "scores", "score", "HTS", ("q", "k"), "after scale, before the mask",
            within="attn_out", place="scores", format="scores", operands=("activations",), inner=("scores",),
            inside=(_CAPPED, InsidePlaces(("score_dot",))), tensors=False, cap="score_cap",
        ),
        Point(
            "probs", "softmax", "HTS", ("scores",), "after mask and softmax",
            within="attn_out", place="probs", format="probs", arithmetic="softmax", tensors=False,
        ),
        Point(
            "attn_out", "mix", "THK", ("q", "k", "v"), "probs · v, before the output projection",
            place="attn_out", format="attn_out", operands=("probs", "activations"), inner=("scores", "probs"),
            arithmetic="softmax", tensors=False, milestone=True,
            shows=("scores", "probs", "softmax", "attn_out", "attention"),
            inside=(
                _CAPPED,
                InsidePlaces(("score_dot",), _fine_scale),
                InsidePlaces(("scores",), _fine_scale),
                InsidePlaces(("score_dot", "scores"), lambda c: not _fine_scale(c)),
                InsidePlaces(("probs",)),
            ),
        ),
        Point(
            "attn_proj", "projection", "TD", ("attn_out",), "what attention adds to the residual",
            place="proj", operands=("activations",), inside=_PROJECTED, norm=lambda c: c.norm_names.attn_post,
            bias="o_bias",
        ),
        Point(
            "resid_mid", "sum", "TD", ("resid_in", "attn_proj"), "resid_in + attn_proj",
            place="residual", format="residual", inside=_ADDED, tensors=False,
        ),
        Point(
            "mlp_norm", "norm", "TD", ("resid_mid",), "norm(resid_mid)",
            place="norm", inner=("activations",), arithmetic="norm", inside=_NORM, norm=lambda c: c.norm_names.mlp,
        ),
        Point(
            "router", "projection", "TE", ("mlp_norm",), "router logits of a mixture of experts",
            only="sparse", place="router", format="router", operands=("activations",), shows=("router",),
        ),
        Point(
            "experts", "route", "TE", ("router",), "weights of the chosen experts, 0 for the others",
            only="sparse", place="rows", tensors=False,
        ),
        Point(
            "gate_out", "gate", "TF", ("mlp_norm",), "act(gate), before · up; dense models only",
            only="dense", within="mlp_act", place="silu", format="mlp", operands=("activations",),
            inner=("activations",), bias="mlp_bias",
            inside=(InsidePlaces(("linear",), lambda c: c.mlp_bias), *_one_by_one("gate")),
        ),
        Point(
            "mlp_act", "gate", "TF", ("mlp_norm",), "act(gate) · up; dense models only",
            only="dense", place="mlp_act", operands=("activations",), inner=("activations", "mlp"), bias="mlp_bias",
            inside=(InsidePlaces(("linear",), lambda c: c.mlp_bias), *_ACTIVATION), shows=("mlp",),
        ),
        Point(
            "mlp_out", "projection", "TD", ("mlp_act",), "what the MLP adds to the residual",
            with_experts=("mlp_norm", "experts"), place="proj", operands=("activations",), inside=_MLP_OUT,
            norm=lambda c: c.norm_names.mlp_post, bias="mlp_bias", shows=("activations",),
        ),
        Point(
            "resid_out", "sum", "TD", ("resid_mid", "mlp_out"), "resid_mid + mlp_out",
            place="residual", format="residual", inside=_ADDED, tensors=False, milestone=True, shows=("residual",),
        ),
        Point(
            "final_norm", "norm", "TD", ("resid_out",), "norm(last resid_out)",
            per_layer=False, place="norm", inner=("activations",), arithmetic="norm", inside=_NORM,
            norm=lambda _c: "model.norm", shows=("logits",),
        ),
        Point(
            "logits", "head", "TV", ("final_norm",), "before any softmax",
            per_layer=False, place="logits", format="logits", operands=("activations",), cap="logit_cap",
            milestone=True,
        ),
    )
}  # fmt: skip
DEFAULT_POINTS = ("q", "k", "v", "attn_out", "logits")
LOGITS = "logits"  # the output whose KL and top-1 are told, of any program
STREAM = next(p.handed for p in POINTS.values() if p.handed is not None)  # what a layer hands the next
BETWEEN_LAYERS = {
    n for p in POINTS.values() if p.handed is not None for n in (p.name, p.handed)
}  # the stream between layers
MIX = next(p.name for p in POINTS.values() if p.kind == "mix")
QUERY, KEYS, VALUES = POINTS[MIX].inputs
CACHES = {p.name: p.cache for p in POINTS.values() if p.cache is not None}


def point_of(names: Sequence[str]) -> str:
    """Return the innermost name of a path that is a point; "" where none is."""
    return next((name for name in reversed(names) if name in POINTS), "")


def present(sparse: bool) -> tuple[str, ...]:
    """Return the points a model has; ``sparse``: a mixture of experts."""
    return tuple(p.name for p in POINTS.values() if p.only in (None, "sparse" if sparse else "dense"))


def hidden(attention: str) -> tuple[str, ...]:
    """Return the points that a policy's attention kernel does not show: those within the operation it makes at once."""
    return () if attention == "naive" else tuple(p.name for p in POINTS.values() if p.attends and p.within is not None)


def shape_of(axes: str, c: "DecoderConfig", positions: int = 1, keys: int = 1) -> tuple[int, ...]:
    """Return the sizes of axes, by the letters of ``Point.axes``."""
    sizes = {
        "T": positions, "S": keys, "D": c.width, "H": c.heads, "G": c.kv_heads, "K": c.head_dim, "F": c.mlp_width,
        "E": c.experts, "V": c.vocab,
    }  # fmt: skip
    return tuple(sizes[a] for a in axes)


def row_shapes(c: "DecoderConfig") -> dict[str, tuple[int, ...]]:
    """Return the shape of one row of every point that has a row for each position."""
    return {p.name: shape_of(p.axes[1:], c) for p in POINTS.values() if p.axes[0] == "T"}


def inputs_of(name: str, sparse: bool) -> tuple[str, ...]:
    """Return the points a point's local error is computed from."""
    row = POINTS[name]
    return row.with_experts if sparse and row.with_experts is not None else row.inputs


def parts_of(name: str) -> tuple[str, ...]:
    """Return the points within an operation, the last of them first."""
    return tuple(p.name for p in reversed(POINTS.values()) if p.within == name)


def support(
    points: tuple[str, ...], phases: tuple[str, ...], sparse: bool = False, fused: bool = False, vector: bool = False
) -> tuple[str, ...]:
    """Return the points that must be recorded besides ``points`` so that every local error can be computed.

    Attention's inputs are the caches in decode; the caches are compared with the recorded k and v rows. ``fused``: a
    compiler may hand an operation its input as it was before it was rounded, so what makes that input is needed, too;
    a norm may read the unrounded sum of a layer, whose summands tell. ``vector``: the device makes products of one row
    on a vector unit (a TPU), which the last norm is fused into, too.
    """
    wanted = set(points)
    needed: set[str] = set()
    for name in points:
        row, inputs = POINTS[name], inputs_of(name, sparse)
        needed.update(inputs)
        if row.handed is not None:
            needed.add(row.handed)
        for source in inputs if fused else ():
            needed.update(inputs_of(source, sparse) if vector or POINTS[source].per_layer else ())
        if row.kind == "norm" and row.per_layer:
            needed.update(n for source in inputs for n in inputs_of(source, sparse))
        if "decode" in phases and row.reads_keys:
            needed.update(CACHES[n] for n in inputs if n in CACHES)
    for made, cache in CACHES.items():
        if cache in wanted | needed:
            needed.add(made)
    return tuple(n for n in POINTS if n in needed - wanted)

"""The table of points (design §4): what can be recorded, its axes, and what its local error is computed from."""

from dataclasses import dataclass

from precaudit.errors import UserError, nearest


@dataclass(frozen=True)
class Point:
    """A named place in the program.

    ``axes``: T positions, D width, H query heads, G key/value heads, K head dimension, S key positions, F MLP width,
    E experts, V vocabulary. ``inputs``: the points its local error needs. ``state``: expected equal to the rows earlier
    steps recorded, bit for bit, instead of close to FP64.
    """

    name: str
    axes: str
    inputs: tuple[str, ...]
    text: str
    per_layer: bool = True
    state: bool = False


POINTS = {
    p.name: p
    for p in (
        Point("resid_in", "TD", (), "residual stream entering the layer"),
        Point("attn_norm", "TD", ("resid_in",), "norm(resid_in)"),
        Point("q", "THK", ("attn_norm",), "queries as attention consumes them, after RoPE"),
        Point("k", "TGK", ("attn_norm",), "the key rows made in this step, after RoPE"),
        Point("v", "TGK", ("attn_norm",), "the value rows made in this step"),
        Point("k_cache", "SGK", ("k",), "the keys decode attention read", state=True),
        Point("v_cache", "SGK", ("v",), "the values decode attention read", state=True),
        Point("scores", "HTS", ("q", "k"), "after scale, before the mask"),
        Point("probs", "HTS", ("scores",), "after mask and softmax"),
        Point("attn_out", "THK", ("q", "k", "v"), "probs · v, before the output projection"),
        Point("attn_proj", "TD", ("attn_out",), "what attention adds to the residual"),
        Point("resid_mid", "TD", ("resid_in", "attn_proj"), "resid_in + attn_proj"),
        Point("mlp_norm", "TD", ("resid_mid",), "norm(resid_mid)"),
        Point("router", "TE", ("mlp_norm",), "router logits of a mixture of experts"),
        Point("experts", "TE", ("router",), "weights of the chosen experts, 0 for the others"),
        Point("mlp_act", "TF", ("mlp_norm",), "act(gate) · up; dense models only"),
        Point("mlp_out", "TD", ("mlp_act",), "what the MLP adds to the residual"),
        Point("resid_out", "TD", ("resid_mid", "mlp_out"), "resid_mid + mlp_out"),
        Point("final_norm", "TD", ("resid_out",), "norm(last resid_out)", per_layer=False),
        Point("logits", "TV", ("final_norm",), "before any softmax", per_layer=False),
    )
}
DEFAULT_POINTS = ("q", "k", "v", "attn_out", "logits")
CACHES = {"k": "k_cache", "v": "v_cache"}


def parse_points(text: str) -> tuple[tuple[str, ...], bool]:
    """Return the points named in ``"q,k,logits:all"`` in table order, and whether logits are wanted everywhere.

    ``all`` names every point. Raises UserError for an unknown one.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UserError("no point is named; for example --points q,k,v,attn_out,logits")
    every_logit = "logits:all" in names
    chosen = {n.removesuffix(":all") if n == "logits:all" else n for n in names}
    if "all" in chosen:
        chosen = (chosen - {"all"}) | set(POINTS)
    for name in chosen:
        if name not in POINTS:
            raise UserError(f"unknown point {name!r}{nearest(name, [*POINTS, 'all', 'logits:all'])}")
    return tuple(n for n in POINTS if n in chosen), every_logit


SPARSE = ("router", "experts")
DENSE = ("mlp_act",)


def present(sparse: bool) -> tuple[str, ...]:
    """Return the points a model has; ``sparse``: a mixture of experts."""
    absent = DENSE if sparse else SPARSE
    return tuple(n for n in POINTS if n not in absent)


def inputs_of(name: str, sparse: bool) -> tuple[str, ...]:
    """Return the points a point's local error is computed from."""
    return ("mlp_norm", "experts") if sparse and name == "mlp_out" else POINTS[name].inputs


def support(
    points: tuple[str, ...], phases: tuple[str, ...], sparse: bool = False, fused: bool = False
) -> tuple[str, ...]:
    """Return the points that must be recorded besides ``points`` so that every local error can be computed.

    Attention's inputs are the caches in decode; the caches are compared with the recorded k and v rows. ``fused``: a
    compiler may hand an operation its input as it was before it was rounded, so what makes that input is needed, too.
    """
    wanted = set(points)
    needed: set[str] = set()
    for name in points:
        needed.update(inputs_of(name, sparse))
        if name == "resid_in":  # it is what the layer before handed over
            needed.add("resid_out")
        for source in inputs_of(name, sparse) if fused else ():
            needed.update(inputs_of(source, sparse) if POINTS[source].per_layer else ())
        if name == "mlp_norm":  # a compiler may hand it the sum unrounded: its summands tell
            needed.update(POINTS["resid_mid"].inputs)
        if "decode" in phases and name in ("scores", "attn_out"):
            needed.update(CACHES[n] for n in POINTS[name].inputs if n in CACHES)
    for row, cache in CACHES.items():
        if cache in wanted | needed:
            needed.add(row)
    return tuple(n for n in POINTS if n in needed - wanted)

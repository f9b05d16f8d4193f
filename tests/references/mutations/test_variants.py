"""Every variant is told from every other, in every family: what made a tensor is what diagnosis names."""

import re
from dataclasses import replace

import jax.numpy as jnp
import msgspec
import pytest

from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.jax_decoder.parts import attention_scores, masked_softmax
from precaudit.models.numpy_decoder.rounding import of_policy
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.mutations.candidates import variants
from precaudit.references.mutations.forms import evaluate_form
from precaudit.references.mutations.replay import KnownBeside, operands_of, replay
from precaudit.references.textbook.alternatives import unrounded_inputs
from precaudit.schema.graphs.decoder import POINTS, present
from precaudit.schema.prompts import Prompt
from tests.helpers.fixture_runs import SMALL, TOKENS
from tests.helpers.paths import FIXTURES
from tests.helpers.recorded_operations import ALL, holding, operation_of

pytestmark = pytest.mark.usefixtures("neutral")

JUDGED = tuple(p.name for p in POINTS.values() if p.inputs and not p.state)
QUICK = ("mistral-window",)
# What is one and the same on some models, and why. Named is the first; the elements are the same bit for bit.
SAME = {
    r"flash, blocks of 128, in (\w+)": (r"flash, blocks of 64, in \1", "there are fewer than 64 keys"),
    r"sums in (\w+), blocks of 128": (r"stored in \1", "a sum has fewer than 128 terms"),
    r"scores and products in (\w+)": (r"scores in \1", "the scale is a power of two"),
    r"scale before the product": ("as announced", "the scale is a power of two, or q·scale is exact"),
    r"positions in \w+": ("as announced", "every position is exact there"),
    r"positions -1, at least 0": ("positions -1", "position 0 was not recorded"),
    r"epsilon rounded to \w+": ("as announced", "epsilon is too small to matter"),
    r"norm in (\w+)": (r"stored in \1", "the norm is over a few elements"),
    r"window one (short|long)": ("as announced", "no row is as long as the window"),
    r"no window": ("as announced", "no row is as long as the window"),
    r"scores: sums in (\w+), blocks of 128": (r"scores in \1", "a head is one block; the scale is a power of two"),
}
# Honest in float32: nothing is to be found
WITHIN = (r"as announced", r"sums in float32.*", r"flash, .* in float32", r"positions in \w+", r"epsilon rounded to .*")


def before_rounding(run, o, model, policy):
    return [x for _, x in unrounded_inputs(run, model, o, policy)]


def named(o, model, policy, variant):
    """Return what diagnosis names where a variant made the recorded values."""
    values = evaluate_form(variant.form, operands_of(o, model), variant.change(of_policy(policy)))
    return values, replay(holding(o, values), model, policy).named


def alike(o, model, policy, variant, values):
    """Whether a variant makes these values too; float32 sums move a rounding now and then."""
    first = evaluate_form(variant.form, operands_of(o, model), variant.change(of_policy(policy)))
    return (holding(o, first).part.values == holding(o, values).part.values).mean() >= 0.999


def check(operation, name, point, layer, policy):
    o, model, rules = operation(name, point, policy, layer)
    every = {v.name: v for v in variants(point, rules, model.config, o.place.layer)}
    for v in every.values():
        values, found = named(o, model, rules, v)
        assert found is not None, (name, point, layer, v.name)
        if found.variant.name == v.name:
            continue
        if found.variant.name == "as announced" and any(re.fullmatch(p, v.name) for p in WITHIN):
            continue
        if found.variant.number is not None and v.name == f"epsilon {found.variant.number:g}":  # said with its number
            assert alike(o, model, rules, found.variant, values), (name, point, layer, v.name, found)
            continue
        ways = [re.sub(p, one, n) for n in (f"{point}: {v.name}", v.name) for p, (one, _) in SAME.items()
                if re.fullmatch(p, n)]  # fmt: skip
        other = next(iter(ways), None)
        if v.last and other is None:  # many readings of few numbers: what is named in its place makes the same values
            assert alike(o, model, rules, found.variant, values), (name, point, layer, v.name, found)
            continue
        assert found.variant.name == other, (name, point, layer, v.name, found)
        assert alike(o, model, rules, every[other], values), (name, point, layer, v.name, other)


def places(name):
    config = open_checkpoint(str(FIXTURES / name)).config
    kinds = {config.window_of(i): i for i in range(config.layers)}
    return [(p, i) for p in present(config.sparse) if p in JUDGED for i in sorted(kinds.values())]


@pytest.mark.turn  # 55 s
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SMALL])
def test_every_variant_is_the_one_that_is_named(operation, name):
    for point, layer in places(name):
        if name not in QUICK or point != "attn_out" or layer:
            check(operation, name, point, layer, "fp32-highest")


# The same mistakes made in the JAX decoder, which shares no numerics with the forms.


def turned_in_pairs(x, cos, sin, a):
    """RoPE on pairs (2i, 2i + 1)."""
    n = 2 * cos.shape[-1]
    even, odd = x[..., 0:n:2].astype(a.rope), x[..., 1:n:2].astype(a.rope)
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    pairs = jnp.stack([even * c - odd * s, odd * c + even * s], axis=-1).reshape(*x.shape[:-1], n)
    return jnp.concatenate([pairs, x[..., n:].astype(a.rope)], axis=-1).astype(a.activations)


def one_ahead(s, mask, a):
    """Every row sees one key past its own, if there is one; the oldest of its window stays."""
    inside = jnp.arange(mask.shape[-1]) < len(TOKENS)
    return masked_softmax(
        s, mask | jnp.concatenate([jnp.zeros_like(mask[..., :1]), mask[..., :-1]], axis=-1) & inside, a
    )


def heads_interleaved(q, k, scale, a):
    order = jnp.arange(q.shape[2]) % k.shape[2]
    return attention_scores(q, k[:, :, order], scale, a)


def with_config(subject, **fields):
    config = msgspec.structs.replace(subject.config, **fields)
    return replace(subject, checkpoint=replace(subject.checkpoint, config=config))


def with_layers(subject, change):
    subject.__dict__["parameters"] = subject.parameters | {"layers": change(subject.parameters["layers"])}
    return subject


def swapped(layers):
    pairs = {"gate": "up", "bgate": "bup", "expert_gate": "expert_up"}
    pairs |= {b: a for a, b in pairs.items()}
    return {n: layers[pairs.get(n, n)] for n in layers}


def no_bias(layers):
    return {
        n: jnp.zeros_like(x) if n in ("bq", "bk", "bv", "bo", "bdown", "bgate", "bup") else x for n, x in layers.items()
    }


def rolled(layers):
    """Every layer holds the tensors of the layer before."""
    return {n: jnp.roll(x, 1, axis=0) for n, x in layers.items()}


def exchanged(subject):
    """Pairs, gate and up, and the mask."""
    c, parts = subject.config, replace(subject.parts, rope=turned_in_pairs, softmax=one_ahead)
    found = dict.fromkeys(("q", "k"), "pairs interleaved") | dict.fromkeys(("probs", "attn_out"), "mask one ahead")
    found["mlp_out" if c.sparse else "mlp_act"] = "gate and up exchanged"
    if c.logit_scale != 1.0:
        found["logits"] = "logit factor omitted"
    return with_layers(with_config(replace(subject, parts=parts), logit_scale=1.0), swapped), found


def left_out(subject):
    """Biases, the scale or the cap, RoPE's scaling and the window."""
    c = subject.config
    biased = (("v", c.qkv_bias), ("attn_proj", c.o_bias), ("mlp_out", c.mlp_bias))
    found = {point: "bias omitted" for point, has in biased if has}
    fields = {"rope_scaling": None, "window": None}
    if c.score_cap is not None:
        fields, found["scores"] = fields | {"score_cap": None}, "cap omitted"
    else:
        fields |= {"query_scale": 1.0 if c.query_scale is None else None}
        found["scores"] = "scale omitted" if c.query_scale is None else "scale 1/√K"
    if c.rope_scaling is not None and not c.qkv_bias:  # with a bias q lacks two things
        found["q"] = "RoPE not stretched"
    if c.window is not None and c.window < len(TOKENS):
        found["probs"] = "no window"
    return with_layers(with_config(subject, **fields), no_bias), found


def rolled_layers(subject):
    """Another layer's weights, and heads that read another key head."""
    c = subject.config
    found = {"v": "weights of layer 0", "attn_proj": "weights of layer 0"}
    if c.heads != c.kv_heads > 1:
        found["scores"] = "heads interleaved"
    if c.norms != "after":
        found |= {"attn_norm": "weights of layer 0", "mlp_norm": "weights of layer 0"}
    return with_layers(replace(subject, parts=replace(subject.parts, scores=heads_interleaved)), rolled), found


ROUNDS = {"exchanged": exchanged, "omitted": left_out, "rolled": rolled_layers}
QUICKLY = {
    ("gemma2-caps", "omitted"),
    ("phi3-partial", "rolled"),
    ("qwen3-window-yarn", "exchanged"),
}


@pytest.mark.parametrize(
    ("name", "which"),
    [pytest.param(n, w, marks=() if (n, w) in QUICKLY else pytest.mark.slow) for n in SMALL for w in ROUNDS],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp32-highest", marks=pytest.mark.slow)])
def test_a_mistake_in_jax_is_the_variant_that_is_named(tmp_path, name, which, policy):
    subject, wanted = ROUNDS[which](load(str(FIXTURES / name), policy, device="cpu"))
    options = TraceOptions(decode_steps=0, force=True)
    run = Recorded.of(trace(subject, tmp_path / "run", [Prompt(id="p0", tokens=TOKENS)], ALL, options))
    config = open_checkpoint(str(FIXTURES / name)).config
    for point, cause in wanted.items():
        layer = 1
        if cause == "RoPE not stretched" and config.local_rope_theta is not None:
            layer = config.full_layers[-1]
        if cause == "no window":
            layer = next(i for i in range(config.layers) if config.window_of(i) is not None)
        o, model, rules = operation_of(run, name, point, policy, layer)
        found = replay(o, model, rules, KnownBeside(unrounded=before_rounding(run, o, model, rules)))
        assert found.named is not None, (point, cause, found.tried[:3])
        assert found.named.variant.name == cause, (point, found.named)

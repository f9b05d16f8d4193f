"""Parameters held otherwise than a checkpoint has them: found, and given back by the map, value for value."""

import json
from math import sqrt

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from precaudit.errors import CannotJudge, UserError
from precaudit.models.checkpoints.names import Layout, MapEntry, arrange_entry, ranges_text
from precaudit.references.mapped_tensors import mapped_tensors
from precaudit.workflows.alignment import align
from tests.references.alignment.layouts import HEAD, HEADS, HIDDEN, KV, LAYERS, LAYOUTS, VOCAB, WIDTH, stacked, tensors
from tests.references.alignment.mistakes import BF16, OUT, K, Q, V, both, heads, interleaved, on_every

EXPERTS, INNER = 3, 40
EMBED, HEADED = "model.embed_tokens.weight", "lm_head.weight"


def rounded(t):
    return {name: x.astype(BF16) for name, x in t.items()}


def scaled(x, factor):
    """In FP64, rounded once to the format it has."""
    return (x.astype(np.float64) * factor).astype(x.dtype)


def gemma(t):
    """Embeddings times √D, queries by √K, norms as 1 + w, in bfloat16."""
    t = rounded(t)
    tree = stacked(t)
    tree["embed"] = scaled(tree["embed"], sqrt(WIDTH))
    tree["norm"] = (tree["norm"].astype(np.float64) + 1).astype(BF16)
    for name in ("attn_norm", "mlp_norm"):
        tree["layers"][name] = (tree["layers"][name].astype(np.float64) + 1).astype(BF16)
    tree["layers"]["query"] = scaled(tree["layers"]["query"], 1 / sqrt(HEAD))
    return tree, t


def turned_rope(t):
    held = dict(t)
    both(on_every(Q, heads(HEAD)), on_every(K, heads(HEAD)))(held)
    return stacked(held), t


def turned_apart(t):
    """Heads on an axis of their own, interleaved."""
    tree, _ = turned_rope(t)
    for name, n in (("query", HEADS), ("key", KV)):
        tree["layers"][name] = tree["layers"][name].reshape(LAYERS, WIDTH, n, HEAD)
    return tree, t


def padded(t):
    """A vocabulary padded with zeros, by so many rows as no head has."""
    tree = stacked(t)
    tree["embed"] = np.concatenate([tree["embed"], np.zeros((8, WIDTH), np.float32)])
    return tree, t


def tied(t):
    """A head of its own that is the embedding, which the checkpoint has once."""
    tree = stacked(t)
    tree["head"] = tree["embed"].T.copy()
    return tree, t


def untied(t):
    """A head of its own that equals the embedding, in both."""
    tree, _ = tied(t)
    return tree, t | {HEADED: t[EMBED]}


def in_turn(t):
    """Columns of gate and up in turn, as gpt-oss has them."""
    tree = stacked(t)
    held = tree["layers"]
    held["gate_up"] = np.stack([held.pop("gate"), held.pop("up")], axis=-1).reshape(LAYERS, WIDTH, 2 * HIDDEN)
    return tree, t


def grouped(t):
    """q, k and v of each group of query heads in one array, as Falcon has them."""
    tree = stacked(t)
    q, k, v = (tree["layers"].pop(n).reshape(LAYERS, WIDTH, KV, -1, HEAD) for n in ("query", "key", "value"))
    tree["layers"]["qkv"] = np.concatenate([q, k, v], axis=3)
    return tree, t


def in_pieces(t):
    """Shards along what a tensor reads, on an axis of their own."""
    tree = stacked(t)
    up = tree["layers"]["up"]
    tree["layers"]["up"] = np.stack(np.split(up, 2, axis=1), axis=1)
    return tree, t


def by_blocks(t):
    """Layers in two blocks of two, as a scan over pairs has them."""
    tree = stacked(t)
    tree["layers"] = {n: x.reshape(2, LAYERS // 2, *x.shape[1:]) for n, x in tree["layers"].items()}
    return tree, t


def with_experts(t):
    """A mixture of experts, stacked over layers and experts."""
    rng = np.random.default_rng(1)
    t = {n: x for n, x in t.items() if "mlp." not in n}
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    names = {n: [[f"model.layers.{i}.mlp.experts.{e}.{n}_proj.weight" for e in range(EXPERTS)] for i in range(LAYERS)]
             for n in shapes}  # fmt: skip
    for n, shape in shapes.items():
        t |= {name: rng.standard_normal(shape).astype(np.float32) for layer in names[n] for name in layer}
    held = {n: np.stack([[t[name].T for name in layer] for layer in names[n]]) for n in shapes}
    tree = {"embed": t[EMBED], "norm": t["model.norm.weight"], "experts": held, "layers": []}
    for i in range(LAYERS):
        own = {n: x for n, x in t.items() if n.startswith(f"model.layers.{i}.") and "mlp" not in n}
        tree["layers"].append({n.split(".")[-2]: x for n, x in own.items()})
    return tree, t


def with_biases(t):
    """Biases of q and k, heads apart."""
    rng = np.random.default_rng(2)
    tree = stacked(t)
    for n, own, size in (("q", "query_bias", HEADS), ("k", "key_bias", KV)):
        each = [rng.standard_normal(size * HEAD).astype(np.float32) for _ in range(LAYERS)]
        t = t | {f"model.layers.{i}.self_attn.{n}_proj.bias": x for i, x in enumerate(each)}
        tree["layers"][own] = np.stack(each).reshape(LAYERS, size, HEAD)
    return tree, t


def wider(t):
    """bfloat16 in the checkpoint, the same in float32 in the program."""
    t = rounded(t)
    return stacked({n: x.astype(np.float32) for n, x in t.items()}), t


def narrower(t):
    return stacked(rounded(t)), t


WAYS = (
    in_turn,
    grouped,
    in_pieces,
    gemma,
    turned_rope,
    turned_apart,
    padded,
    tied,
    untied,
    by_blocks,
    with_experts,
    with_biases,
    wider,
    narrower,
)


@pytest.mark.parametrize("way", [*LAYOUTS.values(), *WAYS], ids=lambda f: f.__name__)
def test_every_tensor_is_found_and_the_map_gives_it_back(way):
    made = way(tensors())
    tree, t = made if isinstance(made, tuple) else (made, tensors())
    found = align(tree, t)
    assert not found.mistakes, [m.sentence for m in found.mistakes]
    assert not found.unaligned
    assert all(p.found == 1 for p in found.parts), found.parts
    assert found.alignment.shares == dict.fromkeys(t, 1.0)
    assert found.names.unsaid == {}
    assert found.names.differences() == {}


def how(way):
    tree, t = way(tensors())
    return {p.parameter: p.how for p in align(tree, t).parts}


def test_constants_are_read_off():
    said = how(gemma)
    assert said["embed"] == "times 8"
    assert said["norm"] == "plus 1"
    assert said["layers/attn_norm"] == "4 stacked, plus 1"
    assert said["layers/query"] == "4 stacked, transposed, times 0.25"


def test_how_axes_lie_is_said():
    assert how(turned_apart)["layers/query"] == "4 stacked, transposed, rows apart as 4 x 16, heads of 16 interleaved"
    assert how(by_blocks)["layers/key"] == "2 x 2 stacked, transposed"
    assert how(narrower)["layers/up"] == "4 stacked, transposed, rounded to bfloat16"


def test_heads_repeated_for_queries_are_found():
    t = tensors()
    held = dict(t)
    on_every(K, lambda x: np.repeat(x.reshape(KV, HEAD, -1), HEADS // KV, axis=0).reshape(HEADS * HEAD, -1))(held)
    found = align(stacked(held), t)
    assert not found.mistakes
    assert {p.how for p in found.parts if p.parameter == "layers/key"} == {"4 stacked, transposed, every head 2 times"}


def in_groups(t):
    """Queries, a key and a value of each group in one axis, as Megatron has them."""
    tree, t = grouped(t)
    tree["layers"]["qkv"] = tree["layers"]["qkv"].reshape(LAYERS, WIDTH, -1)
    return tree, t


def repeated(t):
    """Keys and values once for every query head."""
    held = dict(t)
    for name in (K, V):
        on_every(name, lambda x: np.repeat(x.reshape(KV, HEAD, -1), HEADS // KV, axis=0).reshape(HEADS * HEAD, -1))(
            held
        )
    return stacked(held), t


def wider_heads(t):
    """Heads padded with zeros to twice their size, inputs of the output projection as well."""
    held = dict(t)

    def pad(x):
        heads = x.reshape(-1, HEAD, x.shape[-1])
        return np.concatenate([heads, np.zeros_like(heads)], axis=1).reshape(-1, x.shape[-1])

    for name in (Q, K, V):
        on_every(name, pad)(held)
    on_every(OUT, lambda x: pad(x.T).T)(held)
    return stacked(held), t


@pytest.mark.parametrize("make", [in_groups, repeated, wider_heads], ids=lambda f: f.__name__)
def test_rows_in_no_order_of_axes_are_in_the_map_by_their_numbers(make):
    found = align(*make(tensors()))
    assert not found.mistakes
    assert found.names.unsaid == {}
    assert any(e.rows for e in found.names.entries.values())
    assert found.names.differences() == {}


def test_numbers_of_rows_are_written_as_ranges():
    for numbers in ([0, 1, 2, 7, 8], [0, 2, 4, 6], [5, 3, 1], [9], [0, 1, 4, 6, 8, 10], [3, 3, 4]):
        entry = MapEntry("w", rows=ranges_text(np.asarray(numbers)))
        np.testing.assert_array_equal(arrange_entry(entry, [np.arange(12)], "t"), numbers)
    assert ranges_text(np.asarray([0, 1, 2, 7, 8, 16, 18, 20])) == "0:3, 7:9, 16:21:2"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (MapEntry("w", rows="0:9"), "'0:9' says 8 of 4 rows"),
        (MapEntry("w", rows="2:2"), "says nothing of 4 rows"),
        (MapEntry("w", rows="-1"), "'-1' is no number"),
        (MapEntry("w", "a b -> (a b)", columns="1"), "of an array of 1 axis"),
    ],
)
def test_rows_that_are_not_there_are_refused(entry, says):
    with pytest.raises(UserError, match=says):
        arrange_entry(entry, [np.zeros((4, 6))], "t")


def test_two_checkpoints_of_other_names_are_held_to_each_other():
    t = tensors()
    renamed = {n.replace("self_attn", "attention").replace("model.", ""): x for n, x in t.items()}
    found = align(renamed, t)
    assert not found.mistakes
    assert all(p.found == 1 for p in found.parts)


def test_what_is_nowhere_has_its_nearest():
    t = tensors()
    tree = stacked(t)
    rng = np.random.default_rng(7)
    noise = 0.1 * rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    tree["old_embed"] = t[EMBED] + noise
    [lost] = align(tree, t).unaligned
    assert (lost.parameter, lost.nearest) == ("old_embed", EMBED)
    assert 0.05 < lost.distance < 0.2  # relative L2 of noise a tenth as large, in the nearest of sampled vectors


def test_models_of_another_seed_have_nothing_in_common():
    with pytest.raises(CannotJudge, match="no vector of values in common"):
        align(stacked(tensors(1)), tensors(0))


def test_formats_do_not_matter_to_what_both_hold():
    t = tensors(dtype=np.float16)
    assert not align(stacked({n: x.astype(np.float32) for n, x in t.items()}), t).mistakes
    assert not align(stacked({n: x.astype(ml_dtypes.bfloat16) for n, x in t.items()}), t).mistakes


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("w[0:2:0]", "numbers and ranges"),
        ("w[x]", "not there"),
        ("w[9]", r"'w' is \[4, 6\]"),
        ("w[0, 0, 0]", r"'w' is \[4, 6\]"),
    ],
)
def test_a_block_that_is_not_there_is_refused(path, says):
    names = Layout(tensors={"t": MapEntry(path)})
    with pytest.raises(UserError, match=says):
        mapped_tensors({"w": np.zeros((4, 6))}, names, {"t": (6,)}, "names.toml")


def test_an_entry_of_one_layer_stands_before_that_of_all():
    every, one = MapEntry("w", "l a b -> b a"), MapEntry("own[1:, :2]", "a b -> b a", plus=1.0)
    name = "model.layers.{i}.mlp.up_proj.weight"
    names = Layout(tensors={name: every, name.replace("{i}", "1"): one})
    held = {"w": np.arange(12.0).reshape(2, 3, 2), "own": np.ones((4, 3))}
    expected = {name.replace("{i}", "0"): (2, 3), name.replace("{i}", "1"): (2, 3)}
    read = mapped_tensors(held, names, expected, "names.toml")
    assert np.array_equal(read(name.replace("{i}", "0")), held["w"][0].T)
    assert np.array_equal(read(name.replace("{i}", "1")), np.full((2, 3), 2.0))


def half_interleaved(x):
    """Heads of which the leading half of the rows is interleaved."""
    heads = x.reshape(-1, HEAD, x.shape[1]).copy()
    for head in heads:
        head[: HEAD // 2] = interleaved(head[: HEAD // 2], HEAD // 2)
    return heads.reshape(x.shape)


def test_rows_that_rope_turns_are_interleaved_alone(tmp_path):
    """Half of each head is turned, as the configuration says."""
    t = tensors()
    config = {
        "model_type": "phi3", "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": VOCAB, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    own = dict(t)
    for name in (Q, K):
        on_every(name, half_interleaved)(own)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(t, tmp_path / "model.safetensors")
    found = align(stacked(own), str(tmp_path))
    assert not found.mistakes, [m.sentence for m in found.mistakes]

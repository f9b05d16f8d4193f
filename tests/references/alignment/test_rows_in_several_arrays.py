"""A tensor whose rows, or columns, lie in several parameters: found, said by the map and given back; mistakes named."""

import msgspec
import numpy as np
import pytest

from precaudit.errors import UserError
from precaudit.models.checkpoints.names import Layout, MapEntry, parse_map
from precaudit.references.mapped_tensors import mapped_tensors
from precaudit.workflows.alignment import align
from tests.references.alignment.layouts import HEAD, HIDDEN, KV, LAYERS, VOCAB, stacked, tensors

EMBED = "model.embed_tokens.weight"
GATE, QUERY = "model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.self_attn.q_proj.weight"
DOWN = "model.layers.{i}.mlp.down_proj.weight"


def vocabulary(t):
    """In two shards of one shape."""
    tree = stacked(t)
    tree["embed"] = np.split(tree["embed"], 2)
    return tree


def shards(t):
    """A vocabulary in shards of other sizes."""
    tree = stacked(t)
    tree["shards"] = {"a": tree["embed"][:100], "b": tree.pop("embed")[100:]}
    return tree


def halves(t):
    """Half of each gate in a parameter of its own, stacked."""
    tree = stacked(t)
    gate = tree["layers"].pop("gate")
    tree["layers"] |= {"gate_a": gate[..., : HIDDEN // 2], "gate_b": gate[..., HIDDEN // 2 :]}
    return tree


def first_layer(t):
    """Only the first layer's gate is in two arrays, of other sizes."""
    tree = layer_by_layer(t)
    gate = tree["layers"][0].pop("gate")
    tree["layers"][0] |= {"gate_first": gate[:, :40], "gate_rest": gate[:, 40:]}
    return tree


def columns(t):
    """Inputs of the down projection in two arrays, the last ones first."""
    tree = stacked(t)
    down = tree["layers"].pop("down")
    tree["layers"] |= {"down_a": down[:, 40:], "down_b": down[:, :40]}
    return tree


def layer_by_layer(t):
    tree = stacked(t)
    tree["layers"] = [{n: x[i] for n, x in tree["layers"].items()} for i in range(LAYERS)]
    return tree


def groups(t):
    """A list of each layer's queries, a group of heads each."""
    tree = layer_by_layer(t)
    for layer in tree["layers"]:
        layer["query"] = np.split(layer["query"], KV, axis=-1)
    return tree


def groups_apart(t):
    """The same, heads on an axis of their own and stacked over layers."""
    tree = stacked(t)
    each = np.split(tree["layers"]["query"], KV, axis=-1)
    tree["layers"]["query"] = [x.reshape(*x.shape[:2], -1, HEAD) for x in each]
    return tree


def middle(t):
    """The middle of the vocabulary in an array of its own."""
    tree = stacked(t)
    embed = tree.pop("embed")
    tree["shards"] = {"ends": np.concatenate([embed[:30], embed[90:]]), "middle": embed[30:90]}
    return tree


WAYS = {
    vocabulary: {EMBED: MapEntry(("embed/0", "embed/1"))},
    shards: {EMBED: MapEntry(("shards/a", "shards/b"))},
    middle: {EMBED: MapEntry(("shards/ends", "shards/middle"), rows="0:30, 60:120, 30:60")},
    halves: {GATE: MapEntry(("layers/gate_a", "layers/gate_b"), "l d o -> o d")},
    first_layer: {
        GATE.replace("{i}", "0"): MapEntry(("layers/0/gate_first", "layers/0/gate_rest"), "d o -> o d"),
        GATE: MapEntry("layers/{i}/gate", "d o -> o d"),
    },
    columns: {DOWN: MapEntry(("layers/down_b", "layers/down_a"), "l d o -> o d", columns="0:96")},
    groups: {QUERY: MapEntry(("layers/{i}/query/0", "layers/{i}/query/1"), "d o -> o d")},
    groups_apart: {QUERY: MapEntry(("layers/query/0", "layers/query/1"), "l d h k -> (h k) d")},
}


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_the_map_says_the_arrays_and_makes_every_tensor_of_them(tmp_path, way):
    t = tensors()
    found = align(way(t), t)
    assert not found.mistakes
    assert found.names.unsaid == {}
    assert {name: found.names.entries[name] for name in WAYS[way]} == WAYS[way]
    layout = parse_map(tmp_path / "names.toml", found.names.text.encode(), Layout)
    assert layout.tensors == found.names.entries
    leaves = {n: x.read() for n, x in found.alignment.own.tensors.items()}
    read = mapped_tensors(leaves, layout, {n: x.shape for n, x in t.items()}, "names.toml")
    for name, x in t.items():
        np.testing.assert_array_equal(read(name), x)


def test_a_map_with_arrays_in_the_wrong_order_makes_another_tensor_of_that_name():
    t = tensors()
    names = align(groups(t), t).names
    turned = msgspec.structs.replace(names.entries[QUERY], path=names.entries[QUERY].path[::-1])
    wrong = names.entries | {QUERY: turned}
    differs = type(names)(names.alignment, wrong, names.ignored, {}).differences()
    assert set(differs) == {QUERY.replace("{i}", str(i)) for i in range(LAYERS)}
    assert min(differs.values()) > 1


def in_the_wrong_order(t):
    tree = vocabulary(t)
    tree["embed"].reverse()
    return tree


def exchanged_in_a_layer(t):
    tree = halves(t)
    a, b = (tree["layers"][n].copy() for n in ("gate_a", "gate_b"))
    a[2], b[2] = b[2].copy(), a[2].copy()
    tree["layers"] |= {"gate_a": a, "gate_b": b}
    return tree


def reversed_in_a_layer(t):
    tree = groups(t)
    tree["layers"][1]["query"].reverse()
    return tree


def repeated(t):
    tree = vocabulary(t)
    tree["embed"][1] = tree["embed"][0]
    return tree


def overlapping(t):
    tree = shards(t)
    tree["shards"] = {"a": t[EMBED][:60], "b": t[EMBED][50:100]}
    return tree


@pytest.mark.parametrize(
    ("wrong", "tensor", "says"),
    [
        (in_the_wrong_order, EMBED, "blocks of 60 rows 0, 1 are in other places: 0 holds 1, 1 holds 0"),
        (exchanged_in_a_layer, GATE.replace("{i}", "2"), "it holds rows 48:96, and should hold 0:48"),
        (reversed_in_a_layer, QUERY.replace("{i}", "1"), "heads 0, 1 are in other places: 0 holds 1, 1 holds 0"),
        (repeated, EMBED, "rows 60:120 are missing: a shard repeated"),
        (overlapping, EMBED, f"rows 100:{VOCAB} are nowhere"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_in_one_array_is_told_by_name(wrong, tensor, says):
    t = tensors()
    found = align(wrong(t), t).mistakes
    assert {m.tensor for m in found} == {tensor}
    assert says in found[0].says


def test_arrays_of_other_axes_are_told_as_what_no_map_says():
    t = tensors()
    tree = groups_apart(t)
    first, second = tree["layers"].pop("query")
    tree["layers"] |= {"query_a": first, "query_b": second.reshape(*second.shape[:2], -1)}
    said = align(tree, t).names.unsaid
    assert set(said) == {QUERY.replace("{i}", str(i)) for i in range(LAYERS)}
    assert set(said.values()) == {"its rows are in arrays of other axes, layers/query_a, layers/query_b"}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (MapEntry(("a", "c")), "should lie at 'c', which is not there"),
        (MapEntry(()), "names no array"),
        (MapEntry(("a", "n")), "rows one after another do not fit: float32 .2, 3., float64 .2, 3."),
        (MapEntry(("a", "w")), "rows one after another do not fit: float32 .2, 3., float32 .2, 4."),
        (MapEntry(("a", "w[:, 0:2]"), columns="0:5"), r"comes out as \[2, 5\], expected \[4, 3\]"),
        (MapEntry(("a", "a"), rows="0:9"), "'0:9' says 8 of 4 rows"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(entry, says):
    held = {"a": np.zeros((2, 3), np.float32), "n": np.zeros((2, 3)), "w": np.zeros((2, 4), np.float32)}
    names = Layout(tensors={"t": entry}, ignore=("a", "n", "w"))
    with pytest.raises(UserError, match=says):
        mapped_tensors(held, names, {"t": (4, 3)}, "names.toml")

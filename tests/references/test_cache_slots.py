"""Caches among a program's inputs: found in any layout, by the rows that its first call writes."""

from itertools import permutations

import ml_dtypes
import msgspec
import numpy as np
import pytest

from precaudit.errors import UserError
from precaudit.models.configs import from_config_json
from precaudit.references.mapped import starts
from precaudit.references.names_map import Input, ProgramNames
from precaudit.references.slots import NEAR, Written, caches, lengths_of_pairs
from tests.helpers.paths import CASES

CONFIG = from_config_json(msgspec.json.decode((CASES / "decoder.json").read_bytes()), "decoder.json")
LAYERS, BATCH, SLOTS = CONFIG.layers, 2, 7
SHAPE = (LAYERS, BATCH, SLOTS, CONFIG.kv_heads, CONFIG.head_dim)


def given(dtype, scale=1.0):
    """Return a cache before and after a row is written at slots 3 and 4, and the rows."""
    draw = np.random.default_rng(0)
    before = draw.standard_normal(SHAPE) * scale
    before[:, 0, 3:], before[:, 1, 4:] = 0, 0
    rows = [Written(i, b, draw.standard_normal(SHAPE[3:])) for i in range(LAYERS) for b in range(BATCH)]
    after = before.copy()
    for w in rows:
        after[w.layer, w.batch, 3 + w.batch] = w.row * scale
    return before.astype(dtype), after.astype(dtype), rows


@pytest.mark.parametrize("order", list(permutations(range(5)))[::7])
def test_a_cache_is_found_with_its_axes_in_any_order(order):
    before, after, rows = given(np.float32)
    found = caches({"3": before.transpose(order)}, {"3": after.transpose(order)}, rows, CONFIG, BATCH, turned=False)
    assert {key: x.slot for key, x in found.items()} == {(i, b): 3 + b for i in range(LAYERS) for b in range(BATCH)}
    for (layer, b), x in found.items():
        np.testing.assert_array_equal(x.held, before[layer, b])
        assert list(np.flatnonzero(x.filled)) == list(range(3 + b))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_caches_with_a_scale_and_pages_are_read_as_they_are_used(dtype):
    before, after, rows = given(dtype, 16.0)
    paged = (LAYERS, BATCH, SLOTS, 1, CONFIG.kv_heads * CONFIG.head_dim)
    found = caches({"1": before.reshape(paged)}, {"1": after.reshape(paged)}, rows, CONFIG, BATCH, turned=False)
    np.testing.assert_array_equal(found[1, 0].held, before[1, 0].astype(np.float64) / 16)


def test_arrays_of_single_layers_are_found_each_by_its_own_row():
    before, after, rows = given(np.float32)
    a, b = ({str(n): x[i] for n, i in enumerate((2, 0, 1))} for x in (before, after))
    found = caches(a, b, rows, CONFIG, BATCH, turned=False)
    np.testing.assert_array_equal(found[1, 1].held, before[1, 1])
    assert not caches(a, b, [*rows[:-1], rows[-1]._replace(row=rows[0].row)], CONFIG, BATCH, turned=False)


def test_no_other_array_is_taken_for_a_cache():
    before, after, rows = given(np.float32)
    other = np.random.default_rng(1).standard_normal(SHAPE)
    assert not caches({"0": before}, {"0": other}, rows, CONFIG, BATCH, turned=False)
    assert not caches({"0": before}, {"0": before}, rows, CONFIG, BATCH, turned=False)
    assert not caches({"0": before}, {"0": after * 1.3}, rows, CONFIG, BATCH, turned=True)


def test_lengths_of_pairs_do_not_depend_on_the_position():
    x = np.random.default_rng(2).standard_normal((CONFIG.kv_heads, CONFIG.head_dim))
    half, angle = CONFIG.rotary_size // 2, 0.7
    a, b = x[:, :half], x[:, half:]
    turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)
    np.testing.assert_allclose(lengths_of_pairs(turned, CONFIG), lengths_of_pairs(x, CONFIG))
    assert np.linalg.norm(turned - x) > NEAR * np.linalg.norm(x)


def test_a_map_says_where_sequences_start():
    first = {"1": np.asarray([4, 6], np.int32), "2": np.ones(2)}
    names = ProgramNames(tensors={})
    assert starts(first, names, 2, "names.toml") is None
    assert starts(first, msgspec.structs.replace(names, start=5), 2, "names.toml") == [5, 5]
    assert starts(first, msgspec.structs.replace(names, start=Input(1)), 2, "names.toml") == [4, 6]
    for wrong, words in (
        (Input(2), r"is float64 \[2\]; positions are integers"),
        (Input(9), "not there"),
        (-1, "is 0"),
    ):
        with pytest.raises(UserError, match=f"names.toml: start.*{words}"):
            starts(first, msgspec.structs.replace(names, start=wrong), 2, "names.toml")

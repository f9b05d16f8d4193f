"""Positions that count padding before a sequence: the same function under RoPE, found by its values."""

import numpy as np
import pytest

from precaudit.diagnosis.padding_read import READ, padding_read
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.numpy_decoder.earlier import Earlier
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.operators import rope, rope_frequencies
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.references.formula import Rests, Shown, formula_notes
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.padding import padding, possible_leads
from precaudit.references.sequences import Before, Beginning, Tokens, find_beginnings
from tests.helpers.paths import FIXTURES

SHOWN = ("attn_norm", "q", "k", "v", "attn_out", "resid_out", "logits")
PADS, ROWS = 3, 9
NEAR = 1e-6


@pytest.fixture(scope="module", params=["llama-gqa", "gemma2-gqa"])
def model(request):
    found = open_checkpoint(str(FIXTURES / request.param))
    return Model(found.config, found.tensors.read_tensor)


def values(model, ids, turned=0):
    """Return {(layer, point): [n, …]} of a sequence that RoPE turns by so much more."""
    found = {}

    def emit(_, layer, point, x):
        found[layer, point] = x

    rows = [np.arange(len(ids))]
    forward(model, Sequences([ids], earlier=[Earlier(turned=turned)]), [FP64], Wanted(set(SHOWN), None, rows), emit)
    return found


def sequence(model, n=ROWS):
    return np.random.default_rng(1).integers(1, model.config.vocab, n)


def test_all_but_queries_and_keys_is_the_same(model):
    ids = sequence(model)
    plain, turned = values(model, ids), values(model, ids, 5)
    for (layer, point), x in plain.items():
        if point in ("q", "k"):
            x = rope(x, np.full(ROWS, 5), (rope_frequencies(model.config, layer)[0], 1.0), FP64)
            assert np.linalg.norm(x - plain[layer, point]) > 0.1 * np.linalg.norm(x)
        np.testing.assert_allclose(turned[layer, point], x, rtol=0, atol=1e-9 * np.abs(x).max())


def batch(model, turned, seen=None):
    """Return ids [2, T] and what is shown of two sequences, the first after padding; ``seen``: its attention's rows."""
    ids = np.stack([np.concatenate([np.zeros(PADS, int), sequence(model, ROWS - PADS)]), sequence(model)])
    each = [values(model, ids[0, PADS:], turned), values(model, ids[1])]
    junk = values(model, ids[0, :PADS])
    shown = {
        key: np.stack([np.concatenate([junk[key], x]), each[1][key]]) for key, x in each[0].items()
    }  # fmt: skip
    if seen is not None:
        shown[0, "attn_out"] = shown[0, "attn_out"].copy()
        shown[0, "attn_out"][0, PADS:] = seen
    return ids, shown


@pytest.mark.parametrize("turned", [0, PADS])
def test_padding_is_found_whether_positions_count_it_or_not(model, turned):
    ids, shown = batch(model, turned)
    first = {"0": ids, "1": np.asarray([PADS, 0])}
    rows = slice(0, ROWS)
    found = padding(model, shown, rows, first, (0, ids), NEAR)
    assert found == ("lead", 1)
    begun = find_beginnings(Beginning(model, shown, rows, [first], np.asarray([PADS, 0])), None, NEAR)
    assert [(b.lead, b.earlier.start, b.earlier.turned) for b in begun] == [(PADS, 0, turned), (0, 0, 0)]


def test_padding_that_is_read_is_none(model):
    whole = values(model, batch(model, PADS)[0][0])
    ids, shown = batch(model, PADS, whole[0, "attn_out"][PADS:])
    first = {"0": ids, "1": np.asarray([PADS, 0])}
    assert padding(model, shown, slice(0, ROWS), first, (0, ids), NEAR) is None


@pytest.mark.parametrize("reads", [True, False], ids=["read", "passed over"])
def test_attention_over_padding_is_named(model, reads):
    ids, shown = batch(model, PADS)
    if reads:
        shown[0, "attn_out"][0, PADS:] = values(model, ids[0])[0, "attn_out"][PADS:]
    rows = np.arange(PADS, ROWS)
    sequences = (
        Tokens(ids[0, PADS:], rows, Earlier(turned=PADS), lead=PADS),
        Tokens(ids[1], np.arange(ROWS)),
    )
    pairs = {name: Pair(name, 0, None, None, "") for name in ("attn_norm", "q", "attn_out")}
    seen = {pair: shown[0, name] for name, pair in pairs.items()}
    book = MappedTextbook(model, tuple(pairs.values()), None, "")
    found = padding_read(book, Shown(seen, {}, [slice(0, ROWS)], sequences, {}, {}), pairs["attn_out"])
    assert (found is not None) == reads
    if reads:
        assert (found.cause, found.says) == (
            READ,
            f"attention reads the padding before its sequences, up to {PADS} rows",
        )


def decoded(model, reads_padding=False):
    """Return what a decode of one row after ``batch`` is given in two calls, and shows of the first."""
    ids, shown = batch(model, PADS)
    c, slots = model.config, ROWS + 2
    inputs = []
    for n in (ROWS - 1, ROWS):  # slots that are filled
        held = {}
        for number, point in enumerate(("k", "v"), 1):
            cache = np.zeros((c.layers, 2, slots, c.kv_heads, c.head_dim))
            for layer in range(c.layers):
                cache[layer, :, :n] = shown[layer, point][:, :n]
            held[str(number)] = cache
        inputs.append({"0": ids[:, n - 1], **held, "3": np.asarray([PADS, 0])})
    if reads_padding:
        whole = values(model, ids[0])
        shown = {key: np.stack([whole[key], x[1]]) for key, x in shown.items()}
        for number, point in enumerate(("k", "v"), 1):
            for n, held in zip((ROWS - 1, ROWS), inputs, strict=True):
                for layer in range(c.layers):
                    held[str(number)][layer, 0, :n] = whole[layer, point][:n]
    rows = {key: x[:, -1:] for key, x in shown.items()}
    return Beginning(model, rows, slice(0, 1), inputs, np.zeros(2, int))


@pytest.mark.parametrize("told", [None, [ROWS - 1] * 2], ids=["by values", "by an input"])
def test_a_decode_that_passes_over_padding_in_its_cache_begins_after_it(model, told):
    begun = find_beginnings(decoded(model), told, NEAR)
    n = ROWS - 1
    assert [(b.lead, b.earlier.start, b.earlier.turned) for b in begun] == [(PADS, n - PADS, PADS), (0, n, 0)]
    assert {len(x) for x in begun[0].earlier.kept[0]} == {n - PADS}


def test_a_decode_that_reads_its_padding_has_none_by_itself(model):
    begun = find_beginnings(decoded(model, reads_padding=True), None, NEAR)
    assert [(b.lead, b.earlier.start, b.earlier.turned) for b in begun] == [(0, ROWS - 1, 0)] * 2
    told = begun[0].passing_over(PADS)
    assert (told.lead, told.earlier.start, told.earlier.turned) == (PADS, ROWS - 1 - PADS, PADS)


def test_inputs_that_may_say_what_is_before_sequences_are_counts_and_masks():
    mask = np.asarray([[0, 0, 1, 1], [1, 1, 1, 0]])
    given = {
        "0": np.asarray([2, 0]),
        "1": mask,
        "2": np.asarray([0, 0]),
        "3": np.asarray([2.5, 1.0]),
        "4": np.asarray(3),
    }
    assert list(possible_leads(given, 2)) == [(2, 0), (2, 0)]
    assert list(possible_leads(given, 3)) == []


def test_what_is_told_of_counted_padding():
    (said,) = formula_notes([Rests(0, frozenset(), True, counted=frozenset({2, 5}))])
    assert said.startswith("RoPE counts the padding before sequences (2, 5 rows)")
    (said,) = formula_notes([Rests(0, frozenset(), True, passed=7)])
    assert said.startswith("7 rows before sequences are padding, which the next entry point skips")
    assert Before().passing_over(0) == Before()

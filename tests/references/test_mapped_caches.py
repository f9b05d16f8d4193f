"""Caches that a map names: the rows of every position, in every call, and what else a slot holds."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from precaudit.diagnosis.caches import name_cache
from precaudit.errors import UserError
from precaudit.models.checkpoints.opening import open_checkpoint
from precaudit.models.numpy_decoder.earlier import Earlier
from precaudit.models.numpy_decoder.model import Model
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.references.cached import read_caches
from precaudit.references.formula import Shown, formula_numbers
from precaudit.references.mapped import Pair, as_cache
from precaudit.references.sequences import Tokens

B, S, G, K = 2, 12, 2, 4
POINT = ProgramPoint("read_k", (B, S, G, K), (), "bfloat16", "mine.py:1", "", "mul")
PAIR = Pair("k_cache", 0, POINT, None, "")
ROWS = np.random.default_rng(0).standard_normal((B, 10, G, K))
CALLS = [slice(0, 6), slice(6, 10)]


def tokens(start=0):
    """Return two sequences, the second with two rows of padding in the first call."""
    rows = [np.arange(10), np.r_[0:4, 6:10]]
    past = {0: (ROWS[0, :start] + 5, ROWS[0, :start])}
    return tuple(Tokens(r, r, Earlier(start, past if start else {})) for r in rows)


def caches(sequences, change=lambda x: x):
    """Return what the program holds in both calls, as ``held`` has it beside the textbook."""
    values = []
    for call in CALLS:
        x = np.full((B, S, G, K), 7.0)  # of slots that nothing reads
        for b, s in enumerate(sequences):
            mine = ROWS[b, s.rows[s.rows < call.stop]]
            x[b, : s.earlier.start] = s.earlier.kept[0][0] if s.earlier.start else 0
            x[b, s.earlier.start : s.earlier.start + len(mine)] = mine
        values.append({"read_k": change(x)})
    book = SimpleNamespace(pairs=(PAIR,), where="names.toml")
    return read_caches(book, values, {(0, "k"): ROWS}, sequences, CALLS)


def shown(found, sequences):
    """Return caches beside what their rows are made of, which makes other rows than any of these."""
    read = np.random.default_rng(1).standard_normal((B, 10, 8))
    return Shown({}, {(0, "attn_norm"): read}, CALLS, sequences, found, {})


def book():
    """Return a textbook of G heads of K, with random weights [G K, 8] of every projection."""
    config = open_checkpoint("tiny").config
    small = msgspec.structs.replace(config, width=8, heads=2 * G, kv_heads=G, head_dim=K)
    weights = np.random.default_rng(2).standard_normal((G * K, 8))
    return SimpleNamespace(model=Model(small, lambda _: weights), config=small)


@pytest.mark.parametrize("start", [0, 2])
def test_the_rows_of_all_positions_so_far_are_held_against_the_textbook(start):
    sequences = tokens(start)
    found = caches(sequences)
    first, last = found[PAIR]
    for x, many in ((first, (6, 4)), (last, (10, 8))):
        assert (x.positions >= 0).sum(axis=1).tolist() == [n + start for n in many]
    for x in (first, last):
        assert formula_numbers(*x)["rel_l2"] == 0
    assert name_cache(book(), shown(found, sequences), PAIR) is None


def scaled(x):
    return np.concatenate([x[:, :8], 1.25 * x[:, 8:]], axis=1)


def emptied(x):
    return np.where((np.arange(S) == 3)[:, None, None], 0.0, x)


def moved(x):
    return np.where((np.arange(S) == 5)[:, None, None], np.roll(x, 1, axis=1), x)


def exchanged(x):
    return x[::-1]


def eight_bits(x):
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.round(x / scale) * scale


def noisy(x):
    return np.where((np.arange(S) == 7)[:, None, None], x + np.sin(x), x)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (scaled, "semantics", "it is times 1.25 from slot 8 on, page 2 of 4 slots each"),
        (emptied, "state", "rows 3 are zero: never written, or not read"),
        (moved, "state", "row 5 holds row 4; 1 rows differ"),
        (
            exchanged,
            "state",
            "rows 0 to 7 (8) hold the rows from 0 on of prompt a, row 1, which ran in the same batch; 10 rows differ",
        ),
        (eight_bits, "format", "the cached rows are quantised to 8 bits, one scale a head and row"),
        (noisy, "semantics", "slot 7 of the cache has other rows than were written"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_slot_holds_instead_is_named(change, kind, says):
    sequences = tokens()
    found = name_cache(book(), shown(caches(sequences, change), sequences), PAIR, case="a")
    assert (found.kind, found.says) == (kind, says)


def test_a_cache_of_fewer_slots_or_another_shape_is_refused():
    with pytest.raises(UserError, match=r"names.toml: \[points\] k_cache: 'read_k' has 12 slots for 13 positions"):
        read_caches(
            SimpleNamespace(pairs=(PAIR,), where="names.toml"), [{"read_k": np.zeros((B, S, G, K))}],
            {(0, "k"): np.zeros((B, 13, G, K))}, tuple(Tokens(r, r) for r in [np.arange(13)] * 2), [slice(0, 13)],
        )  # fmt: skip
    with pytest.raises(UserError, match=r"is not \[3, slots, 2, 4\]; give its axes"):
        as_cache(PAIR, np.zeros((B, S, G, K)), 3, (G, K), "names.toml")

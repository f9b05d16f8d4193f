"""Which rows of a batch are padding, by lengths or masks among a program's inputs."""

import ml_dtypes
import numpy as np
import pytest

from precaudit.references.formula import Rests, formula_notes, formula_numbers
from precaudit.references.padding import as_rows, possible_padding


def test_lengths_and_masks_say_which_rows_are_a_sequence_s():
    expected = [[True, True, False], [True, True, True]]
    for x in (np.asarray([2, 3]), np.asarray([[2], [5]]), np.asarray([[1, 1, 0], [1, 1, 1]]), np.asarray(expected)):
        np.testing.assert_array_equal(as_rows(x, 2, 3), expected)
    np.testing.assert_array_equal(as_rows(np.asarray([[0.0, 1.0], [1.0, 1.0]]), 2, 2), [[False, True], [True, True]])
    narrow = np.asarray([[1, 0], [1, 1]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(as_rows(narrow, 2, 2), [[True, False], [True, True]])
    for x in (np.asarray([2.0, 3.0]), np.asarray([-1, 3]), np.asarray([[7, 9, 2], [1, 1, 1]]), np.asarray([1, 2, 3])):
        assert as_rows(x, 2, 3) is None


def test_padding_is_in_no_number_and_counted():
    draw = np.random.default_rng(0)
    expected = draw.standard_normal((2, 3, 4))
    seen = expected.copy()
    seen[0, 2] = np.nan  # padding
    seen[1, 1] *= 1.01
    found = formula_numbers(seen, expected, np.asarray([[4, 5, -1], [0, 1, 2]]))
    assert (found["n"], found["excluded"], found["nonfinite"]) == (20, 4, 0)
    assert found["scopes"]["token"]["rel_l2"] == (pytest.approx(0.01), 1)
    assert found["scopes"]["row"]["rel_l2"][1] == 1
    assert formula_numbers(seen, expected, np.full((2, 3), -1)) == {"skipped": "all of its rows are padding"}
    assert formula_numbers(seen[1:], expected[1:])["scopes"].keys() == {"token"}


def test_what_formula_records_rest_on_is_said():
    assert formula_notes([Rests(0, frozenset(), True)]) == ()
    assert formula_notes([Rests(1, frozenset(), True)]) == (
        "1 padding row is read by no other row: it is not compared with the reference implementation",
    )
    some = formula_notes([Rests(2, frozenset({4}), True), Rests(3, frozenset({6}), False)])
    assert some[0].startswith("5 padding rows are read by no other row")
    assert some[1].startswith("sequences start at positions 4, 6; the keys before are not known")
    known = formula_notes([Rests(0, frozenset({4}), True)])
    assert known == ("sequences start at position 4; keys and values before are those in the first call's caches",)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([[3, 4, 0, 0], [3, 4, 5, 6]], {("id", 0): [2, 4]}),
        ([[0, 0, 3, 4], [3, 4, 5, 6]], {("id", 0): [2, 4]}),
        ([[3, 4, 0, 0], [5, 6, 0, 0]], {}),  # of one length: a token that both end with
        ([[3, 4, 5, 0], [3, 4, 5, 6]], {}),  # once: as likely a token as padding
        ([[3, 4, 0, 0]], {}),  # of one sequence nothing tells
        ([[3, 0, 4, 0, 0], [3, 4, 5, 6, 7]], {}),  # a token of the sequence, too
    ],
)
def test_a_token_is_padding_only_at_the_ends_of_sequences_of_several_lengths(ids, expected):
    found = {tuple(p): real.sum(axis=1).tolist() for p, real in possible_padding({}, 0, np.asarray(ids))}
    assert found == expected


def test_inputs_that_may_say_padding_are_lengths_counts_before_and_masks():
    ids = np.arange(1, 9).reshape(2, 4)
    given = {"1": np.asarray([2, 4]), "2": np.asarray([[0, 0, 1, 1], [1, 1, 1, 1]]), "3": np.asarray([0.5, 1.0])}
    found = [(p.kind, p.number, real.tolist()) for p, real in possible_padding(given, 0, ids)]
    right, before = [[True, True, False, False], [True] * 4], [[False, False, True, True], [True] * 4]
    assert found == [("rows", 1, right), ("rows", 2, before)]
    given = {"1": np.asarray([2, 0])}
    assert [(p.kind, real.tolist()) for p, real in possible_padding(given, 0, ids)] == [("lead", before)]

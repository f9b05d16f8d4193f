"""What a cache holds in place of its rows: other heads, dimensions, layers, slots, bits and scales."""

import numpy as np
import pytest

from precaudit.diagnosis.evidence.caches import explain
from precaudit.diagnosis.evidence.integer_rows import explain_integers
from precaudit.numbers.arrays import rounder, widen
from precaudit.numbers.integers import in_rows

DRAW = np.random.default_rng(11)
ROWS = DRAW.normal(size=(9, 2, 8)).astype(np.float32)


def told(found, **beside):
    return explain(found, ROWS, **beside).cause


def test_rows_of_a_cache_in_another_order_are_told_and_foreign_ones_are_not():
    assert told(ROWS[:, ::-1]) == "heads exchanged"
    assert told(np.repeat(ROWS[:, :1], 2, axis=1)) == "rows of other heads"
    assert told(np.roll(ROWS, 4, axis=-1)) == "dimensions in halves exchanged"
    assert told(np.roll(ROWS, 3, axis=-1)) == "dimensions shifted by 3"
    assert told(ROWS[..., ::-1]) == "dimensions reversed"
    other = DRAW.normal(size=ROWS.shape).astype(np.float32)
    assert told(other, layers={3: other}) == "rows of layer 3"
    assert told(other, layers={3: ROWS + 1}) == "foreign rows"


def test_rows_of_a_cache_in_few_bits_are_told():
    power = 2.0 ** (np.floor(np.log2(np.abs(widen(ROWS)))) - 4)
    assert told((np.rint(ROWS / power) * power).astype(np.float32)) == "cache cut to 4 bits"


@pytest.mark.parametrize("at", [0, 7])
def test_a_row_that_was_written_at_another_slot_is_told_from_a_stale_one(at):
    found = ROWS.copy()
    found[5], found[at] = 0, ROWS[5]
    assert explain(found, ROWS).says == f"what belongs into slot 5 was written at slot {at}; rows 5 are zero"
    found[5] = ROWS[5]
    assert told(found) == "stale row"


def test_scales_of_an_integer_cache_are_told():
    integers, scales = in_rows(widen(ROWS))
    wide = scales.astype(np.float64)
    expected = (integers * wide).astype(np.float32)
    ways = {
        "scales of other heads": wide[:, ::-1], "scales in bfloat16": rounder("bfloat16")(wide),
        "largest scale for all": np.full_like(wide, wide.max()), "scale of row 0": np.roll(wide, 1, axis=0),
    }  # fmt: skip
    for cause, other in ways.items():
        found = explain_integers((integers * other).astype(np.float32), ROWS, expected)
        assert found is not None
        assert (found.cause == cause) or cause == "scale of row 0"
        assert found.kind == ("state" if cause.startswith("scale") and " of " in cause else "quantisation")
    assert explain_integers(ROWS + 1, ROWS, expected) is None

"""What is said of sums in 16 bits, in the words of their own format."""

from precaudit.reports.program import _narrow_sums
from precaudit.schema.places import Place
from precaudit.schema.records.errors import LocalError


def told(*dtypes):
    each = [(f"p{i}", dtype) for i, dtype in enumerate(dtypes)]
    records = {
        name: Place("a", "call", 0, None, name).record(LocalError, "run", "fp64", rel_l2=2.0**-9, dtype=dtype)
        for name, dtype in each
    }
    return list(_narrow_sums(records))


def test_units_are_of_the_sum_s_format_and_left_out_where_it_was_converted_after():
    (narrow,) = told("bfloat16")
    assert narrow.startswith("p0 is summed term by term in bfloat16: error 2.0e-3, 0.5 u; sum in float32 (")
    (converted,) = told("float32")
    assert converted.startswith("p0 is summed term by term in 16 bits: error 2.0e-3; sum in float32 (")
    assert told(*["float16"] * 4)[-1] == "So is 1 point more."
    assert told(*["float16"] * 5)[-1] == "So are 2 points more."

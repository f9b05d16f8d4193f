"""One form of numbers on every screen: 1.2e-5, by precaudit/schema/digits.py, and not Python's 1.2e-05."""

import re

import pytest

from precaudit.schema.digits import digits, near_one, percent, rough, short, speed, tenths
from tests.helpers.paths import ROOT

PYTHON_S = re.compile(r"\{[^{}]*:[<>^+]*\d*(?:\.\d+)?[eg]\}")
# What is no text for people, or an echo of what the user said.
ALLOWED = re.compile(
    r'float\(f"'  # a number is cut to few digits
    r"|\.startswith\("
    r"|:\+\.3g\} %"  # a signed percentage
    r"|--temperature|--top-p|--wait|within \{wait:g\}|--fail-below|score_cap:g|partial_rotary_factor"
)


def test_sentences_have_one_form_of_numbers():
    found = []
    for path in sorted((ROOT / "precaudit").rglob("*.py")):
        if path.name != "digits.py":
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            found += [f"{path.relative_to(ROOT)}:{i}" for i, x in lines if PYTHON_S.search(x) and not ALLOWED.search(x)]
    assert not found, "digits(x, places) of precaudit/schema/digits.py"


def test_percentages_have_at_most_three_digits():
    found = [p.name for p in (ROOT / "precaudit").rglob("*.py") if re.search(r":\.[2-9]f\} ?%", p.read_text())]
    assert not found, "error_share of precaudit/schema/digits.py"


@pytest.mark.parametrize(
    ("x", "places", "text"),
    [
        (1.234e-5, 3, "1.23e-5"),
        (1e6, 3, "1e6"),
        (0.5, 3, "0.5"),
        (-3e-10, 2, "-3e-10"),
        (123456.0, 6, "123456"),
        ("nan", 3, "NaN"),
        (None, 3, ""),
        ("-inf", 3, "-inf"),
        (1e100, 2, "1e100"),
    ],
)
def test_digits(x, places, text):
    assert digits(x, places) == text


def test_what_is_near_one_says_how_far_and_speeds_are_whole():
    assert [near_one(x) for x in (1.00238, 0.999528, 1.0, 1.05, 0.9, "nan")] == [
        "1 (+0.00238)", "1 (-0.000472)", "1", "1.05", "0.9", "NaN"
    ]  # fmt: skip
    assert [speed(x) for x in (1204.0, 352.4, 12.34)] == ["1,200", "352", "12.3"]
    assert [tenths(x) for x in (0.04, 12.34, 99.96, -100.0)] == ["0.0", "12.3", "100", "-100"]


def test_other_forms():
    assert (short(2.0), short(1.23e-5), short(0.0), short("nan")) == ("2.0e0", "1.2e-5", "0", "NaN")
    assert (rough(1234.0), rough(321.0), rough(1.5e-7), percent(1.5e-7)) == ("1.2e3", "321", "1.5e-7", "1.5e-5 %")

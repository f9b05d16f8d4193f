"""Bytes read from text and written as text."""

import pytest

from precaudit.errors import UserError
from precaudit.numbers.bytes_text import bytes_text, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4_000_000_000), ("500 MB", 500_000_000), ("1.5G", 1_500_000_000), ("64kB", 64_000), ("4B", 4)],
)
def test_bytes_are_read_with_their_unit(text, size):
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4", "--memory 4: the unit is missing; write 4GB, 4MB or 4B"),
        ("0.5", "--memory 0.5: the unit is missing; write 0.5GB, 0.5MB or 0.5B"),
        ("much", "--memory much: a number of bytes is wanted, such as 8GB or 500MB"),
    ],
)
def test_bytes_without_a_unit_are_refused_with_what_to_write(text, why):
    with pytest.raises(UserError) as refused:
        parse_bytes(text, "--memory")
    assert str(refused.value) == why


def test_small_numbers_of_bytes_are_not_written_as_zero():
    assert [bytes_text(n) for n in (4, 64_000, 160_000_000, 1_000_000_000)] == ["4 B", "64.0 kB", "160 MB", "1.0 GB"]

"""Cuts of an exam: one of N parts of its cells, or today's; N days in a row make every cell (``make cuts``)."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Cut:
    """The ``number``-th of ``parts``, counted from 1."""

    number: int = 1
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def of(self, cells: Sequence[T]) -> list[T]:
        """Return this part of the cells of one kind, drawn by a fixed seed, in their order.

        Of fewer cells than parts one, in turn: no kind is left out, and the cuts 1 to ``parts`` make every cell.
        """
        n, parts = len(cells), max(1, min(self.parts, len(cells)))
        k = (self.number - 1) % parts
        order = np.random.default_rng(1).permutation(n)
        return [cells[i] for i in sorted(order[n * k // parts : n * (k + 1) // parts].tolist())]


def cut(text: str, day: int | None = None) -> Cut:
    """Read ``K/N``, or ``today/N``: tomorrow's is the next. ``day``: days since the year 1, by default today's (UTC).

    Raises ArgumentTypeError.
    """
    number, _, parts = text.partition("/")
    if not parts.isdecimal() or int(parts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, as 1/28 or today/28 are")
    if number == "today":
        day = datetime.now(UTC).toordinal() if day is None else day
        return Cut(day % int(parts) + 1, int(parts))
    if not number.isdecimal() or not 1 <= int(number) <= int(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: parts are numbered from 1 to {parts}")
    return Cut(int(number), int(parts))


def add_part(parser: argparse.ArgumentParser) -> None:
    """Give an exam the option ``--part``."""
    parser.add_argument(
        "--part", type=cut, default=Cut(), metavar="K/N",
        help="the K-th of N parts of every kind of cell; today/N: other cells every day, all of them in N days",
    )  # fmt: skip

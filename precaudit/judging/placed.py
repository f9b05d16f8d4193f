"""Records that stay in their file and are found by their places: of each two numbers are in memory."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

R = TypeVar("R")
HASH = (1 << 64) - 1
BITS = 32  # of a record's number, below its place's hash


class Placed(Mapping[Any, R], Generic[R]):
    """The records of ``path`` by their places; of several at one place the last.

    ``decode``: makes a record, which has a ``place``, of its bytes; ``starts``: the byte at which each begins, and
    where the last ends; ``hashes``: those of their places.
    """

    def __init__(self, path: Path, decode: Callable[[bytes], R], starts: "array[int]", hashes: "array[int]") -> None:
        self._file, self._decode, self._starts = path.open("rb", buffering=0), decode, starts
        order = sorted((h & HASH) << BITS | i for i, h in enumerate(hashes))  # whole numbers: pairs take 150 MB
        self._hashes = array("Q", (x >> BITS for x in order))
        self._numbers = array("L", (x & (1 << BITS) - 1 for x in order))
        alike = (i for (i, a), (_, b) in pairwise(zip(self._numbers, self._hashes, strict=True)) if a == b)
        self._replaced = {i for i in alike if self._number(self._place(i)) != i}

    def __getitem__(self, place: Any) -> R:
        return self._at(self._number(place))

    def __iter__(self) -> Iterator[Any]:
        return (self._place(i) for i in range(len(self._starts) - 1) if i not in self._replaced)

    def __len__(self) -> int:
        return len(self._numbers) - len(self._replaced)

    def __del__(self) -> None:
        self._file.close()

    def _number(self, place: Any) -> int:
        """Return the number of the last record at a place; raises KeyError where there is none."""
        h = hash(place) & HASH
        at = bisect_right(self._hashes, h)
        while at and self._hashes[at - 1] == h:
            at -= 1
            if self._place(self._numbers[at]) == place:
                return self._numbers[at]
        raise KeyError(place)

    def _at(self, i: int) -> R:
        start, end = self._starts[i : i + 2]
        return self._decode(os.pread(self._file.fileno(), end - start, start))

    def _place(self, i: int) -> Any:
        found: Any = self._at(i)
        return found.place

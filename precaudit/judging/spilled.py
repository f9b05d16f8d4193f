"""Verdicts of which a million are no gigabyte: the first are in memory, the others in a file without a name."""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, Any, overload

import msgspec

from precaudit.judging.verdicts import STATUSES, Verdict

MANY = 1 << 13  # verdicts in memory, some 1 KB each
CHUNK = 1 << 20  # bytes that are written at a time
BLOCK = 1 << 12  # verdicts that are read at a time


class _Unnamed:
    """A file without a name, which goes with the last that reads it."""

    def __init__(self) -> None:
        self.bytes: IO[bytes] = TemporaryFile(buffering=CHUNK)  # noqa: SIM115 - closed below

    def __del__(self) -> None:
        self.bytes.close()


class Spilled(Sequence[Verdict]):
    """Verdicts in the order in which they were added, or in that of ``ordered``."""

    def __init__(self, verdicts: Iterable[Verdict] = ()) -> None:
        self._held: list[Verdict] = []
        self._file: _Unnamed | None = None
        self._ends = array("Q", [0])
        self._order: Any = None
        self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Verdict).decode
        self.extend(verdicts)

    def extend(self, verdicts: Iterable[Verdict]) -> None:
        """Add verdicts after all others."""
        if self._file is not None:
            self._file.bytes.seek(self._ends[-1])
        for v in verdicts:
            if len(self._held) < MANY:
                self._held.append(v)
                continue
            if self._file is None:
                self._file = _Unnamed()
            self._ends.append(self._ends[-1] + self._file.bytes.write(self._encode(v)))
        if self._file is not None:
            self._file.bytes.flush()

    def in_order(self) -> Sequence[Verdict]:
        """Return them by status, depth in the program, prompt, phase and step; those that are few as a tuple."""
        if self._file is None:
            return tuple(sorted(self._held, key=_key))
        numbered: tuple[dict[Any, int], ...] = ({}, {})
        columns = [array("Q") for _ in numbered]
        for v in self:
            for known, column, x in zip(numbered, columns, _key(v), strict=True):
                column.append(known.setdefault(x, len(known)))
        weights, times = [[0] * len(known) for known in numbered], len(self)
        for weight, known in zip(reversed(weights), reversed(numbered), strict=True):
            for i, x in enumerate(sorted(known)):
                weight[known[x]] = i * times
            times *= len(known)
        # one list of whole numbers: a list of keys would take 200 MB
        first, then = weights
        numbers = [first[a] + then[b] + i for i, (a, b) in enumerate(zip(*columns, strict=True))]
        numbers.sort()
        found = Spilled()
        found._held, found._file, found._ends = self._held, self._file, self._ends
        found._order = array("Q", (n % len(numbers) for n in numbers))
        return found

    def __len__(self) -> int:
        return len(self._held) + len(self._ends) - 1

    def __iter__(self) -> Iterator[Verdict]:
        if self._order is not None:
            yield from map(self._at, self._order)
            return
        yield from self._held
        for start in range(0, len(self._ends) - 1, BLOCK):
            ends = self._ends[start : start + BLOCK + 1]
            held = self._read_bytes(ends[0], ends[-1])
            yield from (self._verdict(held[a - ends[0] : b - ends[0]]) for a, b in pairwise(ends))

    @overload
    def __getitem__(self, at: int) -> Verdict: ...
    @overload
    def __getitem__(self, at: slice) -> list[Verdict]: ...
    def __getitem__(self, at: Any) -> Any:
        places = range(len(self))[at]
        if isinstance(places, range):
            return [self[i] for i in places]
        return self._at(places if self._order is None else self._order[places])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _at(self, i: int) -> Verdict:
        if i < len(self._held):
            return self._held[i]
        return self._verdict(self._read_bytes(*self._ends[i - len(self._held) : i - len(self._held) + 2]))

    def _read_bytes(self, start: int, end: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.bytes.fileno(), end - start, start)  # a buffered read takes CHUNK at each place

    def _verdict(self, encoded: bytes) -> Verdict:
        v = self._decode(encoded)
        return msgspec.structs.replace(v, index=tuple(v.index)) if isinstance(v.index, list) else v


def _key(v: Verdict) -> tuple[tuple[int, tuple[int, int]], tuple[str, str, int]]:
    return (STATUSES.index(v.status), v.depth), (v.prompt, v.phase, v.step)

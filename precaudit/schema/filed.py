"""Records that stay in their file: a sequence of which one is in memory at a time, however many there are."""

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import msgspec

from precaudit.errors import UserError
from precaudit.schema.records.base import Record
from precaudit.schema.records.errors import E, ErrorRecord
from precaudit.schema.records.lines import decode_line

R = TypeVar("R", bound=Record)
CHUNK = 1 << 20  # bytes that are read at a time


class Filed(Sequence[R], Generic[R]):
    """The records of a JSONL file, read anew by every pass; ``len`` counts its lines once.

    ``check`` is called with every record and its ``FILE:LINE``. ``tail``: whether a last line without its newline
    counts (of a run that was cut off it does not). A pass raises UserError, with file and line, for what is no record,
    and where the file is no longer what it was when this was made.
    """

    def __init__(
        self, path: Path, kind: type[R], check: Callable[[R, str], object] | None = None, tail: bool = True
    ) -> None:
        self.path, self._check, self._tail = path, check, tail
        self._decode = msgspec.json.Decoder(kind).decode
        self._state, self._count = _state(path), -1

    def __iter__(self) -> Iterator[R]:
        return (e for _, e in self.with_lines())

    def with_lines(self, *having: bytes) -> Iterator[tuple[int, R]]:
        """Yield every record with its line; ``having``: of lines that hold one of these alone, others are not parsed.

        Raises UserError as the class says.
        """
        for i, _, line in self._lines():
            if having and not any(text in line for text in having):
                continue
            e = decode_line(self._decode, line, self.path, i)
            if self._check is not None:
                self._check(e, f"{self.path}:{i}")
            yield i, e

    def spans(self, key: Callable[[R], str]) -> dict[str, "array[int]"]:
        """Return where the lines of every key lie, each beginning and end of lines that follow one another."""
        found: dict[str, array[int]] = {}
        for i, at, line in self._lines():
            spans = found.setdefault(key(decode_line(self._decode, line, self.path, i)), array("q"))
            if spans and spans[-1] == at:
                spans.pop()
            else:
                spans.append(at)
            spans.append(at + len(line))
        return found

    def within(self, spans: "array[int]") -> Iterator[R]:
        """Yield the records of some lines, as ``spans`` found them; raises UserError as a pass does."""
        self._check_state()
        with self.path.open("rb") as f:
            for start, end in zip(spans[::2], spans[1::2], strict=True):
                f.seek(start)
                yield from (self._decode(line) for line in f.read(end - start).splitlines() if not line.isspace())

    def _check_state(self) -> None:
        if _state(self.path) != self._state:
            raise UserError(f"{self.path} changed while it was read: run this again")

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, first byte and text of every line."""
        self._check_state()
        at = 0
        with self.path.open("rb", buffering=CHUNK) as f:
            for i, line in enumerate(f, 1):
                if not line.isspace() and (self._tail or line.endswith(b"\n")):
                    yield i, at, line
                at += len(line)

    def __len__(self) -> int:
        if self._count < 0:
            self._count = sum(1 for _ in self._lines())
        return self._count

    @overload
    def __getitem__(self, at: int) -> R: ...
    @overload
    def __getitem__(self, at: slice) -> list[R]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self)[at]
        n = at if at >= 0 else at + len(self)
        found = list(islice(self, n, n + 1)) if n >= 0 else []
        if not found:
            raise IndexError(at)
        return found[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _state(path: Path) -> tuple[int, int]:
    """Return size and time of a file, by which one that changed is told."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def of_kinds(errors: Iterable[ErrorRecord], *kinds: type[E]) -> Iterator[E]:
    """Yield the error records of some kinds; of a file, lines of others are not parsed.

    The kind is looked for in a line's bytes as ``encode`` writes it, which cannot miss one.
    """
    if isinstance(errors, Filed):
        errors = (e for _, e in errors.with_lines(*(b'"kind":"%s"' % k.kind.encode() for k in kinds)))
    return (e for e in errors if isinstance(e, kinds))


def of_place(errors: Sequence[ErrorRecord], layer: int | None, point: str) -> Iterator[ErrorRecord]:
    """Yield the error records of a layer and point; of a file, other lines are not parsed, as ``of_kinds`` has it."""
    if isinstance(errors, Filed):
        number = b"null" if layer is None else b"%d" % layer
        found: Iterator[ErrorRecord] = (
            e for _, e in errors.with_lines(b'"layer":%s,"point":%s' % (number, msgspec.json.encode(point)))
        )
    else:
        found = iter(errors)
    return (e for e in found if (e.layer, e.point) == (layer, point))


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch cyclic garbage collection off: records hold no cycles, and scanning them takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

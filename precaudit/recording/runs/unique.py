"""Files of which no two lines are of one thing."""

from collections.abc import Hashable, Iterable
from pathlib import Path

from precaudit.errors import UserError


def require_unique(path: Path, keys: Iterable[Hashable]) -> None:
    """Raise UserError where a file has two lines for one thing."""
    seen = UniqueHashes()
    for line, key in enumerate(keys, 1):
        if not seen.add(key):
            raise UserError(f"{path}:{line}: a second line for {key}; the file was put together wrongly")


class UniqueHashes:
    """Things that were seen, by their 64-bit hashes: a million tuples would take 300 MB.

    Two of a million share one with a probability of 3e-8; str hashes are keyed anew in every process.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, key: Hashable) -> bool:
        """Add a thing; return whether it is new."""
        before = len(self._hashes)
        self._hashes.add(hash(key))
        return len(self._hashes) > before

    def __contains__(self, key: object) -> bool:
        return hash(key) in self._hashes

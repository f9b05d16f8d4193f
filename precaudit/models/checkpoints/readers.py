"""A model's tensors by name for whatever process asks: where they lie, and whether it is the same model there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from precaudit.errors import UserError
from precaudit.models.checkpoints.opening import NAMES, Checkpoint, open_checkpoint
from precaudit.numbers.arrays import Array
from precaudit.schema.policies import Policy

Stamp = tuple[str, int, int]  # a file's name, bytes and time


@dataclass(frozen=True)
class WeightReader:
    """Reads tensors of a checkpoint as a policy holds them, by maps of its files: a process reads what it uses.

    It can be pickled: another process opens ``source`` itself, once, and reads no weights that are not those of
    ``sha256``. ``stamps``: of the files whose hash that is, so that the very same are not hashed again.
    """

    source: str
    allowed: tuple[str, ...]
    policy: Policy
    sha256: str
    stamps: tuple[Stamp, ...]
    opened: Checkpoint | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint, policy: Policy, sha256: str) -> "WeightReader":
        """Return the reader of an open checkpoint, whose tensors are as ``policy`` holds them."""
        source = checkpoint.name if checkpoint.name in NAMES else str(checkpoint.path.absolute())
        return cls(source, checkpoint.allowed, policy, sha256, file_stamps(checkpoint), checkpoint)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Another process has nothing open."""
        return type(self), (self.source, self.allowed, self.policy, self.sha256, self.stamps)

    def __call__(self, name: str) -> Array:
        """Return a tensor."""
        checkpoint = self.opened if self.opened is not None else _open_again(self)
        return checkpoint.tensors.read_tensor(name)


@lru_cache(maxsize=2)
def _open_again(reader: WeightReader) -> Checkpoint:
    """Open a reader's checkpoint in this process; raises UserError where it is not there, or of another model."""
    found = open_checkpoint(reader.source, reader.allowed)
    if file_stamps(found) != reader.stamps and found.hashes.sha256() != reader.sha256:
        raise UserError(f"{reader.source}: a worker reads other weights there than this run's")
    return found.under(reader.policy)


def file_stamps(checkpoint: Checkpoint) -> tuple[Stamp, ...]:
    """Return which files a checkpoint is read from, and when they were written."""
    found = [(path, path.stat()) for path in map(Path, checkpoint.hashes.paths)]
    return tuple((path.name, s.st_size, s.st_mtime_ns) for path, s in found)

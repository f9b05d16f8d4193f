"""XXH3-128 hashes of tensors and of files."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from precaudit.mirrors import bring
from precaudit.schema.filed import CHUNK

if TYPE_CHECKING:  # the gate reads runs, and no tensor of them
    from precaudit.numbers.arrays import Array


def tensor_hash(x: "Array") -> str:
    """Return the XXH3-128 of a tensor's bytes."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(_bytes(x))}"


def _bytes(x: "Array") -> memoryview:
    import numpy as np

    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def known_hash(path: Path) -> str:
    """Return ``file_hash`` of a file that is read many times: again where its time or size changed."""
    stat = path.stat()
    return _hash_once(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _hash_once(path: str, _changed: int, _size: int) -> str:
    return file_hash(Path(path))


def file_hash(path: Path) -> str:
    """Return the XXH3-128 of a file, which is read a part at a time."""
    bring(path)
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as f:
        while part := f.read(CHUNK):
            digest.update(part)
    return f"xxh3:{digest.hexdigest()}"

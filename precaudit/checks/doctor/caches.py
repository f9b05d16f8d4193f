"""The folders precaudit keeps things in: how large they are, and clearing them.

Only files that bear our own names, in our own folders, are counted and deleted; no link is followed.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from precaudit.caching import cache_folder
from precaudit.mirrors import unwritten

FOLDERS = {"references": "references", "programs": "xla", "trusted": "programs", "buckets": "buckets"}
SAYS = {
    "references": "FP64 values",
    "programs": "compiled programs",
    "trusted": "programs that were named here",
    "buckets": "what was read of buckets",
}
_HASHED = re.compile(r"[0-9a-f]{32}")
_REFERENCE = re.compile(r".+\.(fp64|npy)|\..+\.(fp64|npy)\.[0-9a-f]{8}\.part")  # .npy: of earlier versions
_COMPILED = re.compile(r".+-(cache|atime)")  # JAX's names (jax/_src/lru_cache.py)


@dataclass(frozen=True)
class CacheFolder:
    """A folder of one kind of thing: its size, and how many files of ours it holds. ``ours``: whether we clear it."""

    kind: str
    folder: str
    bytes: int
    files: int
    ours: bool = True


@dataclass(frozen=True)
class Cleared:
    """What clearing a cache freed; ``kept``: names that could not be deleted."""

    kind: str
    folder: str
    bytes: int
    files: int
    kept: tuple[str, ...] = ()


def find_caches() -> tuple[CacheFolder, ...]:
    """Return every cache, and where the user has told JAX to keep compiled programs."""
    caches = []
    for kind in FOLDERS:
        elsewhere = os.environ.get("JAX_COMPILATION_CACHE_DIR") if kind == "programs" else None
        root = Path(elsewhere) if elsewhere else folder(kind)
        files = list(_files(kind, root))
        caches.append(CacheFolder(kind, str(root), sum(map(_bytes, files)), len(files), not elsewhere))
    return tuple(caches)


def folder(kind: str) -> Path:
    """Return where a kind of thing is kept."""
    return cache_folder(FOLDERS[kind])


def clear(kind: str) -> Cleared:
    """Delete a cache's files, and the folders that are empty then; what a bucket does not have yet stays."""
    root, freed, count = folder(kind), 0, 0
    kept = [f"{url} lacks it" for url in _unwritten(root)] if kind == "buckets" else []
    for entry in list(_files(kind, root)):
        try:
            size = _bytes(entry)
            os.unlink(entry.path)
        except OSError as error:
            kept.append(f"{entry.path}: {error.strerror}")
            continue
        freed, count = freed + size, count + 1
    for held in _folders(root) if kind in ("references", "buckets") else ():
        for path, _, _ in os.walk(held.path, topdown=False):
            with suppress(OSError):  # it holds something that is not ours
                os.rmdir(path)
    return Cleared(kind, str(root), freed, count, tuple(kept))


def unwritable(kind: str) -> str | None:
    """Return why nothing can be kept in a cache; None where it can. Nothing is left behind."""
    root = folder(kind)
    there = next(p for p in (root, *root.parents) if os.path.lexists(p))
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{root}: {error.strerror}"


def _files(kind: str, root: Path) -> "Iterator[os.DirEntry[str]]":
    """Yield the files of ours: in references and buckets those of its folders, else those of the folder itself."""
    if kind == "buckets":
        for held in _folders(root):
            if not unwritten(Path(held.path)):
                yield from sorted(_below(held.path), key=lambda f: f.name != "state.json")  # without it, none follows
        return
    if kind != "references":
        pattern = _COMPILED if kind == "programs" else _HASHED
        yield from (f for f in _entries(root) if f.is_file(follow_symlinks=False) and pattern.fullmatch(f.name))
        return
    for held in _folders(root):
        for f in _entries(Path(held.path)):
            if f.is_file(follow_symlinks=False) and _REFERENCE.fullmatch(f.name):
                yield f


def _folders(root: Path) -> "Iterator[os.DirEntry[str]]":
    yield from (d for d in _entries(root) if d.is_dir(follow_symlinks=False) and _HASHED.fullmatch(d.name))


def _below(folder: str) -> "Iterator[os.DirEntry[str]]":
    for entry in _entries(Path(folder)):
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path)
        elif entry.is_file(follow_symlinks=False):
            yield entry


def _unwritten(root: Path) -> Iterator[str]:
    for held in _folders(root):
        yield from unwritten(Path(held.path))


def _bytes(entry: "os.DirEntry[str]") -> int:
    """Return the bytes that a file takes; of one that is read in ranges, those that are here."""
    stat = entry.stat(follow_symlinks=False)
    return min(stat.st_size, stat.st_blocks * 512)


def _entries(root: Path) -> "list[os.DirEntry[str]]":
    """Return what a folder holds; nothing of one that is a link, not there, or not to be read."""
    if root.is_symlink():
        return []
    with suppress(OSError), os.scandir(root) as entries:
        return sorted(entries, key=lambda e: e.name)
    return []

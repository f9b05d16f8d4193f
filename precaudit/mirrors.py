"""Folders here that follow buckets: a URL becomes a path below the cache folder, and all code works on that.

Small files are brought as they are. Of a safetensors file, which may be large, an empty (sparse) file of its size is
made, and ``bring`` fills the bytes that are read. ``commit`` writes what changed here into the bucket: what makes the
rest valid goes last, so that a bucket that fails half-way shows no run as whole. What did not get there is written when
the URL is next used, unless the bucket changed since. ``state.json`` says what of the bucket is here.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from precaudit.buckets import Bucket, RemoteFile
from precaudit.caching import cache_folder
from precaudit.errors import UserError
from precaudit.writing import PART, temporary, write_whole

UNREAD = (
    ".bin",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".pt",
    ".pth",
    ".tflite",
)  # large, and read by nobody here
LAZY = ".safetensors"  # what is read in ranges
BLOCK = 4 << 20  # bytes of a file that are asked for at once: a request takes as long as so many bytes
# What is written after all else: what resuming goes by, then what makes the rest valid.
LAST = ("batches.jsonl", "compared.json", "compare.json", "dump.json", "program.json", "run.json")


class HeldFile(msgspec.Struct, frozen=True):
    """A file that is here as the bucket has it. ``local``: what tells whether it was changed here since.

    ``whole``: all its bytes are here; else those that were read.
    """

    remote: RemoteFile
    local: tuple[int, ...]
    whole: bool


class State(msgspec.Struct, frozen=True):
    """state.json: the URL, and the files that are here as the bucket has them, by their names below it."""

    url: str
    files: dict[str, HeldFile] = msgspec.field(default_factory=dict)


@dataclass
class Mirror:
    """A URL's folder or file here: ``root``, which may hold nothing as yet.

    ``refreshed``: this process made it what the bucket has, so that what is gone since was deleted on purpose.
    """

    root: Path
    state: State
    lock: Any = field(default_factory=threading.RLock)
    refreshed: bool = False
    blocks: dict[Path, set[int]] = field(default_factory=dict)

    @property
    def bucket(self) -> Bucket:
        """What it follows."""
        return Bucket(self.state.url)

    def refresh(self) -> None:
        """Make what is here what the bucket has; what changed here and is not there is written there first."""
        with self._alone():
            listed = self._list()
            known = {name: held.remote for name, held in self.state.files.items()}
            if listed == known and (changed := self.list_changes()[0]):  # never deletes there: a cache may be cleared
                self._push(changed)
                listed = self._list()
            files = {name: x for name, x in self.state.files.items() if x.remote == listed.get(name)}
            files = {name: x for name, x in files.items() if _local(self._path(name), x.whole) == x.local}
            self._delete_others(listed)
            self._bring_files({name: remote for name, remote in listed.items() if name not in files}, files)
            self._save(files)
            self.refreshed = True

    def commit(self) -> None:
        """Write what changed here into the bucket; raises UserError, after which the next use tries again."""
        with self._alone():
            changed, gone = self.list_changes()
            self._push(changed)
            if self.refreshed:  # else it is not known why they are gone
                self._remove(sorted(gone, key=_order, reverse=True))  # what makes the rest valid goes before it

    def bring(self, name: str, begin: int, end: int | None) -> None:
        """Have bytes of a file here; raises UserError where the bucket does not give them."""
        held = self.state.files.get(name)
        if held is None or held.whole:
            return
        size, note = held.remote.size, self._note(name, held.remote)
        end = size if end is None else min(end, size)
        lacking = [i for i in range(begin // BLOCK, -(-end // BLOCK)) if i not in self._blocks(note)]
        if not lacking:
            return
        try:
            with self._path(name).open("r+b") as file:

                def fill(i: int) -> None:
                    data = self.bucket.read_range(name, i * BLOCK, min((i + 1) * BLOCK, size))
                    os.pwrite(file.fileno(), data, i * BLOCK)

                with ThreadPoolExecutor(min(8, len(lacking))) as pool:
                    list(pool.map(fill, lacking))
                os.fsync(file.fileno())
            with self.lock, note.open("a") as lines:
                lines.writelines(f"{i}\n" for i in lacking)
                self._blocks(note).update(lacking)
        except OSError as error:
            raise UserError(f"{self.bucket.named(name)}: cannot be kept here: {error.strerror or error}") from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one, of threads and processes here, that changes what the state says."""
        import fcntl

        self.root.parent.mkdir(parents=True, exist_ok=True)
        with self.lock, (self.root.parent / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.state = read_state(self.root) or State(self.state.url)  # none: the cache was cleared
            yield

    def _list(self) -> dict[str, RemoteFile]:
        return {name: x for name, x in self.bucket.list_files().items() if not name.endswith(UNREAD)}

    def _blocks(self, note: Path) -> set[int]:
        """Return which blocks of a file are here."""
        with self.lock:
            if note not in self.blocks:
                text = note.read_text() if note.is_file() else ""
                self.blocks[note] = {int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")}
            return self.blocks[note]

    def _bring_files(self, wanted: Mapping[str, RemoteFile], files: dict[str, HeldFile]) -> None:
        """Bring files, and make those that are read in ranges; add them to ``files``."""
        whole = [name for name in wanted if not (name or self.state.url).endswith(LAZY)]
        parts = {name: temporary(self._path(name)) for name in wanted}
        try:
            for part in {part.parent for part in parts.values()}:
                part.mkdir(parents=True, exist_ok=True)
            self._check_space(sum(wanted[name].size for name in whole))
            if whole:
                self.bucket.read_files(whole, [parts[name] for name in whole])
            for name, remote in wanted.items():
                if name not in whole:
                    with parts[name].open("xb") as f:
                        f.truncate(remote.size)
                elif parts[name].stat().st_size != remote.size:
                    raise UserError(f"{self.bucket.named(name)}: it was cut off, or changed, while it was read")
                parts[name].replace(self._path(name))
                files[name] = HeldFile(remote, _local(self._path(name), name in whole), name in whole)
        except OSError as error:
            raise UserError(f"{self.state.url}: cannot be kept here: {error.strerror or error}") from None
        finally:
            for part in parts.values():
                with suppress(OSError):
                    part.unlink(missing_ok=True)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(mirrors().parent if mirrors().parent.exists() else Path("/")).free if needed else 0
        if needed > free:
            raise UserError(
                f"{self.state.url}: {needed / 1e6:,.0f} MB are to be brought here, and the cache's disk has "
                f"{free / 1e6:,.0f} MB left (PRECAUDIT_CACHE=FOLDER: another one)"
            )

    def _delete_others(self, listed: Mapping[str, RemoteFile]) -> None:
        """Delete what the bucket does not have, and folders that are empty then."""
        for name in self._here():
            if name not in listed:
                self._path(name).unlink()
        folders = [p for p in sorted(self.root.rglob("*"), reverse=True) if p.is_dir()]
        for folder in (*folders, self.root) if self.root.is_dir() else ():
            with suppress(OSError):
                folder.rmdir()

    def list_changes(self) -> tuple[list[str], list[str]]:
        """Return the names of files that the bucket does not have as they are here, and of those that are gone here."""
        here, held = self._here(), self.state.files
        changed = [n for n in here if n not in held or _local(self._path(n), held[n].whole) != held[n].local]
        return changed, [n for n in held if n not in here]

    def _here(self) -> list[str]:
        if self.root.is_file():
            return [""]
        files = (p for p in sorted(self.root.rglob("*")) if p.is_file() and not p.is_symlink())
        names = [p.relative_to(self.root).as_posix() for p in files]
        return [name for name in names if not any(part.endswith(PART) for part in name.split("/"))]

    def _push(self, changed: list[str]) -> None:
        last = sorted((name for name in changed if _order(name) >= 0), key=_order)
        for names in ([name for name in changed if _order(name) < 0], *([name] for name in last)):
            if names:
                self._write(names)

    def _write(self, names: list[str]) -> None:
        before = [_local(self._path(name), True) for name in names]
        found = self.bucket.write_files(names, [self._path(name) for name in names])
        for name, remote, local in zip(names, found, before, strict=True):
            if remote.size != local[1]:
                raise UserError(f"{self.bucket.named(name)}: {remote.size} of {local[1]} bytes were written")
        held = zip(names, (HeldFile(r, local, True) for r, local in zip(found, before, strict=True)), strict=True)
        self._save(self.state.files | dict(held))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.bucket.remove(name)
            self._save({n: held for n, held in self.state.files.items() if n != name})

    def _save(self, files: dict[str, HeldFile]) -> None:
        self.state = State(self.state.url, files)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.root.parent / "state.json", msgspec.json.encode(self.state))

    def _path(self, name: str) -> Path:
        return self.root / name if name else self.root

    def _note(self, name: str, remote: RemoteFile) -> Path:
        """Return the file that says which bytes of another are here."""
        inode = self._path(name).stat().st_ino
        return self.root.parent / f"{_digest(f'{name} {remote.mark} {remote.size} {inode} {BLOCK}')}.blocks"


def mirrors() -> Path:
    """Return the folder of all that follows buckets."""
    return _resolved(str(cache_folder("buckets")))


def mirror_root(url: str) -> Path:
    """Return where the folder or file of a URL is here."""
    url = url.rstrip("/")
    return mirrors() / _digest(url) / (url.rpartition("/")[2].partition("?")[0] or "files")


def read_state(root: Path) -> State | None:
    """Return what state.json says; None where nothing is said, or of another folder than this, which lies beside it."""
    with suppress(OSError, msgspec.MsgspecError):
        state = msgspec.json.decode((root.parent / "state.json").read_bytes(), type=State)
        return state if mirror_root(state.url) == root else None
    return None


@lru_cache(maxsize=8)
def _resolved(folder: str) -> Path:
    return Path(folder).resolve()


def _local(path: Path, whole: bool) -> tuple[int, ...]:
    """Return what tells a file here from what it was: bytes that are brought into one change its time alone."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, *((stat.st_mtime_ns,) if whole else ()))


def _order(name: str) -> int:
    """Return the place of a file among those that are written last, one after another; −1 of all others."""
    last = name.rpartition("/")[2]
    return LAST.index(last) if last in LAST else -1


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]

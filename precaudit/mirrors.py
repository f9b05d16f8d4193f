"""Folders here that follow buckets: a URL becomes a path below the cache folder, and all code works on that.

Small files are brought as they are. Of a safetensors file, which may be large, an empty (sparse) file of its size is
made, and ``bring`` fills the bytes that are read; of data of a run's database, too, which ``bring_below`` brings whole.
``commit`` writes what changed here into the bucket: what makes the rest valid goes last, so that a bucket that fails
half-way shows no run as whole. What did not get there is written when the URL is next used, unless the bucket changed
since. ``state.json`` says what of the bucket is here. A path that is of no bucket costs a look at its beginning.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from precaudit.buckets import (
    Bucket,
    HeldFile,
    RemoteFile,
    State,
    check_cache_space,
    is_url,
    local_mark,
    mirror_root,
    mirrors,
    name_digest,
    order_last,
    read_state,
)
from precaudit.errors import UserError
from precaudit.writing import PART, temporary, write_whole

P = ParamSpec("P")
R = TypeVar("R")
FILE = "file://"
# Large, and read by nobody here.
UNREAD = (".bin", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite")
LAZY = re.compile(r"\.safetensors$|(^|/)tensors/(process_\d+/)?d/\w+$")  # what is brought once it is read
BLOCK = 4 << 20  # bytes of a file that are asked for at once: a request takes as long as so many bytes


_MIRRORS: dict[Path, "Mirror"] = {}


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
            files = {name: x for name, x in files.items() if local_mark(self._path(name), x.whole) == x.local}
            self._delete_others(listed)
            wanted = {name: remote for name, remote in listed.items() if name not in files}
            self._bring_files(wanted, files, [name for name in wanted if not LAZY.search(name or self.state.url)])
            self._save(files)
            self.refreshed = True

    def commit(self) -> None:
        """Write what changed here into the bucket; raises UserError, after which the next use tries again."""
        with self._alone():
            changed, gone = self.list_changes()
            self._push(changed)
            if self.refreshed:  # else it is not known why they are gone
                self._remove(sorted(gone, key=order_last, reverse=True))  # what makes the rest valid goes before it

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

    def bring_below(self, folder: str) -> None:
        """Have every file below a folder here whole; raises UserError where the bucket does not give them."""
        if not any(name.startswith(folder) and not held.whole for name, held in self.state.files.items()):
            return
        with self._alone():
            files = dict(self.state.files)
            wanted = {name: x.remote for name, x in files.items() if name.startswith(folder) and not x.whole}
            self._bring_files(wanted, files, list(wanted))
            self._save(files)

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

    def _bring_files(self, wanted: Mapping[str, RemoteFile], files: dict[str, HeldFile], whole: Sequence[str]) -> None:
        """Bring files that are ``whole``, and make the others, of which nothing is here; add them to ``files``."""
        parts = {name: temporary(self._path(name)) for name in wanted}
        try:
            for part in {part.parent for part in parts.values()}:
                part.mkdir(parents=True, exist_ok=True)
            check_cache_space(self.state.url, sum(wanted[name].size for name in whole))
            if whole:
                self.bucket.read_files(whole, [parts[name] for name in whole])
            for name, remote in wanted.items():
                if name not in whole:
                    with parts[name].open("xb") as f:
                        f.truncate(remote.size)
                elif parts[name].stat().st_size != remote.size:
                    raise UserError(f"{self.bucket.named(name)}: it was cut off, or changed, while it was read")
                parts[name].replace(self._path(name))
                files[name] = HeldFile(remote, local_mark(self._path(name), name in whole), name in whole)
        except OSError as error:
            raise UserError(f"{self.state.url}: cannot be kept here: {error.strerror or error}") from None
        finally:
            for part in parts.values():
                with suppress(OSError):
                    part.unlink(missing_ok=True)

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
        changed = [n for n in here if n not in held or local_mark(self._path(n), held[n].whole) != held[n].local]
        return changed, [n for n in held if n not in here]

    def _here(self) -> list[str]:
        if self.root.is_file():
            return [""]
        files = (p for p in sorted(self.root.rglob("*")) if p.is_file() and not p.is_symlink())
        names = [p.relative_to(self.root).as_posix() for p in files]
        return [name for name in names if not any(part.endswith(PART) for part in name.split("/"))]

    def _push(self, changed: list[str]) -> None:
        last = sorted((name for name in changed if order_last(name) >= 0), key=order_last)
        for names in ([name for name in changed if order_last(name) < 0], *([name] for name in last)):
            if names:
                self._write(names)

    def _write(self, names: list[str]) -> None:
        before = [local_mark(self._path(name), True) for name in names]
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
        return self.root.parent / f"{name_digest(f'{name} {remote.mark} {remote.size} {inode} {BLOCK}')}.blocks"


def local_path(url: str, anew: bool = True) -> Path:
    """Return the folder or file here that follows a URL, as the bucket has it now; raises UserError.

    ``anew``: look again at what this process has looked at.
    """
    if url.startswith(FILE):
        return Path(url.removeprefix(FILE))
    root = mirror_root(url)
    if not anew and root in _MIRRORS:
        return root
    mirror = _MIRRORS.get(root) or Mirror(root, read_state(root) or State(url.rstrip("/")))
    mirror.refresh()
    _MIRRORS[root] = mirror
    return root


def unwritten(folder: Path) -> list[str]:
    """Return the URLs of files in a mirror's folder that its bucket does not have as they are here."""
    states = [(path, state) for path in folder.resolve().iterdir() if (state := read_state(path)) is not None]
    found = [Mirror(path, state) for path, state in states]
    return [mirror.bucket.named(name) for mirror in found for name in mirror.list_changes()[0]]


def path_of(text: str, folder: Path) -> Path:
    """Return the path that a text names: of a URL what follows it here, else one below a folder."""
    return local_path(text) if is_url(text) else folder / text


def was_used(url: str) -> bool:
    """Whether a URL was given here before."""
    return read_state(mirror_root(url)) is not None


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror that a path belongs to; None for any other path."""
    top = f"{mirrors()}{os.sep}"
    if not str(path).startswith(top):
        return None
    root = Path(top, *Path(str(path)[len(top) :]).parts[:2])
    if root not in _MIRRORS and (state := read_state(root)) is not None:  # another process made it
        _MIRRORS[root] = Mirror(root, state)
    return _MIRRORS.get(root)


def bring(path: Path, begin: int = 0, end: int | None = None) -> None:
    """Have bytes of a file here before they are read, where it is one of a bucket."""
    if (mirror := mirror_of(path)) is not None:
        mirror.bring(_name(mirror, path), begin, end)


def bring_below(folder: Path) -> None:
    """Have all files below a folder here before they are read, where it is one of a bucket."""
    if (mirror := mirror_of(folder)) is not None:
        mirror.bring_below(f"{name}/" if (name := _name(mirror, folder)) else "")


def refresh(path: Path) -> None:
    """Make a folder what its bucket has by now, where it has one: what is here alone has to be committed before."""
    if (mirror := mirror_of(path)) is not None:
        mirror.refresh()


def commit(path: Path) -> None:
    """Write what changed in a run's folder into its bucket, where it has one."""
    if (mirror := mirror_of(path)) is not None:
        mirror.commit()


def commit_all() -> None:
    """Write what changed into every bucket that this process uses."""
    for mirror in list(_MIRRORS.values()):
        mirror.commit()


def leave_to_others() -> None:
    """Have this process write nothing more into buckets, since another one does."""
    _MIRRORS.clear()


def takes_urls(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function take URLs where it takes paths; what it writes there is in the buckets when it returns."""

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        if not any(isinstance(x, str) and is_url(x) for x in (*given, *named.values())):
            return function(*given, **named)
        values: Any = [_followed(x) for x in given]
        options: Any = {name: _followed(x) for name, x in named.items()}
        found = function(*values, **options)
        commit_all()
        return found

    return call


def _followed(x: object) -> object:
    return str(local_path(x)) if isinstance(x, str) and is_url(x) else x


def remote_mark(path: Path) -> str | None:
    """Return what tells a bucket's file from another, without its bytes; None for one that is here alone."""
    mirror = mirror_of(path)
    held = None if mirror is None else mirror.state.files.get(_name(mirror, path))
    return None if held is None else f"{held.remote.size} {held.remote.mark}"


def by_url(text: str) -> str:
    """Return a text with URLs in place of the paths that follow them."""
    for root, mirror in _MIRRORS.items():
        text = text.replace(str(root), mirror.state.url)
    return text


def _name(mirror: Mirror, path: Path) -> str:
    return "" if path == mirror.root else path.relative_to(mirror.root).as_posix()

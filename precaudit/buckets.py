"""Buckets: ``gs://``, ``s3://`` and what else fsspec opens: listed, read in ranges, written; errors in a sentence.

A bucket's folder or file has one below the cache folder, with a note of which of its files are there (``mirrors.py``).
"""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from precaudit.caching import cache_folder
from precaudit.errors import UserError, close
from precaudit.numbers.bytes_text import bytes_text
from precaudit.writing import PART

URL = re.compile(r"([a-z][a-z0-9+.-]*)://\S+")
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # of setup.cfg, by protocol
HERE = {"local", "simplecache", "filecache", "blockcache", "cached", "reference", "dir"}  # no buckets
WAITS = (0.2, 0.4, 0.8)  # seconds before a bucket is asked again; gcsfs and s3fs wait and ask again themselves
LOUD = ("gcsfs", "google.auth", "s3fs", "aiobotocore", "botocore", "fsspec")  # they log what they raise as well
IDENTITY = ("generation", "ETag", "etag", "md5Hash", "mtime", "updated", "LastModified", "last_modified", "created")
REFUSED = re.compile(r"forbidden|access ?denied|unauthorized|\b40[13]\b|credential|permission|anonymous", re.I)
PASSING = re.compile(r"\b(429|500|502|503|504)\b|time[d -]*out|temporar|connection|disconnected|reset by peer", re.I)
# What is written after all else: what a database, then what resuming goes by, then what makes the rest valid.
LAST = ("manifest.ocdbt", "batches.jsonl", "compared.json", "compare.json", "dump.json", "program.json", "run.json")
T = TypeVar("T")


class RemoteFile(msgspec.Struct, frozen=True):
    """A file as the bucket lists it: its size, and what tells it from an earlier one of that name."""

    size: int
    mark: str


@dataclass(frozen=True)
class Bucket:
    """What lies at and below a URL: files by their names below it; "" where the URL is one itself."""

    url: str

    def named(self, name: str) -> str:
        """Return a file's own URL."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def list_files(self) -> dict[str, RemoteFile]:
        """Return the files that are there, none where there is no such bucket; raises UserError for unsafe names."""
        fs, base = self._open()

        def ask() -> Mapping[str, Any]:
            fs.invalidate_cache()
            try:
                found = fs.info(base)
                return {base: found} if found["type"] != "directory" else fs.find(base, detail=True)
            except FileNotFoundError:
                return {}

        listed = dict[str, RemoteFile]()
        for path, about in self._ask("read", ask).items():
            name = "" if path == base else path.removeprefix(f"{base}/")
            if name.endswith(("/", PART)) or name == path or about.get("type") == "directory":
                continue
            if any(part in ("", ".", "..") or set(part) & set("\\\0:") for part in name.split("/") if name):
                raise UserError(f"{self.url}: it holds {name!r}, which is no name of a file here; nothing was read")
            listed[name] = _remote_file(about)
        return listed

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes of a file; raises UserError where they are not all there."""
        fs, _ = self._open()
        data: bytes = self._ask("read", lambda: fs.cat_file(self._path(name), start=begin, end=end))
        if len(data) != end - begin:
            raise UserError(f"{self.named(name)}: gave {len(data)} bytes of {end - begin}; it was cut off, or changed")
        return data

    def read_files(self, names: Sequence[str], paths: Sequence[Path]) -> None:
        """Write files' bytes to paths here, several at a time."""
        fs, _ = self._open()
        self._ask("read", lambda: fs.get([self._path(n) for n in names], [str(p) for p in paths]))

    def write_files(self, names: Sequence[str], paths: Sequence[Path]) -> list[RemoteFile]:
        """Write files, several at a time; return what the bucket says of each then."""
        fs, _ = self._open()
        places = [self._path(name) for name in names]
        self._ask("written", lambda: fs.put([str(p) for p in paths], places))
        fs.invalidate_cache()
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda place: _remote_file(self._ask("read", lambda: fs.info(place))), places))

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        fs, _ = self._open()

        def ask() -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(self._path(name))

        self._ask("written", ask)

    def _path(self, name: str) -> str:
        base = self._open()[1]
        return f"{base}/{name}" if name else base

    def _open(self) -> tuple[Any, str]:
        """Return what opens the URL, and its path there; raises UserError where a package is not installed."""
        import fsspec

        protocol = self.url.partition(":")[0]
        for name in LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            kind = fsspec.get_filesystem_class(protocol)
            return fsspec.filesystem(protocol), kind._strip_protocol(self.url).rstrip("/")
        except ImportError as error:
            extra = f"pip install 'precaudit[{EXTRAS[protocol]}]'" if protocol in EXTRAS else str(error)
            raise UserError(f"{self.url}: what reads {protocol}:// is not installed: {extra}") from None
        except Exception as error:  # each library raises its own
            raise UserError(self._sentence("read", error)) from None

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Return what the bucket answers, asked again where it fails for the moment; raises UserError."""
        for wait in (*(() if self.url.partition(":")[0] in EXTRAS else WAITS), None):
            try:
                return call()
            except Exception as error:  # each library raises its own
                if wait is None or not PASSING.search(f"{type(error).__name__} {error}"):
                    raise UserError(self._sentence(what, error)) from None
                time.sleep(wait)
        raise AssertionError

    def _sentence(self, what: str, error: Exception) -> str:
        """Return a sentence on what the bucket refused."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, PermissionError) or REFUSED.search(text):
            return f"{self.url}: cannot be {what} with the rights that this user has ({text})"
        if isinstance(error, FileNotFoundError):
            return f"{self.url}: cannot be {what}: no such bucket or file ({text})"
        return f"{self.url}: cannot be {what} ({text})"


class HeldFile(msgspec.Struct, frozen=True):
    """A file that is here as the bucket has it. ``local``: what tells whether it was changed here since.

    ``whole``: all its bytes are here; else those that were read.
    """

    remote: RemoteFile
    local: tuple[int, ...]
    whole: bool


def local_mark(path: Path, whole: bool) -> tuple[int, ...]:
    """Return what tells a file here from what it was: bytes that are brought into one change its time alone."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, *((stat.st_mtime_ns,) if whole else ()))


class State(msgspec.Struct, frozen=True):
    """state.json: the URL, and the files that are here as the bucket has them, by their names below it."""

    url: str
    files: dict[str, HeldFile] = msgspec.field(default_factory=dict)


def order_last(name: str) -> int:
    """Return the place of a file among those that are written last, one after another; −1 of all others."""
    last = name.rpartition("/")[2]
    return LAST.index(last) if last in LAST else -1


def mirrors() -> Path:
    """Return the folder of all that follows buckets."""
    return _resolved(str(cache_folder("buckets")))


def mirror_root(url: str) -> Path:
    """Return where the folder or file of a URL is here."""
    url = url.rstrip("/")
    return mirrors() / name_digest(url) / (url.rpartition("/")[2].partition("?")[0] or "files")


def check_cache_space(url: str, needed: int) -> None:
    """Raise UserError where the disk of the cache has less than ``needed`` bytes left."""
    free = shutil.disk_usage(mirrors().parent if mirrors().parent.exists() else Path("/")).free if needed else 0
    if needed > free:
        raise UserError(
            f"{url}: {bytes_text(needed)} are to be brought here, and the cache's disk has "
            f"{bytes_text(free)} left (PRECAUDIT_CACHE=FOLDER: another one)"
        )


def read_state(root: Path) -> State | None:
    """Return what state.json says; None where nothing is said, or of another folder than this, which lies beside it."""
    with suppress(OSError, msgspec.MsgspecError):
        state = msgspec.json.decode((root.parent / "state.json").read_bytes(), type=State)
        return state if mirror_root(state.url) == root else None
    return None


@lru_cache(maxsize=8)
def _resolved(folder: str) -> Path:
    return Path(folder).resolve()


def name_digest(text: str) -> str:
    """Return a short name of a text, for a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_url(text: str) -> bool:
    """Whether a text is a URL of a kind that fsspec knows."""
    return (found := URL.fullmatch(text)) is not None and found[1] in _protocols()


def check_known(text: str) -> None:
    """Raise UserError for a URL of a kind that nothing opens."""
    if (found := URL.fullmatch(text)) is not None and found[1] not in _protocols():
        raise UserError(
            f"{text}: nothing opens {found[1]}://{close(found[1], _protocols()) or '; gs://, s3:// and others'}"
        )


@lru_cache(maxsize=1)
def _protocols() -> frozenset[str]:
    from fsspec import available_protocols

    return frozenset(available_protocols()) - HERE


def _remote_file(about: Mapping[str, Any]) -> RemoteFile:
    key = next((key for key in IDENTITY if about.get(key) is not None), "")
    x = about.get(key, "")  # a listing may give seconds where a file's own record has a date
    return RemoteFile(int(about.get("size") or 0), f"{key} {x.timestamp() if isinstance(x, datetime) else x}")

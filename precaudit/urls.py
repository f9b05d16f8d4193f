"""URLs where paths are taken: what follows them here, and what is done where a path is of a bucket.

A path that is of none costs a look at its beginning.
"""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from precaudit.buckets import is_url
from precaudit.mirrors import Mirror, State, mirror_root, mirrors, read_state

P = ParamSpec("P")
R = TypeVar("R")
FILE = "file://"
_MIRRORS: dict[Path, Mirror] = {}


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


def commit(path: Path) -> None:
    """Write what changed in a run's folder into its bucket, where it has one."""
    if (mirror := mirror_of(path)) is not None:
        mirror.commit()


def commit_all() -> None:
    """Write what changed into every bucket that this process uses."""
    for mirror in list(_MIRRORS.values()):
        mirror.commit()


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

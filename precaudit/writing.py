"""Files written whole or not at all."""

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part"  # what every temporary name ends in


def temporary(path: Path) -> Path:
    """Return a name beside ``path`` that no other thread or process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")


@contextmanager
def whole(path: Path, inside: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends without an exception, and else is deleted.

    A link stays, and the file that it leads to is replaced. What is no file (a device, a FIFO) is written into, and so
    is what standard output or error goes to. ``inside``: the file is one of a folder of ours, which somebody else may
    have made: all of these are refused there. Raises OSError with the name of ``path``.
    """
    try:
        if inside and not _plain(path):
            raise OSError(errno.EPERM, "a link or a device, which no file of ours is; delete it")
        stream = None if inside else _stream(path)
        with stream or _replace_when_done(Path(os.path.realpath(path)) if path.is_symlink() else path) as f:
            yield f
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and those above it; the ones that were not there go again, if empty, where the block raises."""
    new = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for p in new:
                p.rmdir()
        raise


@contextmanager
def _replace_when_done(path: Path) -> Iterator[BinaryIO]:
    part = temporary(path)
    try:
        with part.open("xb") as f:
            yield f
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _plain(path: Path) -> bool:
    """Whether a path is a file, a folder or nothing yet."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _stream(path: Path) -> BinaryIO | None:
    """Return what is written into as it stands, open; None for what can be replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    for own in filter(None, (sys.__stdout__, sys.__stderr__)):
        with suppress(OSError, ValueError):  # closed, or none of the system's
            if os.path.samestat(found, os.fstat(own.fileno())):
                own.flush()  # what was printed before stands before
                return open(os.dup(own.fileno()), "wb")
    return None if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) else path.open("wb")


def write_whole(path: Path, data: bytes | str, inside: bool = False) -> None:
    """Write a file whole or not at all, text as UTF-8; ``inside``: one of a folder of ours."""
    with whole(path, inside) as f:
        f.write(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk now; nothing where it cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)

"""Files written whole or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part"  # what every temporary name ends in


def temporary(path: Path) -> Path:
    """Return a name beside ``path`` that no other thread or process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends without an exception, and else is deleted.

    Raises OSError with the name of ``path``.
    """
    part = temporary(path)
    try:
        with part.open("xb") as f:
            yield f
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all, text as UTF-8."""
    with whole(path) as f:
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

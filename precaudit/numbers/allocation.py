"""How glibc's allocator keeps what is freed, since large arrays come and go thousands of times; what a process held."""

import ctypes
import sys
from functools import cache
from pathlib import Path

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENAS = -1, -3, -8  # malloc.h


@cache
def keep_freed_memory() -> None:
    """Have glibc keep large blocks for the next allocation instead of unmapping them.

    A layer's temporaries are freed and asked for again thirty times; each time the pages would be fresh.
    """
    _mallopt(MMAP_THRESHOLD, 1 << 28)
    _mallopt(TRIM_THRESHOLD, 1 << 29)


@cache
def share_freed_memory() -> None:
    """Have all threads of this process, which is ours alone, reuse what any of them freed.

    Called before others begin: a thread that has allocated keeps what it has apart.
    """
    keep_freed_memory()
    _mallopt(ARENAS, 1)


def peak_memory(process: int | None = None) -> int:
    """Return the most resident memory in bytes that a process has held (None: this one); 0 where no system says it."""
    try:  # of this program alone: getrusage begins at what the process held that started it
        text = Path(f"/proc/{process or 'self'}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        if process is not None:
            return 0
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def _mallopt(parameter: int, value: int) -> None:
    try:
        ctypes.CDLL(None).mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):  # not glibc
        return

"""How glibc's allocator keeps what is freed: large arrays are made and freed thousands of times."""

import ctypes
from functools import cache

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


def _mallopt(parameter: int, value: int) -> None:
    try:
        ctypes.CDLL(None).mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):  # not glibc
        return

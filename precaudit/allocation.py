"""How glibc's allocator keeps what is freed: large arrays are made and freed thousands of times."""

import ctypes
from functools import cache


@cache
def keep_freed_memory() -> None:
    """Have glibc keep large blocks for the next allocation, of all threads, instead of unmapping them.

    A layer's temporaries are freed and asked for again thirty times; each time the pages would be fresh. Threads that
    have allocated before keep what they have apart: a process that computes calls this first.
    """
    trim_threshold, mmap_threshold, arenas = -1, -3, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    mallopt(mmap_threshold, 1 << 28)
    mallopt(trim_threshold, 1 << 29)
    mallopt(arenas, 1)

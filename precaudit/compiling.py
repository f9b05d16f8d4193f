"""Functions that numba compiles, kept in the user's cache folder.

Beside their source, where numba puts them, they outlive an uninstall: Python takes the folder they keep for the package
and does not find the next installation.
"""

from collections.abc import Callable
from typing import Any

import numba

from precaudit.caching import cache_folder


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator ``numba.njit`` of functions that hold no GIL; ``options`` are numba's.

    $NUMBA_CACHE_DIR is where they are kept if it is set.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        given = numba.config.CACHE_DIR  # of the process: a user's own functions stay where they were
        numba.config.CACHE_DIR = given or str(cache_folder("numba"))
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = given

    return decorate

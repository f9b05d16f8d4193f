"""Functions that numba compiles, kept in the user's cache folder.

Beside their source, where numba puts them, they outlive an uninstall: Python takes the folder they keep for the package
and does not find the next installation.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numba
from numba.core.caching import FunctionCache

from precaudit.caching import cache_folder


class NumbaCache(FunctionCache):
    """What numba keeps of a function. A disk that takes nothing and a damaged file stop nobody: both are said."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is kept of a signature; None where that is nothing, or is damaged."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a pickle that was damaged raises what it likes
            what = f"a compiled function was damaged and is compiled again: {type(error).__name__}"
            _warn_once(os.path.dirname(self.cache_path), what)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: object) -> None:
        """Keep a signature's machine code."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(os.path.dirname(self.cache_path), f"compiled functions are not kept: {error.strerror}")


def nogil_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator ``numba.njit`` of functions that hold no GIL; ``options`` are numba's.

    $NUMBA_CACHE_DIR is where they are kept if it is set.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        given = numba.config.CACHE_DIR  # of the process: a user's own functions stay where they were
        where = numba.config.CACHE_DIR = given or str(cache_folder("numba"))
        made = numba.njit(nogil=True, **options)(function)
        try:
            made._cache = NumbaCache(function)
        except RuntimeError:  # numba found no folder that it can write
            _warn_once(where, "compiled functions are not kept: it cannot be written")
        finally:
            numba.config.CACHE_DIR = given
        return made

    return decorate


@cache
def _warn_once(folder: str, what: str) -> None:
    """Warn of a folder, once."""
    warnings.warn(f"{folder}: {what}", RuntimeWarning, stacklevel=1)

"""Which device runs, and the compilation cache."""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from precaudit.caching import cache_folder
from precaudit.errors import UserError
from precaudit.interpreters.tpu.environment import allow_libtpu, chips

DEVICES = ("auto", "cpu", "gpu", "tpu")
EXTRAS = {"gpu": "pip install 'precaudit[cuda]'", "tpu": "pip install 'precaudit[tpu]'"}


def choose_device(name: str) -> Any:
    """Return a JAX device of kind ``name`` (auto: JAX's default); raises UserError when there is none."""
    return every_device(name)[0]


def every_device(name: str) -> list[Any]:
    """Return the JAX devices of kind ``name`` (auto: JAX's default); raises UserError when there is none."""
    allow_libtpu()
    import jax

    if name not in DEVICES:
        raise UserError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    _use_cache()
    try:
        return list(jax.devices() if name == "auto" else jax.devices(name))
    except RuntimeError as error:
        hint = f"; JAX for it: {EXTRAS[name]}" if name in EXTRAS else ""
        raise UserError(f"no {name} device here ({str(error).splitlines()[0]}){hint}") from None


def devices_of_processes(devices: Sequence[Any] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return which of some devices (None: all) each of several processes has; nothing of one process."""
    import jax

    if jax.process_count() == 1:
        return ()
    each = [d.process_index for d in (jax.devices() if devices is None else devices)]
    return tuple(tuple(i for i, own in enumerate(each) if own == n) for n in range(jax.process_count()))


def _use_cache() -> None:
    """Keep compiled programs on disk, unless the user has already told JAX where."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def platform_of(device: Any) -> str:
    """Return cpu, gpu or tpu."""
    name = str(device.platform)
    return "gpu" if name in ("cuda", "rocm") else name


def visible_devices() -> tuple[dict[str, int], list[str], list[str]]:
    """Return {kind: how many} of the devices JAX sees, their platforms, and what it said of those it could not start.

    Raises nothing: a plugin that fails to start is one of the things said.
    """
    with _heard() as said:
        try:
            import jax

            found = jax.devices()
        except Exception as error:  # a plugin raises what it likes
            return {}, [], [*said, _first_line(str(error) or _wordless(error))]
    kinds = Counter(f"{platform_of(d)} {d.device_kind}" if platform_of(d) != "cpu" else "cpu" for d in found)
    return dict(kinds), [platform_of(d) for d in found], said


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collect what JAX logs of its backends, in place of printing it; that there is no TPU is said everywhere."""
    said: list[str] = []
    logger = logging.getLogger("jax._src.xla_bridge")
    level, propagate = logger.level, logger.propagate

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage() + (f": {record.exc_info[1]}" if record.exc_info else "")
            noise = record.levelno < logging.WARNING and "Unable to initialize" not in text
            absent = "'tpu'" in text and not (find_spec("libtpu") and chips())
            if not noise and not absent:
                said.append(_first_line(text))

    listener = Listener(logging.INFO)
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate


def _wordless(error: Exception) -> str:
    """Name an exception without a message, as that of a platform JAX has no plugin for."""
    asked = os.environ.get("JAX_PLATFORMS")
    return type(error).__name__ + (f" where JAX_PLATFORMS={asked}" if asked else "")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]

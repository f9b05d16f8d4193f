"""Which device runs, and the compilation cache."""

from typing import Any

from precaudit.caching import cache_folder
from precaudit.errors import UserError

DEVICES = ("auto", "cpu", "gpu", "tpu")
EXTRAS = {"gpu": "pip install 'precaudit[cuda]'", "tpu": "pip install 'precaudit[tpu]'"}


def choose_device(name: str) -> Any:
    """Return a JAX device of kind ``name`` (auto: JAX's default); raises UserError when there is none."""
    import jax

    if name not in DEVICES:
        raise UserError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    _use_cache()
    try:
        return jax.devices()[0] if name == "auto" else jax.devices(name)[0]
    except RuntimeError as error:
        hint = f"; JAX for it: {EXTRAS[name]}" if name in EXTRAS else ""
        raise UserError(f"no {name} device here ({str(error).splitlines()[0]}){hint}") from None


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

"""The checks that ship: every file of ``precaudit.checks.kernels`` that defines a kernel."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from precaudit.checks import kernels
from precaudit.checks.gradients.given import asked_formats
from precaudit.checks.gradients.subjects import why_it_does_not_run
from precaudit.interpreters.jaxpr.kernel_lines import runs_interpreted

INTERPRETED = "interpret mode"


@dataclass(frozen=True)
class Shipped:
    """A check: its module, what it is of, the formats of its inputs, what is differentiated, and how it runs here.

    ``runs``: whether it does. ``here``: compiled, in interpret mode, or why not.
    """

    name: str
    about: str
    formats: tuple[str, ...]
    gradients: tuple[str, ...]
    runs: bool
    here: str


def shipped_checks() -> tuple[Shipped, ...]:
    """Return the checks that ship, by name; a kernel that can run is traced, none is run."""
    names = sorted(m.name for m in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."))
    modules = [importlib.import_module(name) for name in names]
    return tuple(_describe(m) for m in modules if hasattr(m, "kernel"))


def _describe(module: Any) -> Shipped:
    about = (inspect.getdoc(module) or "").splitlines()[0].rstrip(".").partition(": ")[0]
    called = [*inspect.signature(module.reference).parameters]
    why = why_it_does_not_run(module.__name__)
    return Shipped(
        module.__name__,
        about,
        asked_formats(module.inputs),
        tuple(f"d{called[i]}" for i in module.ARGNUMS),
        why is None,
        f"no: {why}" if why is not None else _runs(module),
    )


def _runs(module: Any) -> str:
    given = module.inputs(0)
    first = next(iter(given.values())) if isinstance(given, Mapping) else given
    with jax.numpy_dtype_promotion("standard"):  # JAX's own kernels mix formats
        traced = jax.make_jaxpr(module.kernel)(*first)
    return INTERPRETED if runs_interpreted(traced.jaxpr) else f"compiled for {jax.default_backend().upper()}"

"""What a gradcheck is of: a kernel, its reference and its inputs by name, or inputs from a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.recording.programs.loading import has, load_attribute, load_function


@dataclass(frozen=True)
class KernelPair:
    """Two functions to hold against each other, and what they are run on."""

    name: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[..., Any] | tuple[Any, ...]
    argnums: tuple[int, ...] | None


def import_kernel(kernel: str, reference: str | None, inputs: str | None, argnums: Sequence[int] | None) -> KernelPair:
    """Import a kernel, and beside it what is not named: ``reference``, ``inputs`` and ``ARGNUMS`` of its module.

    ``kernel``: ``module:name``, ``FILE.py:name``, or a module or file alone: its ``kernel``. ``inputs``: a function as
    ``gradcheck`` takes it, or a .safetensors file of arrays named 0, 1, …. Raises UserError for what is not there.
    """
    where, colon, _ = kernel.rpartition(":")
    module, full = (where, kernel) if colon else (kernel, f"{kernel}:kernel")
    given: Any
    if inputs is not None and inputs.endswith(".safetensors"):
        given = read_inputs(Path(inputs))
    else:
        given = load_function(inputs or f"{module}:inputs")
    if (why := why_it_does_not_run(module)) is not None:
        raise UserError(f"{module} does not run here: {why}")
    if argnums is None and has(f"{module}:ARGNUMS"):
        argnums = tuple(load_attribute(f"{module}:ARGNUMS"))
    return KernelPair(
        kernel,
        load_function(full),
        load_function(reference or f"{module}:reference"),
        given,
        None if argnums is None else tuple(argnums),
    )


def why_it_does_not_run(module: str) -> str | None:
    """Return why the kernel of a module does not run here, as its ``why_not_here()`` says; None where it does."""
    try:
        found = load_function(f"{module}:why_not_here")()
    except UserError:
        return None
    return None if found is None else str(found)


def read_inputs(path: Path) -> tuple[Any, ...]:
    """Return the inputs a file holds, in order; raises UserError."""
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        held = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: {error}") from None
    if sorted(held) != sorted(str(i) for i in range(len(held))):
        raise UserError(f"{path}: arrays named 0, 1, … are wanted, it holds {', '.join(sorted(held)) or 'none'}")
    return tuple(held[str(i)] for i in range(len(held)))


def write_inputs(path: Path, inputs: Sequence[Any]) -> bool:
    """Write inputs as ``read_inputs`` takes them; False, and nothing written, where one is no array of numbers."""
    import jax.numpy as jnp
    from safetensors.flax import save

    from precaudit.interpreters.jaxpr.keys import is_numbers
    from precaudit.writing import write_whole

    if not all(map(is_numbers, inputs)):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save({str(i): jnp.asarray(np.ascontiguousarray(x)) for i, x in enumerate(inputs)}))
    return True

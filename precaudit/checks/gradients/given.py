"""The inputs a gradcheck runs on: those of a few seeds and formats, and what is made from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precaudit.checks.gradients.awkward import awkward
from precaudit.errors import UserError


def make_cases(
    inputs: Callable[..., Any] | Sequence[Any], seeds: int, hostile: bool
) -> list[tuple[str, Callable[[], tuple[Any, ...]]]]:
    """Return (name, what makes the inputs); those that are made from others have a blank in their name."""
    found: list[tuple[str, Callable[[], tuple[Any, ...]]]] = []
    for form in asked_formats(inputs) if callable(inputs) else ("",):
        first: tuple[Any, ...] = ()
        for seed in range(seeds if callable(inputs) else 1):
            made = inputs if not callable(inputs) else _make_inputs(inputs, seed, form)
            each = made if isinstance(made, Mapping) else {"": made}
            for label, given in each.items():
                if not isinstance(given, list | tuple):
                    raise UserError(f"inputs gives {type(given).__name__}: a tuple of arrays is wanted")
                held = tuple(given)
                first = first or held
                name = "-".join(x for x in (form, label, f"seed{seed}" if callable(inputs) else "given") if x)
                found.append((name, lambda held=held: held))  # type: ignore[misc]
        if hostile:
            found += [(f"{form} {label}".strip(), make) for label, make in awkward(first)]
    return found


def asked_formats(inputs: Callable[..., Any]) -> tuple[str, ...]:
    """Return the float formats that a function of inputs is asked for; one of no name where it takes none."""
    import inspect

    try:
        takes = len(inspect.signature(inputs).parameters) > 1
    except (TypeError, ValueError):
        takes = False
    return ("float32", "bfloat16") if takes else ("",)


def _make_inputs(inputs: Callable[..., Any], seed: int, form: str) -> Any:
    try:
        return inputs(seed, form) if form else inputs(seed)
    except Exception as error:
        raise UserError(f"inputs failed: {type(error).__name__}: {error}") from None

"""Which formats another framework computed in, read from the numbers that it wrote."""

from collections.abc import Iterable, Mapping

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array, as_format, widen
from precaudit.numbers.formats import FORMATS
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import Policy, apply_settings, load_policy

NARROW_FIRST = ("bfloat16", "float16", "float32")
SHIPPED = {"bfloat16": "bf16", "float32": "fp32"}  # the policy of one format everywhere


def holds(x: Array, name: str) -> bool:
    """Whether a format holds every number of an array exactly."""
    if x.dtype.name == name:
        return True
    wide = widen(x)
    return np.array_equal(widen(as_format(wide, name)), wide, equal_nan=True)


def narrowest_formats(arrays: Iterable[tuple[str, Array]]) -> dict[str, str]:
    """Return {key of a policy: the narrowest format that holds all numbers of its points}, of arrays by point.

    Raises UserError for numbers that only float64 holds.
    """
    found: dict[str, tuple[str, ...]] = {}
    for point, x in arrays:
        key = POINTS[point].format
        fits = tuple(name for name in found.get(key, NARROW_FIRST) if holds(x, name))
        if not fits:
            raise UserError(f"{point} holds float64 numbers, a format that no policy has; say --policy NAME|FILE")
        found[key] = fits
    return {key: fits[0] for key, fits in found.items()}


def policy_of_formats(formats: Mapping[str, str]) -> Policy:
    """Return the policy whose parts have these formats; raises UserError where they do not tell one.

    That of one format everywhere (norms, projections, else the residual stream), and what differs from it.
    """
    base = formats.get("activations") or formats.get("residual") or next(iter(formats.values()))
    if base not in SHIPPED:
        raise UserError(f"the dump's numbers are {base}, of which no policy is shipped; say --policy NAME|FILE")
    policy = load_policy(SHIPPED[base])
    return apply_settings(policy, {k: name for k, name in formats.items() if getattr(policy, k) != name})


def in_policy_format(x: Array, name: str) -> Array:
    """Return an array in the format that a policy says, where that holds all its numbers; else as it is."""
    return x if x.dtype.name == name or not holds(x, name) else as_format(widen(x), name).astype(FORMATS[name].dtype)

"""What it costs that a device rounds the products of a single row."""

from collections.abc import Iterator

import numpy as np

from precaudit.models.numpy_decoder.honest import ROUNDED_PRODUCTS
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, LocalError


def single_rows(errors: list[ErrorRecord]) -> Iterator[str]:
    """Yield what it costs that a device rounds the products of a single row before it sums them."""
    local = [e for e in errors if isinstance(e, LocalError) and e.rel_l2 is not None]
    found = [e for e in local if any(ROUNDED_PRODUCTS in how for how in (e.elided or {}).values())]
    if not found:
        return
    points = {e.point for e in found}
    alike = [value(e.rel_l2) for e in local if e.phase == "prefill" and e.point in points]
    against = f", {digits(np.median(alike), 2)} in prefill" if alike else ""
    yield (
        f"decode: {len(found)} operations ({', '.join(p for p in POINTS if p in points)}) rounded each product to "
        f"{found[0].dtype} before the float32 sum, as XLA on a GPU does to products with one row: local error "
        f"{digits(np.median([value(e.rel_l2) for e in found]), 2)}{against}; ask for a float32 result "
        "(preferred_element_type=jnp.float32) and round that, and it is not done"
    )

"""Other honest ways to write an operation: what people, kernels and devices do that rounds elsewhere, not worse.

An emulation under one of them is as good as one of the textbook's order: a record that one closes does not fail.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise as neighbours

import numpy as np

from precaudit.models.numpy_decoder.accumulation import accumulating, pairwise_matmul, rounding_products
from precaudit.models.numpy_decoder.ensemble import backwards
from precaudit.models.numpy_decoder.model import Attend, Softmax
from precaudit.models.numpy_decoder.operators import attend, exponentials, flash_attend, hide, softmax
from precaudit.models.numpy_decoder.passes import matmul_in_passes, with_sums
from precaudit.models.numpy_decoder.rounding import Blocks, Rounding, single_precision_dot
from precaudit.numbers.arrays import Array, rounder
from precaudit.schema.graphs.point import Point

Dot = Callable[[Array, Array], Array]
BLOCKS = (16, 32, 64, 128, 256, 512)  # keys of a block under a running maximum
SPLITS = (2, 4, 8, 16)  # parts of the keys, each with a softmax of its own
CHUNKS = (16, 8, 4, 32)  # terms a matrix unit adds before it truncates
DOUBT = 0.25
FLOAT32_PRODUCTS = "products in float32"
ROUNDED_PRODUCTS = "products rounded before the sum"
single = rounder("float32")


@dataclass(frozen=True)
class Form:
    """One way: ``attend`` and ``softmax`` of one head, ``dot`` the sums (None: as the rounding has them).

    ``doubt``: the part of its error that is not known: units that truncate differ in what they align and keep.
    """

    name: str
    says: str
    attend: Attend = attend
    softmax: Softmax = softmax
    dot: Dot | None = None
    doubt: float = 0.0


def honest_forms(row: Point, dtype: str) -> Iterator[Form]:
    """Yield the ways in which honest programs write an operation whose result has format ``dtype``."""
    if row.weighs:
        yield from _softmaxes()
    if row.kind == "mix":
        yield from _attentions()
    if row.sums and dtype == "float32":
        yield from _orders()


def forms_of(row: Point, dtype: str, base: Rounding | None) -> Iterator[Form]:
    """Yield other ways to write an operation; of a base whose products are known, those with other sums of them.

    Sums that truncate are not those of a TPU.
    """
    for form in honest_forms(row, dtype):
        if base is not None and form.doubt:
            continue
        known = form if base is None or form.dot is None else replace(form, dot=with_sums(base.dot, form.dot))
        yield known


@dataclass(frozen=True)
class RowExecution:
    """How an operation was executed: on a cpu, gpu or tpu, and with one row at a time (``decode``).

    ``settled``: its rounding is what the compiled program says, so that products are no others.
    """

    device: str
    decode: bool
    settled: bool = False


def on_single_rows(
    rounding: Rounding, row: Point, dtype: str, scores: str, executed: RowExecution
) -> dict[tuple[str, ...], Rounding]:
    """Return {what is done otherwise: rounding} of products with one row, where a device makes them in several ways.

    ``dtype``, ``scores``: formats of its result and of scores. XLA on a GPU makes a product with one row without its
    tensor cores: in float32 where an operand is, and where none is, and the result is narrow too, as a narrow product
    of every pair and a float32 sum. A TPU makes small products on its vector unit, in float32, and where the result is
    narrow in either way: which, its compiler chooses, and whether it rounds inside a fusion cannot be read from its
    text.
    """
    found: dict[tuple[str, ...], Rounding] = {(): rounding}
    device, decode = executed.device, executed.decode
    other = row.sums and rounding.dot is not np.matmul and not executed.settled
    if other and device == "tpu":
        found[FLOAT32_PRODUCTS,] = replace(rounding, dot=np.matmul)
    if row.sums and dtype in ("bfloat16", "float16") and device in ("gpu", "tpu") and decode:
        if other:
            found[FLOAT32_PRODUCTS,] = replace(rounding, dot=np.matmul)
        exact = None if scores in ("bfloat16", "float16") else rounding.dot
        found[ROUNDED_PRODUCTS,] = replace(rounding, dot=rounding_products(dtype), score_product=exact)
    return found


def _softmaxes() -> Iterator[Form]:
    for name, rounded in (("", False), (" and summed so", True)):
        yield Form(
            f"exponentials rounded{name}",
            f"exponentials are rounded as probabilities before the division{name}",
            partial(_rounded_first, rounded),
            partial(_quotient, rounded),
        )


def _attentions() -> Iterator[Form]:
    for name, rounded in (("", False), (", rounded ones summed", True)):
        says = f"exponentials are rounded as probabilities, and divided by their sum after the product{name}"
        yield Form(f"divided at the end{name}", says, partial(_divided_last, rounded))
    for block in BLOCKS:
        says = f"blocks of {block} keys under a running maximum, in float32"
        yield Form(f"flash, blocks of {block}", says, partial(_flash, block))
    for parts in SPLITS:
        says = f"{parts} parts of the keys, each with its own softmax, merged in float32"
        yield Form(f"split in {parts}", says, partial(_split_keys, parts))


def _orders() -> Iterator[Form]:
    yield Form("sums in float32", "sums are rounded to float32 term by term", dot=accumulating("float32"))
    yield Form("sums in float32, backwards", "sums run from the last term to the first", dot=backwards)
    yield Form("sums in float32, pairwise", "sums are rounded to float32, pair by pair", dot=pairwise_matmul("float32"))
    says = "sums are rounded to float32 every 128 terms"
    yield Form("sums in float32, blocks of 128", says, dot=accumulating("float32/128"))
    for chunk in CHUNKS:
        says = f"sums are truncated to float32 every {chunk} terms, as a matrix unit does"
        yield Form(
            f"sums in float32, truncated every {chunk}", says, dot=partial(truncated_product, chunk), doubt=DOUBT
        )
    yield Form(
        "products in six bfloat16 passes",
        "float32 operands are three bfloat16 parts each",
        dot=partial(matmul_in_passes, 6, single_precision_dot),
    )


def truncated_product(chunk: int, a: Array, b: Array) -> Array:
    """Return a · b whose running sum is cut to float32 towards zero every ``chunk`` terms, these added exactly.

    What NVIDIA's tensor cores do (Fasi, Higham, Mikaitis & Pranesh 2021, §3.2).
    """
    total = np.zeros((a.shape[0], b.shape[1]))
    for i in range(0, a.shape[1], chunk):
        exact = total + a[:, i : i + chunk] @ b[i : i + chunk]
        near = exact.astype(np.float32)
        total = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near).astype(np.float64)
    return total


def _quotient(rounded: bool, s: Array, positions: Array, window: int | None, r: Rounding) -> Array:
    e, total = exponentials(s.copy(), positions, window, r)
    p = r.probs(e)
    return r.probs(p / (p.sum(axis=1, keepdims=True) if rounded else total))


def _rounded_first(rounded: bool, s: Array, v: Array, positions: Array, window: int | None, r: Rounding) -> Array:
    return r.attn_out(r.dot(_quotient(rounded, s, positions, window, r), v))


def _divided_last(rounded: bool, s: Array, v: Array, positions: Array, window: int | None, r: Rounding) -> Array:
    e, total = exponentials(s, positions, window, r)
    p = r.probs(e)
    return r.attn_out(r.dot(p, v) / (p.sum(axis=1, keepdims=True) if rounded else total))


def _flash(block: int, s: Array, v: Array, positions: Array, window: int | None, r: Rounding) -> Array:
    """Attention a block of keys at a time (Dao et al. 2022, algorithm 1); running sums in float32."""
    return flash_attend(hide(s, positions, window), v, replace(r, running=single), Blocks(block))


def _split_keys(parts: int, s: Array, v: Array, positions: Array, window: int | None, r: Rounding) -> Array:
    """Attention of parts of the keys, merged by their sums of exponentials (flash decoding)."""
    s = hide(s, positions, window)
    edges = np.linspace(0, s.shape[1], parts + 1).astype(int)
    outs, tops, masses = [], [], []
    for a, b in neighbours(edges):
        if a == b:
            continue
        top = s[:, a:b].max(axis=1, keepdims=True)
        e = r.exponential(np.exp(r.shifted(s[:, a:b] - np.where(np.isfinite(top), top, 0.0))))
        mass = e.sum(axis=1, keepdims=True)
        outs.append(single(r.dot(r.probs(e / np.where(mass > 0, mass, 1.0)), v[a:b])))
        tops.append(top)
        masses.append(mass)
    weights = np.exp(np.stack(tops) - np.max(tops, axis=0)) * np.stack(masses)
    return r.attn_out((weights * np.stack(outs)).sum(axis=0) / weights.sum(axis=0))

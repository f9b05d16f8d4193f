"""What was done to the order of a tensor's rows, named."""

from collections.abc import Iterator

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.references.alignment.orders import head_sizes, interleaved

MOST_SHIFT = 8  # rows


def name_rows(index: Array, rows: int, head: int = 0, heads: int = 0) -> str:
    """Return what is wrong with rows: ``index`` [N] is the one that is where each should be, −1 where there is none.

    ``head``: rows of a head, ``heads``: how many query heads the model has; 0 where that is not known.
    """
    return next(_names(index, rows, head, heads), "")


def _names(index: Array, rows: int, head: int, heads: int) -> Iterator[str]:
    n, told = len(index), index >= 0
    places = np.arange(n)
    if told.all() and n == rows and np.array_equal(index, places):
        return
    steps = (index - places)[told]
    shift = int(np.bincount(steps - steps.min()).argmax() + steps.min()) if len(steps) else 0
    if 0 < abs(shift) <= MOST_SHIFT and (steps == shift).sum() >= told.sum() - abs(shift) and n > 4 * abs(shift):
        yield f"its rows are shifted by {shift:+d}: row {max(0, -shift)} holds row {max(0, -shift) + shift}"
    if n != rows:
        yield from _padded(index, rows, head)
    if told.all() and n == rows:
        yield from _repeated(index, rows)
        for size in dict.fromkeys((*head_sizes(rows, (), head), *head_sizes(rows, ()))):
            yield from _interleaved(index, rows, size, head, heads)
        yield from _blocks(index, rows, head)
        if np.array_equal(index, places[::-1]):
            yield "its rows are in reverse order"
    moved = int((index != places).sum())
    kind = "in another order" if len(np.unique(index[told])) == told.sum() else "in another order, some of them twice"
    if moved:
        yield f"{moved} of its {n} rows are {kind}"


def _interleaved(index: Array, rows: int, size: int, head: int, heads: int) -> Iterator[str]:
    """Yield what permuting the rows of heads, for another RoPE, was made of."""
    places = np.arange(rows)
    where = f"heads of {size}"
    if head and size != head:
        count = " (the number of query heads)" if rows == size * heads else ""
        where = f"{rows // size} heads of {size}{count}, where its heads are {rows // head} of {head}"
    for stride in (s for s in range(2, size // 2 + 1) if size % s == 0):
        if np.array_equal(index, interleaved(places, size, stride=stride)):
            if stride == 2:
                yield f"its RoPE rows are interleaved in {where}"
            elif stride == 4:
                yield f"its RoPE rows are interleaved twice in {where}, which is a stride of 4"
            elif stride == size // 2:
                yield f"its RoPE rows are interleaved backwards in {where}, which is a stride of {stride}"
            else:
                yield f"its RoPE rows are interleaved with a stride of {stride}, and not 2, in {where}"
    if np.array_equal(index, interleaved(interleaved(places, size), size)):
        yield f"its RoPE rows are interleaved twice in {where}"


def _padded(index: Array, rows: int, head: int) -> Iterator[str]:
    """Yield that heads were padded to a wider size before their rows were permuted."""
    n = len(index)
    for count in (c for c in range(1, rows + 1) if rows % c == 0 and n % c == 0 and (not head or rows // c == head)):
        size, wide = rows // count, n // count
        if wide <= size or wide % 2:
            continue
        place = interleaved(np.arange(n), wide)
        padded = np.where(place % wide < size, place // wide * size + place % wide, -1)
        if np.array_equal(index, padded):
            yield (
                f"its RoPE rows were interleaved after heads of {size} were padded to {wide}, and not before: "
                "zeros lie among them"
            )


def _repeated(index: Array, rows: int) -> Iterator[str]:
    """Yield which blocks of rows are there again in place of others."""
    there = np.unique(index)
    if len(there) == rows:
        return
    missing = np.setdiff1d(np.arange(rows), there)
    again = np.flatnonzero(index != np.arange(rows))
    if (
        len(missing) == len(again)
        and (np.diff(missing) == 1).all()
        and (np.diff(again) == 1).all()
        and (np.diff(index[again]) == 1).all()
    ):
        first, last = int(index[again[0]]), int(index[again[-1]]) + 1
        yield (
            f"rows {first}:{last} are there twice, again at {int(again[0])}:{int(again[-1]) + 1}, and rows "
            f"{int(missing[0])}:{int(missing[-1]) + 1} are missing: a shard repeated"
        )


def _blocks(index: Array, rows: int, head: int) -> Iterator[str]:
    """Yield which heads, or blocks of rows as large as can be, are in other places."""
    sizes = [head] if head and rows % head == 0 else [s for s in range(rows // 2, 1, -1) if rows % s == 0]
    for size in sizes:
        blocks = index.reshape(-1, size)
        if (blocks[:, :1] % size == 0).all() and (np.diff(blocks, axis=1) == 1).all():
            found = blocks[:, 0] // size
            moved = [int(i) for i in np.flatnonzero(found != np.arange(len(found)))]
            of = "heads" if head else f"blocks of {size} rows"
            said = ", ".join(f"{i} holds {int(found[i])}" for i in moved[:4])
            yield f"{of} {', '.join(map(str, moved[:4]))}{', …' if len(moved) > 4 else ''} are in other places: {said}"

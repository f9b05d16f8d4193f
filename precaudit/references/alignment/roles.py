"""What parameters are by their names, and what is wrong with one beside the others of its kind."""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from precaudit.references.alignment.align import Alignment
from precaudit.references.alignment.numbering import most_common
from precaudit.references.alignment.parameters import Part
from precaudit.references.alignment.words import FUSED, role_of

Kind = Literal["missing", "transposed", "layer", "exchanged", "rows", "values", "rounded", "zeros", "form"]
EXCHANGEABLE = (("q", "k", "v", "o"), ("gate", "up", "down"))
ROTATED = ("q", "k")
MOST = 0.5  # of a tensor's vectors


class Mistake(msgspec.Struct, frozen=True):
    """What a conversion did wrong with a tensor: its kind, and a sentence."""

    kind: Kind
    parameter: str
    tensor: str
    says: str

    @property
    def sentence(self) -> str:
        """One line."""
        where = f"{self.parameter} ({self.tensor})" if self.parameter and self.parameter != self.tensor else self.tensor
        return f"{where}: {self.says}"


def head_size(alignment: Alignment) -> int:
    """Return the rows of a head: the model's, or what most parts of queries and keys have; 0 where none tells."""
    if alignment.theirs.config is not None:
        return alignment.theirs.config.head_dim
    told = [
        p.order.head or p.rows[-1] for p in alignment.parts if p.order is not None and (p.order.head or len(p.rows) > 1)
    ]
    return most_common(np.array(told)) or 0


def wrong_role(alignment: Alignment, part: Part) -> str:
    """Return that a parameter whose name says what it is holds another projection."""
    text = part.family.general
    role, own = _fused_role(alignment, part) or role_of(text), role_of(part.theirs)
    if (
        role
        and own
        and role != own
        and any(role in kinds and own in kinds for kinds in EXCHANGEABLE)
        and not part.named
    ):
        return f"by its name it is {role}, and it holds {own}"
    return ""


def _fused_role(alignment: Alignment, part: Part) -> str:
    """Return a block's role by its parameter's name and its place among the parameter's blocks."""
    words = re.split(r"[/.]", part.family.general.lower())
    roles = next((FUSED[w] for word in reversed(words) for w in (word, word.replace("_proj", "")) if w in FUSED), None)
    beside = [p for p in alignment.parts if p.family is part.family]
    if roles is None or len(beside) != len(roles):
        return ""
    return roles[sorted(beside, key=lambda p: [s.start for s in p.at]).index(part)] if part in beside else ""


def roped_alone(alignment: Alignment) -> Iterator[Mistake]:
    """Yield that queries or keys alone are interleaved for RoPE, or in heads of another size."""
    held: dict[str, Part] = {}
    for part in alignment.parts:
        if (role := role_of(part.theirs)) in ROTATED and part.order is not None:
            held.setdefault(role, part)
    if len(held) < 2 or any(p.order is None for p in held.values()):
        return
    q, k = (held[r].order for r in ROTATED)
    assert q is not None
    assert k is not None
    q_head, k_head = (o.head if o.repeats == 1 else 0 for o in (q, k))
    if (q_head, q.back) == (k_head, k.back):
        return
    one, other = ("q", "k") if q_head and not k_head else ("k", "q")
    order, part = (q if one == "q" else k), held[one]
    count = len(part.index) // order.head
    by_queries = one == "k" and bool(q_head) and count == len(held["q"].index) // q_head
    says = f"its RoPE rows are interleaved{' backwards' * order.back} in {count} heads of {order.head}"
    says += " (the number of query heads)" * by_queries
    beside = held[other].family.general
    beside = f"those of {beside}" if beside != part.family.general else f"those of {held[other].theirs}"
    says += (
        f", {beside} in heads of {q_head}{' backwards' * q.back}" if q_head and k_head else f", and {beside} are not"
    )
    yield Mistake("rows", part.family.general, part.theirs, says)


def turned_alone(alignment: Alignment) -> Iterator[Mistake]:
    """Yield square tensors that lie the other way round than every other projection of the side."""
    ways: dict[bool, list[Part]] = {True: [], False: []}
    for part in alignment.parts:
        tensor = alignment.book.tensors[next((t for t in part.tensors if t is not None), 0)]
        if len(tensor.shape) == 2 and role_of(part.theirs) and part.order is not None and part.share > MOST:
            rows = [a for a in range(len(part.family.shape)) if not part.span[0] <= a < part.span[1]]
            inside = [a for g, a in enumerate(rows, part.family.names.ndim) if g not in part.owners]
            ways[(part.span[0] > min(inside, default=-1)) == (part.axis == 1)].append(part)
    few, many = sorted(ways.values(), key=len)
    square = [p for p in few if len(set(alignment.book.tensors[p.tensors[0] or 0].shape)) == 1]
    if len(many) >= 3 and len(few) == len(square) <= len(many) / 2:
        yield from (
            Mistake("transposed", p.family.general, p.theirs, "it is transposed, and no other projection is")
            for p in few
        )

"""Shapes of score products, and operands drawn for them."""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.numbers.arrays import Array, as_format
from precaudit.numbers.formats import ALIASES
from precaudit.schema.digits import digits

FORMATS = ("bfloat16", "float16", "float32", "int8")
FORM = re.compile(r"(\d+),(\d+),(\d+),(\d+)x(\d+)")
MOST = 1 << 25  # elements of an operand or of the scores: FP64 of each is 256 MiB
DIGITS = 9  # of a size
TERMS = 1 << 34  # multiplications: emulations make them a dozen times


@dataclass(frozen=True)
class ScoreShape:
    """Queries [B, H, Q, D] against keys [B, H, S, D]: scores [B, H, Q, S]."""

    batch: int
    heads: int
    queries: int
    depth: int
    keys: int

    @property
    def text(self) -> str:
        """As it is written: ``B,H,Q,DxS``."""
        return f"{self.batch},{self.heads},{self.queries},{self.depth}x{self.keys}"

    @property
    def queries_shape(self) -> tuple[int, ...]:
        """Of the queries."""
        return self.batch, self.heads, self.queries, self.depth

    @property
    def keys_shape(self) -> tuple[int, ...]:
        """Of the keys."""
        return self.batch, self.heads, self.keys, self.depth

    @property
    def scores(self) -> tuple[int, ...]:
        """Of the result."""
        return self.batch, self.heads, self.queries, self.keys


# One query of one head, one query of many heads (decode), and a prompt (prefill).
DEFAULT = (ScoreShape(1, 1, 1, 128, 512), ScoreShape(8, 8, 1, 128, 1024), ScoreShape(1, 4, 256, 128, 256))


def parse_shape(text: str) -> ScoreShape:
    """Return the shape written ``1,1,1,128x512``; raises UserError for what is none, is empty, or is too large."""
    found = FORM.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UserError(f"--shape {text}: write B,H,Q,DxS, such as 1,1,1,128x512")
    if long := next((x for x in found.groups() if len(x) > DIGITS), None):
        raise UserError(f"--shape {text[:80]}: too large: a size of {len(long)} digits")
    shape = ScoreShape(*map(int, found.groups()))
    if not all((*shape.queries_shape, shape.keys)):
        raise UserError(f"--shape {text}: there is nothing to multiply where a size is 0")
    most = max(prod(shape.queries_shape), prod(shape.keys_shape), prod(shape.scores))
    if most > MOST:
        raise UserError(f"--shape {text}: too large: {digits(most, 2)} elements in one array, of at most {MOST:,}")
    if (terms := prod(shape.scores) * shape.depth) > TERMS:
        raise UserError(f"--shape {text}: too large: {digits(terms, 2)} multiplications, of at most {digits(TERMS, 2)}")
    return shape


def parse_formats(text: str) -> tuple[str, ...]:
    """Return the formats written ``bfloat16,float32``; raises UserError for one that is none of FORMATS."""
    found = []
    for part in filter(None, (x.strip() for x in text.split(","))):
        name = ALIASES.get(part, part)
        if name not in FORMATS:
            raise UserError(f"--formats {part}: unknown format of operands{nearest(part, FORMATS)}")
        found.append(name)
    if not found:
        raise UserError(f"--formats {text!r}: none is named; known: {', '.join(FORMATS)}")
    return tuple(dict.fromkeys(found))


def operands(shape: ScoreShape, form: str, seed: int = 0) -> tuple[Array, Array]:
    """Return queries [B, H, Q, D] and keys [B, H, S, D]: normal, of one seed rounded to a format; int8 uniform."""
    draw = np.random.default_rng(seed)
    pair: Any = (shape.queries_shape, shape.keys_shape)
    if form == "int8":
        q, k = (draw.integers(-127, 128, size, dtype=np.int8) for size in pair)
        return q, k
    q, k = (as_format(draw.standard_normal(size), form) for size in pair)
    return q, k

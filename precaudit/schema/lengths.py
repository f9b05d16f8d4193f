"""How long the sequence was whose call turned a row, for RoPE whose frequencies depend on it (dynamic NTK, LongRoPE).

Published implementations (transformers' ``dynamic_rope_update``) take the frequencies of a call from the longest
position in it, and leave cached keys as they were turned. So prefill of n tokens turns all rows by n, each token
decoded after it by its own position + 1, and prefill over prompt and generated tokens (rescore) all of them by their
number: beyond the original context rescore and decode differ by formula, not by rounding. A batch of one is meant:
other sequences of a batch change nothing here.
"""

from typing import Literal

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.configuration import DecoderConfig

SMALLEST = 64, 256  # lengths that short sequences are padded to
View = Literal["prefill", "rescore"]  # whose lengths: prefill's and decode's, which agree on the rows both have


def view_of(config: DecoderConfig, phase: str, total: int) -> View:
    """Return the view that a phase's rows of a sequence of ``total`` tokens belong to: rescore's where it matters."""
    scaling = config.rope_scaling
    beyond = scaling is not None and scaling.by_length and total > scaling.original
    return "rescore" if phase == "rescore" and beyond else "prefill"


def row_lengths(view: str, prompt: int, total: int, rows: int) -> Array:
    """Return by how many tokens the first rows [rows] of a sequence were turned; ``prompt``, ``total``: its tokens."""
    return np.full(rows, total) if view == "rescore" else np.maximum(np.arange(1, rows + 1), prompt)


def bucket(n: int) -> int:
    """Return the length a sequence of ``n`` is padded to: 64, 256, then steps of an eighth or less.

    Few lengths below 256: every one is some programs more to compile.
    """
    if n <= SMALLEST[-1]:
        return next(size for size in SMALLEST if n <= size)
    step = 128 if n <= 1024 else 1 << (n.bit_length() - 4)
    return -(-n // step) * step


def telling(config: DecoderConfig, lengths: Array | None) -> Array | None:
    """Return lengths as far as they change frequencies; None where none does.

    Those within the original context are all the original context, and LongRoPE knows one length beyond it.
    """
    scaling = config.rope_scaling
    if lengths is None or scaling is None or not scaling.by_length or not np.any(lengths > scaling.original):
        return None
    return np.clip(lengths, scaling.original, None if scaling.kind == "dynamic" else scaling.original + 1)

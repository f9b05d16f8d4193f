"""Number formats: names and unit roundoffs. Imports no numerics: what judges records needs none."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from precaudit.errors import UserError, nearest

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary floating-point format of ``bits``; ``precision`` counts the significand's, the implicit one included."""

    name: str
    precision: int
    bits: int

    @property
    def unit_roundoff(self) -> float:
        """U = 2^-p, the largest relative error of rounding to nearest (Higham 2002, §2.1)."""
        return 2.0**-self.precision

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @cached_property
    def dtype(self) -> "np.dtype[Any]":
        """The NumPy dtype, which ml_dtypes adds where NumPy has none."""
        import ml_dtypes
        import numpy as np

        return np.dtype(getattr(np, self.name, None) or getattr(ml_dtypes, self.name))


FORMATS = {
    f.name: f
    for f in (
        Format("float64", 53, 64),
        Format("float32", 24, 32),
        Format("float16", 11, 16),
        Format("bfloat16", 8, 16),
        Format("float8_e4m3fn", 4, 8),
        Format("float8_e5m2", 3, 8),
    )
}


@dataclass(frozen=True)
class Integers:
    """Symmetric integers of ``bits``, one float32 scale for ``group`` values of the contracted axis (None: all)."""

    name: str
    bits: int
    group: int | None = None

    @property
    def most(self) -> int:
        """The largest value; the smallest is −most: zero is in the middle, and −2^(bits−1) is not used."""
        return 2 ** (self.bits - 1) - 1


INTEGERS = {i.name: i for i in (Integers("int8", 8), Integers("int8/128", 8, 128), Integers("int4/128", 4, 128))}
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
ALIASES = {
    "f64": "float64",
    "fp64": "float64",
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


ACCUMULATIONS = ("float16", "bfloat16", "float32")  # formats that sums are emulated in


def parse_format(text: str) -> Format:
    """Return the format named ``text`` (NumPy name or alias such as ``bf16``); raise UserError otherwise."""
    name = ALIASES.get(text, text)
    if name not in FORMATS:
        raise UserError(f"unknown number format {text!r}{nearest(text, FORMATS)}")
    return FORMATS[name]


def parse_accumulation(text: str) -> tuple[str, int]:
    """Return (format, block) of ``float16`` (every step) or ``float16/128`` (once per 128 terms)."""
    name, slash, size = text.partition("/")
    name = parse_format(name).name
    if name not in ACCUMULATIONS:
        raise UserError(f"--accum {text}: accumulation can be emulated in {', '.join(ACCUMULATIONS)}")
    if slash and (not size.isdigit() or int(size) < 1):
        raise UserError(f"--accum {text}: after the slash comes how many terms a block has, for example float16/128")
    return name, int(size) if slash else 1

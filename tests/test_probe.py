"""Products of scores in every way: their errors against FP64 made here, what they were made of, limits, bad input."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import precaudit
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.probing.emulations import emulations, named, named_integers
from precaudit.probing.limits import parse
from precaudit.probing.measuring import ENOUGH, measure
from precaudit.probing.shapes import FORMATS, Shape, operands, parse_shape
from precaudit.probing.timing import paired, quartiles
from precaudit.probing.ways import ways
from precaudit.records import ProbeRecord, read_lines, value
from precaudit.reports.probe import headline, lines, tables
from tests.tpus import needs_libtpu

DECODE = "1,1,1,128x512"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def exactly(q, k):
    """Scores in FP64, by NumPy's own widening."""
    return np.einsum("bhqd,bhsd->bhqs", np.asarray(q).astype(np.float64), np.asarray(k).astype(np.float64))


def cut(x, bits):
    """Return float64 values of float32 to so many significant bits, to nearest even: by scaling, not by bits."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(np.where(x == 0, 1.0, x)))) - bits + 1)
    return np.round(x / scale) * scale


def in_passes(q, k, count):
    """Scores of bfloat16 parts, as JAX's documentation has the products of one, three and six passes."""
    parts = []
    for x in (q.astype(np.float64), k.astype(np.float64)):
        high = cut(x, 8)
        middle = cut(x - high, 8)
        parts.append((high, middle, cut(x - high - middle, 8)))
    pairs = [(i, j) for i in range(3) for j in range(3) if i + j < {1: 1, 3: 2, 6: 3}[count]]
    return sum(exactly(parts[0][i], parts[1][j]) for i, j in pairs)


@pytest.fixture(scope="module")
def probed():
    return precaudit.probe([DECODE], timed=False, device="cpu")


def of(probed, form, way):
    return next(r for r in probed.records if (r.phase, r.way) == (form, way) and r.target is None)

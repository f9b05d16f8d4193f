"""What transformers and the FP64 textbook make of the fixtures, and how far that is apart."""

import numpy as np
from safetensors.numpy import load_file

from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from tests.helpers.paths import FIXTURES


def expected(name):
    return load_file(FIXTURES / "expected" / f"{name}.safetensors")


def reference(checkpoint, tokens, lengths=None):
    """Return (hidden [L+1, T, D], logits [T, V]) of the NumPy decoder."""
    found = {}
    rows = np.arange(len(tokens))
    forward(
        Model(checkpoint.config, checkpoint.tensors.read_tensor),
        Sequences([tokens], None if lengths is None else [lengths]),
        [FP64],
        Wanted({"resid_in", "resid_out", "logits"}, None, [rows]),
        lambda _i, layer, point, values: found.__setitem__((layer, point), values),
    )
    last = checkpoint.config.layers - 1
    hidden = [found[i, "resid_in"] for i in range(last + 1)] + [found[last, "resid_out"]]
    return np.stack(hidden), found[None, "logits"]


def relative(x, y):
    return np.abs(x - y).max() / np.abs(y).max()

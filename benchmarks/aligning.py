"""Time the alignment of a stacked tree with the tensors it is made of, and what memory it takes beside both.

Llama-shaped tensors in bfloat16, RoPE rows interleaved in the tree, are read from a folder of their own, written first.
Run: python -m benchmarks.aligning [--parameters 0.5e9]
"""

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import ml_dtypes
import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.workflows.alignment import align

SECONDS, WHOLE = 60.0, 1.5e9  # for as many parameters on each side
HEAD, VOCAB = 64, 32_000
MEMORY = 2.0  # times the larger tensor, beside both sides, which are mapped


def tensors(count: float) -> Iterator[tuple[str, Array]]:
    """Yield tensors of about as many parameters, by Hugging Face name."""
    layers = 16
    width = int(sqrt(count / layers / 13)) // 128 * 128
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    yield "model.embed_tokens.weight", drawn(VOCAB, width)
    for i in range(layers):
        for name in ("q", "k", "v", "o"):
            yield f"model.layers.{i}.self_attn.{name}_proj.weight", drawn(width, width)
        for name in ("gate", "up"):
            yield f"model.layers.{i}.mlp.{name}_proj.weight", drawn(3 * width, width)
        yield f"model.layers.{i}.mlp.down_proj.weight", drawn(width, 3 * width)
        yield f"model.layers.{i}.input_layernorm.weight", drawn(width)


def write_tree(held: dict[str, Array], folder: Path) -> dict[str, Array]:
    """Write the tensors stacked over layers, [in, out], and return them mapped from their files."""
    stacked: dict[str, list[Array]] = {}
    for name, x in held.items():
        parts = name.split(".")
        turned = (
            x.reshape(-1, 2, HEAD // 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
            if parts[-2] in ("q_proj", "k_proj")
            else x
        )
        stacked.setdefault(parts[-2], []).append(turned.T)
    found = {}
    for name, each in stacked.items():
        path = folder / f"{name}.npy"
        np.save(path, np.stack(each).view(np.uint16))
        found[name] = np.load(path, mmap_mode="r").view(ml_dtypes.bfloat16)
    return found


def main() -> int:
    """Print seconds and memory; return 1 where either is over its bound, or something was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=0.5e9, help="of each side")
    count = parser.parse_args().parameters
    with tempfile.TemporaryDirectory() as name:
        held = {}
        for key, x in tensors(count):
            path = Path(name) / f"{key}.npy"
            np.save(path, x.view(np.uint16))
            held[key] = np.load(path, mmap_mode="r").view(ml_dtypes.bfloat16)
        tree = write_tree(held, Path(name))
        size, largest = sum(x.size for x in held.values()), max(x.nbytes for x in tree.values())
        start = time.perf_counter()
        found = align(tree, held)
        seconds = time.perf_counter() - start
        tracemalloc.start()  # takes time of its own
        align(tree, held)
        peak = tracemalloc.get_traced_memory()[1]
        right = not found.mistakes and all(p.found == 1 for p in found.parts)
    bound = SECONDS * size / WHOLE
    print(f"{size / 1e9:.2f} B parameters on each side: {seconds:.1f} s (bound {bound:.0f} s), all found: {right}")
    print(f"{peak / 1e6:.0f} MB of arrays at most (bound {MEMORY * largest / 1e6:.0f}), beside what both sides hold")
    return int(seconds > bound or peak > MEMORY * largest or not right)


if __name__ == "__main__":
    sys.exit(main())

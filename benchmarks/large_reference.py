"""FP64 reference of a model of 8 B parameters' layer shapes, with fewer layers: peak memory, and the time said before.

Weights are random bfloat16, written to a temporary folder (3.8 GB with 4 layers). Pages of the file that are in memory
count. Run: python -m benchmarks.large_reference
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.main_job import Line, show
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs import from_config_json, model_tensors
from precaudit.models.numpy_decoder.forward import Wanted, forward, seconds_for
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64

TOKENS = 1000
SHAPE = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, raw: dict[str, Any]) -> None:
    """Write a configuration and a safetensors file of random weights."""
    (folder / "config.json").write_text(json.dumps(raw))
    base = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32).astype(ml_dtypes.bfloat16)
    tensors = {}
    for name, shape in model_tensors(from_config_json(raw, "benchmark")).items():
        norm = name.endswith("norm.weight")
        size = np.float32(0.1 if norm else shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)
        tensors[name] = np.resize(base * size + base.dtype.type(norm), shape)
    save_file(tensors, folder / "model.safetensors")


def child(folder: str) -> None:
    """Print the seconds said beforehand and taken, and the peak memory of this process in bytes."""
    checkpoint = open_checkpoint(folder)
    said = seconds_for(checkpoint.config, TOKENS)
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], TOKENS)
    wanted = Wanted({"q", "k", "v", "attn_out", "logits"}, None, [np.asarray([TOKENS - 1])])
    began = time.perf_counter()
    forward(Model(checkpoint.config, checkpoint.tensors.read_tensor), [tokens], [FP64], wanted, lambda *_place: None)
    took = time.perf_counter() - began
    print(json.dumps([said, took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPE | {"num_hidden_layers": given.layers}
        writing = f"from benchmarks.large_reference import *; write(Path({folder!r}), {shape!r})"
        subprocess.run([sys.executable, "-c", writing], check=True)  # this process stays small
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.large_reference", "--child", folder],
            check=True,
            capture_output=True,
            text=True,
        )
        said, took, peak = json.loads(done.stdout)
        size = (Path(folder) / "model.safetensors").stat().st_size
    note = f"{given.layers} layers, {size / 1e9:.1f} GB of weights, {TOKENS} tokens"
    show(
        [
            Line("FP64 reference of 8 B shapes, peak memory", peak / 2**30, "GiB", 8.0, note=note),
            Line("  time taken / said beforehand", took / said, "x", note=f"{took:.0f} s : {said:.0f} s"),
        ]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

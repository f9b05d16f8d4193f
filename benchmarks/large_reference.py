"""FP64 reference of a model of 8 B parameters' shapes from disk: peak memory, and its time against two limits.

The limits: reading the file once, from a disk whose cache was dropped, and DGEMM's rate, measured right before and
after. Weights are random bfloat16, in shards of 5 GB as they are published, in a temporary folder ($TMPDIR) that is
deleted: 16.1 GB with the 32 layers of the whole model, 3.9 GB with 4 layers, as `make bench` runs it. Pages of files
that are in memory count. Run: python -m benchmarks.large_reference --layers 32
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.main_job import Line, show
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs import DecoderConfig, from_config_json, model_tensors
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward, seconds_for
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.threads import WORKERS, each, one_blas_thread

PROMPTS, TOKENS, SHARD = 2, 64, 5_000_000_000
SHAPE = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, raw: dict[str, Any]) -> None:
    """Write a configuration and safetensors files of random weights: one, or shards and their index."""
    (folder / "config.json").write_text(json.dumps(raw))
    base = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32).astype(ml_dtypes.bfloat16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    shapes = model_tensors(from_config_json(raw, "benchmark"))
    for name, shape in shapes.items():
        if sum(2 * prod(s) for s in shards[-1].values()) + 2 * prod(shape) > SHARD:
            shards.append({})
        shards[-1][name] = shape
    where = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name, shape in shard.items():
            norm = name.endswith("norm.weight")
            size = np.float32(0.1 if norm else shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)
            tensors[name] = np.resize(base * size + base.dtype.type(norm), shape)
            where[name] = file
        save_file(tensors, folder / file)
    if len(shards) > 1:
        total = sum(2 * prod(shape) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of the files in memory."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading(folder: Path) -> float:
    """Return how many seconds it takes to read the files once, from the disk."""
    forget(folder)
    began = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as f:
            while f.read(1 << 24):
                pass
    return time.perf_counter() - began


def dgemm_rate() -> float:
    """Return the rate of one large FP64 product on each core, in FLOP/s; the best of three."""
    x, took = np.ones((1024, 1024)), []
    with one_blas_thread():
        for _ in range(3):
            began = time.perf_counter()
            each(lambda: x @ x, [()] * WORKERS)
            took.append(time.perf_counter() - began)
    return WORKERS * 2 * len(x) ** 3 / min(took)


def flops_of(config: DecoderConfig, tokens: int, rows: int) -> float:
    """Return the operations of the products of all layers for so many tokens, and of the head for some rows."""
    shapes = model_tensors(config)
    layers = sum(prod(shape) for name, shape in shapes.items() if name.startswith("model.layers."))
    return 2.0 * (layers * tokens + config.vocab * config.width * rows)


def child(folder: str, prompts: int, tokens: int) -> None:
    """Print the seconds said beforehand and taken, the rate of DGEMM, operations, and this process's peak memory."""
    checkpoint = open_checkpoint(folder)
    said = seconds_for(checkpoint.config, prompts * tokens)
    rng = np.random.default_rng(1)
    sequences = Sequences([rng.integers(0, SHAPE["vocab_size"], tokens) for _ in range(prompts)])
    wanted = Wanted({"q", "k", "v", "attn_out", "logits"}, None, [np.asarray([tokens - 1])] * prompts)
    before = dgemm_rate()
    forget(Path(folder))
    began = time.perf_counter()
    forward(Model(checkpoint.config, checkpoint.tensors.read_tensor), sequences, [FP64], wanted, lambda *_place: None)
    took = time.perf_counter() - began
    rate = (before + dgemm_rate()) / 2
    flops = flops_of(checkpoint.config, prompts * tokens, prompts)
    print(json.dumps([said, took, rate, flops, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the model; 32 are all of an 8 B")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each prompt")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.prompts, given.tokens)
        return 0
    shape = SHAPE | {"num_hidden_layers": given.layers}
    needed = sum(2 * prod(s) for s in model_tensors(from_config_json(shape, "benchmark")).values())
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < needed + (2 << 30):
            parser.error(f"{folder} has no room for {needed / 1e9:.1f} GB; give fewer --layers, or another $TMPDIR")
        writing = f"from benchmarks.large_reference import *; write(Path({folder!r}), {shape!r})"
        subprocess.run([sys.executable, "-c", writing], check=True)  # this process stays small
        once = reading(Path(folder))
        sizes = ["--prompts", str(given.prompts), "--tokens", str(given.tokens)]
        command = [sys.executable, "-m", "benchmarks.large_reference", "--child", folder, *sizes]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        said, took, rate, flops, peak = json.loads(done.stdout)
        files = list(Path(folder).glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
    note = f"{given.layers} layers, {size / 1e9:.1f} GB in {len(files)} files, {given.prompts} x {given.tokens} tokens"
    both = f"{took:.0f} s : {once:.0f} s, {size / once / 1e9:.2f} GB/s"
    limit = f"{flops / 1e9:.0f} GFLOP at {rate / 1e9:.0f} GFLOP/s would take {flops / rate:.0f} s"
    show(
        [
            Line("FP64 reference of 8 B shapes, peak memory", peak / 2**30, "GiB", 8.0, note=note),
            Line("  time / reading the files once", took / once, "x", note=both),
            Line("  time / DGEMM", took * rate / flops, "x", note=limit),
            Line("  time taken / said beforehand", took / said, "x", note=f"{took:.0f} s : {said:.0f} s"),
        ]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

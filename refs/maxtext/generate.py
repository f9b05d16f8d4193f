"""Trees that MaxText wrote, of tiny random Llamas, with the logits it makes of them.

    python refs/maxtext/generate.py FOLDER    write every tree into FOLDER, and SHA256SUMS

``<name>/items`` is the Orbax checkpoint as MaxText's own ``save_params_to_path`` writes it (bfloat16 weights),
``logits.safetensors`` what its model computes in float32 with products in full precision. config.json says in
Hugging Face's fields what MaxText was told; names.toml is what a user writes.

Needs Python 3.12 and maxtext 0.2.5 (``pip install --no-deps maxtext==0.2.5``, then what its imports ask for).
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils
from safetensors.numpy import save_file

BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
SIZES = {
    "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 8, "base_mlp_dim": 48,
    "base_num_decoder_layers": 2, "vocab_size": 64,
}  # fmt: skip
EXACTLY = ["dtype=float32", "weight_dtype=bfloat16", "matmul_precision=highest", "attention=dot_product"]
OTHERS = [
    "run_name=fixture", "skip_jax_distributed_system=true", "enable_checkpointing=false", "decoder_block=llama2",
    'mlp_activations=["silu","linear"]', "logits_via_embedding=false", "rope_max_timescale=500000",
    "normalization_layer_epsilon=1e-5", "max_target_length=70", "per_device_batch_size=1",
]  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
# maxtext/layers/embeddings.py, LLaMARotaryEmbedding._apply_scaling_factor: constants of its own
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0}
STRETCHED = ["rope_factor=4", "max_position_embeddings=128", "original_max_position_embeddings=32"]
# what MaxText is told, rope_scaling, what names.toml says of RoPE
TREES: dict[str, tuple[list[str], dict[str, Any] | None, str]] = {
    "default": (["rope_type=default"], None, ""),
    "default-unscanned": (["rope_type=default", "scan_layers=false"], None, ""),
    "llama3.1": (["rope_type=llama3.1"], LLAMA3, ""),
    "llama3.1-unscanned": (["rope_type=llama3.1", "scan_layers=false"], LLAMA3, ""),
    "llama3.1-unscaled": (["rope_type=llama3.1", "rope_use_scale=false"], None, "interleaved"),
    "yarn": (["rope_type=yarn", "rope_interleave=true", *STRETCHED], YARN, "interleaved"),
    "yarn-halves": (["rope_type=yarn", "rope_interleave=false", *STRETCHED], YARN, "halves"),
}
TOKENS = np.arange(70, dtype=np.int32) * 7 % 64


def write(folder: Path, told: list[str], scaling: dict[str, Any] | None, rope: str) -> None:
    sizes = [f"{key}={size}" for key, size in SIZES.items()]
    config = pyconfig.initialize(["", str(BASE), *sizes, *EXACTLY, *OTHERS, *told])
    model = model_creation_utils.from_config(config, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(spread, params)
    model = nnx.merge(graph, params, rest)
    tokens, positions = TOKENS[None], np.arange(len(TOKENS), dtype=np.int32)[None]
    logits = model(tokens, positions, decoder_segment_ids=np.ones_like(tokens), enable_dropout=False)
    tree = train_state_nnx.to_linen_checkpoint_dict({"model": params.to_pure_dict()})
    checkpointing.save_params_to_path(folder.resolve(), tree["params"])
    save_file({"tokens": TOKENS, "logits": np.asarray(logits[0], np.float32)}, folder / "logits.safetensors")
    raw = CONFIG | ({"rope_scaling": scaling} if scaling else {})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    layout = "maxtext-llama" + ("-unscanned" if "scan_layers=false" in told else "")
    chosen = f'rope = "{rope}"\n' if rope else ""
    (folder / "names.toml").write_text(f'checkpoint = "items"\nlayout = "{layout}"\n{chosen}')


def spread(x: jax.Array) -> jax.Array:
    """Norm weights start as ones, which no layer can be told by; others stay as they were drawn."""
    size = jnp.arange(x.size).reshape(x.shape) % 11
    return jnp.where(x == 1, 0.75 + size / 16, x).astype(x.dtype)


def main() -> None:
    root = Path(sys.argv[1])
    for name, given in TREES.items():
        write(root / name, *given)
    paths = sorted(p for p in root.glob("*/**/*") if p.is_file())
    lines = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(root).as_posix()}\n" for p in paths)
    (root / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()

"""MaxText's own pre-training entry on a small random decoder and synthetic data: three steps in bfloat16."""

import os
import tempfile
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import maxtext
from absl import app
from maxtext.trainers.pre_train import train

SMALL = (
    "run_name=small", "hardware=cpu", "dataset_type=synthetic", "enable_checkpointing=False", "steps=3",
    "per_device_batch_size=2", "max_target_length=32", "base_num_decoder_layers=2", "base_emb_dim=64",
    "base_mlp_dim=128", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=16", "vocab_size=128",
    "attention=dot_product", "skip_jax_distributed_system=True", "log_config=False",
)  # fmt: skip

if __name__ == "__main__":
    config = Path(maxtext.__path__[0]) / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder:
        app.run(train.main, ["train", str(config), f"base_output_directory={folder}", *SMALL])

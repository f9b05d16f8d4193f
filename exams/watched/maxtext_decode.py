"""MaxText's engine on a small random decoder: a prompt is read, inserted, and six tokens are made."""

import os
import tempfile
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import jax
import jax.numpy as jnp
import maxtext
from maxtext.configs import pyconfig
from maxtext.inference.maxengine import maxengine

SMALL = (
    "run_name=small", "hardware=cpu", "per_device_batch_size=1", "max_prefill_predict_length=16",
    "max_target_length=32", "base_num_decoder_layers=2", "base_emb_dim=64", "base_mlp_dim=128",
    "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=16", "vocab_size=128", "attention=dot_product",
    "skip_jax_distributed_system=True", "log_config=False", "enable_checkpointing=False",
    "decode_sampling_strategy=greedy",
)  # fmt: skip


def register_tokens():
    """Make a pytree of what stands for JetStream's tokens, whose release on the package index MaxText does not take."""
    tokens = maxengine.engine_api.ResultTokens
    names = ("data", "log_prob", "tokens_idx", "valid_idx", "length_idx", "samples_per_slot")

    def split(x):
        return (x.data, x.log_prob), tuple(getattr(x, n) for n in names[2:])

    def join(aux, leaves):
        return tokens(**dict(zip(names, (*leaves, *aux), strict=True)))

    jax.tree_util.register_pytree_node(tokens, split, join)


def main():
    register_tokens()
    path = Path(maxtext.__path__[0]) / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder:
        config = pyconfig.initialize(["decode", str(path), f"base_output_directory={folder}", *SMALL])
    engine = maxengine.MaxEngine(config)
    keys = jax.random.split(jax.random.PRNGKey(0), 9)
    params = engine.load_params(keys[0])
    prompt = jnp.zeros(16, jnp.int32).at[:5].set(jnp.asarray([1, 17, 5, 9, 30]))
    prefix, _ = engine.prefill(params=params, padded_tokens=prompt, true_length=5, rng=keys[1])
    state = engine.insert(prefix, engine.init_decode_state(keys[2]), slot=0)
    said = []
    for key in keys[3:]:
        state, tokens = engine.generate(params, state, rng=key)
        said.append(int(tokens.data[0, 0]))
    print("generated", said)


if __name__ == "__main__":
    main()

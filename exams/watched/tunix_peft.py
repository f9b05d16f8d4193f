"""google-tunix's PeftTrainer on a small random Llama 3: a few steps of supervised training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

SMALL = {"num_layers": 2, "vocab_size": 128, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16,
         "num_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 10_000}  # fmt: skip


def batches(n):
    draw = np.random.default_rng(0)
    for _ in range(n):
        yield TrainingInput(input_tokens=draw.integers(1, 128, (4, 16)), input_mask=np.ones((4, 16), bool))


def model_inputs(x):
    seen = jnp.tril(jnp.ones((1, 16, 16), bool))
    return {"input_tokens": x.input_tokens, "input_mask": x.input_mask, "positions": jnp.arange(16)[None],
            "attention_mask": seen.repeat(4, 0)}  # fmt: skip


def main():
    llama = model.Llama3(model.ModelConfig(**SMALL), rngs=nnx.Rngs(0))
    trainer = PeftTrainer(llama, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100, max_steps=4))
    trainer.with_gen_model_input_fn(model_inputs).train(batches(4))
    print(f"{trainer.train_steps} steps on {jax.device_count()} device")


if __name__ == "__main__":
    main()

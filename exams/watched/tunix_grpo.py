"""google-tunix's GRPO on a small random Llama 3: rollouts by its own sampler, rewards, and the learner's steps."""

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

SMALL = {"num_layers": 2, "vocab_size": 128, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16,
         "num_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 10_000}  # fmt: skip


class Bytes:
    """A tokenizer of one token a character."""

    def encode(self, text, **_):
        return [2 + ord(c) % 120 for c in text]

    def decode(self, ids, **_):
        return "".join(chr(97 + int(i) % 26) for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 127

    def pad_id(self):
        return 0


def reward(completions, **_):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def main():
    llama, reference = (model.Llama3(model.ModelConfig(**SMALL), rngs=nnx.Rngs(0)) for _ in range(2))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training = rl_cluster.RLTrainingConfig(actor_optimizer=optax.adamw(1e-3), eval_every_n_steps=100, max_steps=3)
    rollout = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=16, kv_cache_size=32, temperature=1.0)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=llama, reference=reference, tokenizer=Bytes(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), training_config=training, rollout_config=rollout
        ),
    )  # fmt: skip
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=4, beta=0.04), reward_fns=reward)
    with mesh:
        learner.train([{"prompts": np.array(["count to three", "say yes"])}] * 3)
    print(f"{cluster.global_steps} steps")


if __name__ == "__main__":
    main()

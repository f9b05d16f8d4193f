"""A sharded Flax NNX script that knows nothing of precaudit: batches over one axis of a mesh, weights over another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, HIDDEN, BATCH = 32, 64, 16


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


@nnx.jit
def train_step(model, optimiser, x, y):
    def loss_of(model):
        return jnp.mean((model(x) - y).astype(jnp.float32) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimiser.update(model, gradients)
    return loss


def main():
    mesh = Mesh(np.asarray(jax.devices()).reshape(-1, 2), ("data", "model"))
    model = Mlp(nnx.Rngs(0))
    for layer, spec in ((model.up, PartitionSpec(None, "model")), (model.down, PartitionSpec("model", None))):
        layer.kernel[...] = jax.device_put(layer.kernel[...], NamedSharding(mesh, spec))
    optimiser = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    over = NamedSharding(mesh, PartitionSpec("data", None))
    for step in range(4):
        x = jax.device_put(jax.random.normal(jax.random.key(step), (BATCH, WIDTH)), over)
        print(f"step {step}: loss {float(train_step(model, optimiser, x, jnp.roll(x, 1, axis=1))):.4f}")
    print(f"{jax.device_count()} devices")


if __name__ == "__main__":
    main()

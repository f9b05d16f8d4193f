"""An optax script that knows nothing of precaudit: an epoch is one scan of clipped, scheduled steps of a classifier."""

import jax
import jax.numpy as jnp
import optax

FEATURES, CLASSES, BATCH, STEPS = 32, 10, 16, 8


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return optax.losses.softmax_cross_entropy_with_integer_labels(hidden @ params["down"], y).mean()


def main():
    up, down, data, labels = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(up, (FEATURES, 64)) / FEATURES**0.5,
        "bias": jnp.zeros(64),
        "down": jax.random.normal(down, (64, CLASSES)) / 8,
    }
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, 1e-2, 4, 3 * STEPS)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))
    x = jax.random.normal(data, (STEPS, BATCH, FEATURES))
    y = jax.random.randint(labels, (STEPS, BATCH), 0, CLASSES)

    @jax.jit
    def epoch(params, state, x, y):
        def step(carry, batch):
            params, state = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
            updates, state = optimiser.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (params, state), losses = jax.lax.scan(step, (params, state), (x, y))
        return params, state, losses

    state = optimiser.init(params)
    for n in range(3):
        params, state, losses = epoch(params, state, x, y)
        print(f"epoch {n}: loss {float(losses.mean()):.4f}")


if __name__ == "__main__":
    main()

"""An optax script that knows nothing of precaudit: L-BFGS with its zoom line search, a loop inside every step."""

import jax
import jax.numpy as jnp
import optax


def loss_of(w, x, y):
    return jnp.mean(optax.losses.sigmoid_binary_cross_entropy(x @ w, y)) + 1e-3 * jnp.sum(w * w)


def main():
    data, truth = jax.random.split(jax.random.key(0))
    x = jax.random.normal(data, (64, 16))
    y = (x @ jax.random.normal(truth, (16,)) > 0).astype(jnp.float32)
    solver = optax.lbfgs(memory_size=4)

    @jax.jit
    def step(w, state):
        def value(w):
            return loss_of(w, x, y)

        loss, gradient = optax.value_and_grad_from_state(value)(w, state=state)
        updates, state = solver.update(gradient, state, w, value=loss, grad=gradient, value_fn=value)
        return optax.apply_updates(w, updates), state, loss

    w = jnp.zeros(16)
    state = solver.init(w)
    for n in range(6):
        w, state, loss = step(w, state)
        print(f"step {n}: loss {float(loss):.5f}")


if __name__ == "__main__":
    main()

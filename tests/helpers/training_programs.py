"""Training programs of one network, as a file each: Adam or momentum, and what may be wrong with either."""

ADAM = '''\
"""A classifier trained by Adam."""

import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

FORMAT, MOMENTS = jnp.{format}, jnp.{moments}
EPSILON, SCALE, SECOND, RATE, LATE, LATE_RATE = {epsilon}, {scale}, {second}, {rate}, {late}, {late_rate}
CORRECTS, TURNED = {corrects}, {turned}
DRAW = np.random.default_rng({seed})


def drawn(*shape):
    return jnp.asarray(DRAW.standard_normal(shape) / np.sqrt(shape[0]), FORMAT)


def loss_of(params, x, y):
    if TURNED:
        x = x[:, ::-1]
    first = params["first"][::-1] if TURNED else params["first"]
    hidden = jnp.tanh(x @ first + params["bias"])
    logits = jnp.dot(hidden, params["second"], preferred_element_type=jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def step(data, state, count):
    params, mu, nu = state["params"], state["mu"], state["nu"]
    x, y = data["x"][count % len(data["x"])], data["y"][count % len(data["y"])]
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * SCALE, gradients)
    mu, nu = jax.tree.map(lambda x: x.astype(jnp.float32), (mu, nu))
    mu = jax.tree.map(lambda m, g: (0.9 * m + 0.1 * g).astype(MOMENTS), mu, gradients)
    nu = jax.tree.map(lambda v, g: (SECOND * v + (1 - SECOND) * g * g).astype(MOMENTS), nu, gradients)
    t = (count + 1).astype(jnp.float32)
    rate = jnp.where(t >= LATE, jnp.float32(LATE_RATE), jnp.float32(RATE))
    down = 1 - 0.9**t if CORRECTS else 1.0
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (mu, nu))
    update = jax.tree.map(lambda m, v: m / down / (jnp.sqrt(v / (1 - SECOND**t)) + EPSILON), *wide)
    params = jax.tree.map(lambda p, u: (p.astype(jnp.float32) - rate * u).astype(FORMAT), params, update)
    return {{"params": params, "mu": mu, "nu": nu}}, loss


params = {{"first": drawn(32, 48), "bias": jnp.zeros(48, FORMAT), "second": drawn(48, 10)}}
zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, MOMENTS), params)
data = {{"x": drawn(4, 24, 32), "y": jnp.asarray(DRAW.integers(0, 10, (4, 24)))}}
program = Program(
    call=step,
    params=data,
    cases={{"a": ({{"params": params, "mu": zeros, "nu": zeros}}, jnp.int32(0))}},
    steps=3,
    advance=lambda inputs, outputs: (outputs[0], inputs[1] + 1),
    outputs=("state", "loss"),
)
'''
USUAL = {
    "format": "float32", "moments": "float32", "epsilon": 1e-8, "scale": 1.0, "second": 0.999, "rate": 1e-2,
    "late": 10**6, "late_rate": 1e-2, "corrects": True, "turned": False, "seed": 0,
}  # fmt: skip


def adam(path, **changed):
    """Write a program that trains by Adam, some of it changed, and return its reference."""
    path.write_text(ADAM.format(**{**USUAL, **changed}))
    return f"{path}:program"


MOMENTUM = '''\
"""Regression by a network of sines and gradient descent with momentum: chaotic at a high rate."""

import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

DRAW = np.random.default_rng(1)
shapes = {{"a": (8, 32), "b": (32, 32), "c": (32, 4)}}


def drawn(*shape):
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


def loss_of(w, x, y):
    return jnp.mean((jnp.sin(jnp.sin(x @ w["a"]) @ w["b"]) @ w["c"] - y) ** 2)


def step(data, w, velocity):
    x, y = (d[::-1] for d in data) if {turned} else data
    loss, gradients = jax.value_and_grad(loss_of)(w, x, y)
    velocity = jax.tree.map(lambda v, g: {momentum} * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - {rate} * v, w, velocity), velocity, loss


data = drawn(40, 8), drawn(40, 4)
w = {{name: drawn(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()}}
program = Program(
    step, data, {{"a": (w, jax.tree.map(jnp.zeros_like, w))}}, 3, lambda _, out: out[:2], ("w", "velocity", "loss")
)
'''


def momentum(path, **changed):
    """Write a program that trains with momentum, some of it changed, and return its reference."""
    path.write_text(MOMENTUM.format(**{"turned": False, "momentum": 0.9, "rate": 0.3, **changed}))
    return f"{path}:program"

"""A training step under audit: the gradients of a small network in bfloat16, and what they change.

precaudit trace examples/training_step.py:program -o runs/step && precaudit compare runs/step
"""

import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

RATE = 0.01


def loss(params, inputs, labels):
    hidden = jax.nn.gelu(inputs @ params["first"] + params["bias"])
    second = jax.nn.relu(hidden @ params["second"])
    logits = jnp.dot(second, params["third"], preferred_element_type=jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def training_step(params, inputs, labels):
    gradients = jax.grad(loss)(params, inputs, labels)
    return jax.tree.map(lambda p, g: p - jnp.asarray(RATE, p.dtype) * g, params, gradients)


def drawn(*shape):
    return jnp.asarray(DRAW.standard_normal(shape) / np.sqrt(shape[0]), jnp.bfloat16)


DRAW = np.random.default_rng(0)
program = Program(
    call=training_step,
    params={"first": drawn(32, 64), "bias": drawn(64), "second": drawn(64, 64), "third": drawn(64, 10)},
    cases={"batch": (drawn(24, 32), jnp.asarray(DRAW.integers(0, 10, 24), jnp.int32))},
)

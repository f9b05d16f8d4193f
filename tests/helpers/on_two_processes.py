"""Programs over all devices, of one process or of several. PORT, NUMBER: this file starts JAX of two by itself."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precaudit import Program

if "PORT" in os.environ:
    jax.distributed.initialize(f"localhost:{os.environ['PORT']}", 2, int(os.environ["NUMBER"]))
MESH = Mesh(np.array(jax.devices()), "d")
ROWS, EACH = NamedSharding(MESH, PartitionSpec("d")), NamedSharding(MESH, PartitionSpec())
W = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def placed(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def drawn(seed):
    return np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32).astype(jnp.bfloat16)


def call(w, x):
    """A scan of two layers; the weight's rows, over which a product adds up, lie on all devices."""

    def layer(h, _):
        return h + jnp.tanh(h @ w) @ w.T, None

    h = jax.lax.scan(layer, x, None, length=2)[0]
    return h, h.astype(jnp.float32) ** 2


cases = {"a": (placed(drawn(1), ROWS),), "b": (placed(drawn(2), ROWS),)}
program = Program(
    call,
    placed(W.astype(jnp.bfloat16), ROWS),
    cases,
    steps=1,
    advance=lambda _, out: (out[0],),
    outputs=("h", "squares"),
)

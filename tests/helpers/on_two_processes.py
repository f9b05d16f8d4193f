"""Programs of two processes, one device each, that a user names; PORT and NUMBER say which process this is."""

import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precaudit import Program

jax.distributed.initialize(f"localhost:{os.environ['PORT']}", 2, int(os.environ["NUMBER"]))
MESH = Mesh(np.array(jax.devices()), "d")
ROWS, EACH = NamedSharding(MESH, PartitionSpec("d")), NamedSharding(MESH, PartitionSpec())
X, W = np.arange(32, dtype=np.float32).reshape(4, 8) / 8, np.ones((8, 3), np.float32)


def placed(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def program_on(given, made):
    """Return a program of inputs and results placed so."""

    def call(w, x):
        product = jax.lax.with_sharding_constraint(x @ w, made)
        return product.sum()

    return Program(call, placed(W, EACH), {"a": (placed(X, given),)})


inputs, points, whole = program_on(ROWS, ROWS), program_on(EACH, ROWS), program_on(EACH, EACH)

"""What reap gives on four devices, as one line of JSON; test_reap.py runs this under several hash seeds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precaudit.interpreters.jaxpr import reap

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
GRID = PartitionSpec("rows", "columns")
X = jnp.arange(16.0).reshape(4, 4)


def shards():
    f = jax.shard_map(lambda y: tap(y * 1, "shard"), mesh=MESH, in_specs=GRID, out_specs=GRID)
    return np.asarray(jax.jit(reap(f))(X)[1]["shard"]).tolist()


def in_a_branch():
    def each(y):
        return lax.cond(y.sum() > 30, lambda v: tap(v * 2, "large"), lambda v: v, y)

    f = jax.shard_map(each, mesh=MESH, in_specs=GRID, out_specs=GRID)
    taps = jax.jit(reap(f))(X)[1]
    return np.asarray(taps["large@taken"]).tolist(), np.asarray(taps["large"]).tolist()


def in_loops():
    def each(y):
        y = lax.scan(lambda c, _: (tap(c + 1, "scan"), None), y, None, length=2)[0]
        return lax.while_loop(lambda c: c.sum() < 40, lambda c: tap(c * 2, "while"), y)

    f = jax.shard_map(each, mesh=MESH, in_specs=GRID, out_specs=GRID)
    taps = jax.jit(reap(f))(X)[1]
    return np.asarray(taps["scan"]).tolist(), np.asarray(taps["while@taken"]).tolist()


def shardings():
    """Return whether an inner jit's output lies where it says, and how many places the compiler is told."""
    rows = NamedSharding(MESH, PartitionSpec("rows"))
    placed = NamedSharding(MESH, GRID)
    inner = jax.jit(lambda x: tap(x * 2, "inner") + 1, in_shardings=rows, out_shardings=placed)
    texts = [jax.jit(f).lower(X).as_text() for f in (reap(lambda x: inner(x) * 1), lambda x: inner(x) * 1)]
    told = [t.count("sdy.sharding_constraint") + t.count("@Sharding") for t in texts]
    return reap(inner)(X)[0].sharding == placed, inner(X).sharding == placed, *told


if __name__ == "__main__":
    print(json.dumps({f.__name__: f() for f in (shards, in_a_branch, in_loops, shardings)}))

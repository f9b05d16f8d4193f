import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import precaudit

M = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
g = np.random.default_rng(0)


def put(a, *s):
    return jax.device_put(jnp.asarray(a, jnp.bfloat16), NamedSharding(M, P(*s)))


x = put(g.standard_normal((4, 12, 64)), "data", None, None)
up = put(g.standard_normal((64, 128)) / 8, None, "model")
down = put(g.standard_normal((128, 64)) / 11, "model", None)


def call(p, x):
    up, down = p
    hidden = jax.nn.silu(x @ up)
    mlp = hidden @ down
    return x + mlp


program = precaudit.Program(call=call, params=(up, down), cases={"a": (x,)}, outputs="logits")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import precaudit

M = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
jax.set_mesh(M)
g = np.random.default_rng(0)
x = jax.device_put(jnp.asarray(g.standard_normal((8, 16)), jnp.bfloat16), NamedSharding(M, P("data", None)))
w = jax.device_put(jnp.asarray(g.standard_normal((16, 32)), jnp.bfloat16), NamedSharding(M, P(None, "model")))


def call(w, x):
    hidden = x @ w
    return jax.nn.relu(hidden)


program = precaudit.Program(call=call, params=w, cases={"a": (x,)}, outputs="logits")


def call2(w, x):
    hidden = x @ w
    kept = jnp.where(jnp.ones((8, 32), bool), hidden, 0)
    return kept * 2


program2 = precaudit.Program(call=call2, params=w, cases={"a": (x,)})


def call3(w, x):
    hidden = jnp.einsum("bd,df->bf", x, jax.sharding.reshard(w, P("model", None)), out_sharding=P("data", None))
    return hidden * 2


program3 = precaudit.Program(
    call=call3, params=w, cases={"a": (jax.device_put(x, NamedSharding(M, P("data", "model"))),)}
)

import jax
import jax.numpy as jnp

from precaudit import Program

key = jax.random.key(0)
w = jnp.ones((8, 4), jnp.bfloat16)
x = jnp.ones((2, 8), jnp.bfloat16)


def drop(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


closed = Program(lambda p, x: drop(x, key) @ p, w, {"a": (x,)}, outputs="out")  # a key in the closure
as_param = Program(
    lambda p, x: drop(x, p["key"]) @ p["w"], {"w": w, "key": key}, {"a": (x,)}, outputs="out"
)  # in params
as_input = Program(lambda p, x, k: drop(x, k) @ p, w, {"a": (x, key)}, outputs="out")  # as an input

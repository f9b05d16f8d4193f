import jax
import jax.numpy as jnp
import numpy as np

ARGNUMS = (0,)


def reference(x):
    return jnp.sum(x * x)


@jax.custom_vjp
def kernel(x):
    return reference(x)


def fwd(x):
    return reference(x), x


def bwd(x, g):
    narrow = jax.lax.optimization_barrier((2 * x * g).astype(jnp.bfloat16))  # line 19: the rounding
    return (narrow.astype(x.dtype),)


kernel.defvjp(fwd, bwd)


def wrapped(x):
    return kernel(x)  # line 27


def inputs(seed):
    return (jnp.asarray(np.random.default_rng(seed).standard_normal(64), jnp.float32),)

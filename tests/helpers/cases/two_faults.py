import jax
import jax.numpy as jnp


def rms(x, w):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)) * w


def reference(x, w):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def bad(x, w):
    y = x.astype(jnp.bfloat16)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(jnp.float32) * w


def inputs(seed):
    k = jax.random.split(jax.random.key(seed))
    return jax.random.normal(k[0], (8, 64)), jax.random.normal(k[1], (64,))

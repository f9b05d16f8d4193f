"""A kernel that is right beside a reference in bfloat16 that is not: ``precaudit gradcheck`` says which is which.

precaudit gradcheck examples/bf16_reference.py:kernel
"""

import jax
import jax.numpy as jnp
import numpy as np

ARGNUMS = (0,)


def kernel(logits, tokens):
    """Mean log-probability of tokens [T] under logits [T, V], in float32 inside."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, tokens[:, None], axis=-1)[:, 0]
    return jnp.mean(chosen - jax.nn.logsumexp(wide, axis=-1))


def reference(logits, tokens):
    """The same in the logits' own format: in bfloat16 every log-probability keeps eight bits."""
    logp = jax.nn.log_softmax(logits.astype(jnp.bfloat16), axis=-1)
    return jnp.mean(jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0].astype(jnp.float32))


def inputs(seed):
    """Logits of standard deviation 1, [16, 500], exact in bfloat16."""
    random = np.random.default_rng(seed)
    logits = jnp.asarray(random.standard_normal((16, 500)), jnp.bfloat16).astype(jnp.float32)
    return logits, jnp.asarray(random.integers(0, 500, 16), jnp.int32)

"""Small programs whose products a GPU makes in every way that it has; ``traces/gpu/programs`` holds runs of them.

Of ``chained`` it holds 10 of 48 rows, those with an operand that fell the other way at a tie among them.

python -m tests.helpers.gpu_programs FOLDER     # record them, on a GPU
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

import precaudit
from precaudit import Program

FORMATS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
PRECISIONS = {"default": None, "highest": "highest", "bf16x3": "BF16_BF16_F32_X3", "tf32x3": "TF32_TF32_F32_X3"}


class Made:
    """Arrays of normal numbers, in a format, from a seed; on the CPU, so that every device is given the same."""

    def __init__(self, form: str, seed: int) -> None:
        self.random, self.dtype = np.random.default_rng(seed), FORMATS[form]

    def __call__(self, *shape: int) -> jax.Array:
        with jax.default_device(jax.devices("cpu")[0]):
            return jnp.asarray(self.random.standard_normal(shape), self.dtype)

    def weights(self, rows: int, columns: int) -> jax.Array:
        """Return a matrix that leaves the size of what it multiplies."""
        with jax.default_device(jax.devices("cpu")[0]):
            return jnp.asarray(self.random.standard_normal((rows, columns)) / rows**0.5, self.dtype)


def rows(form: str, count: int) -> Program:
    """Two products with ``count`` rows."""
    made = Made(form, 1)
    w = made.weights(256, 256)
    return Program(lambda w, x: nn.silu(x @ w) @ w + x, w, {"a": (made(count, 256),)}, outputs="y")


def chained(precision: str) -> Program:
    """A product of what tanh made of one, at a precision."""
    made = Made("f32", 3)
    w, how = made.weights(256, 256), PRECISIONS[precision]
    return Program(lambda w, x: jnp.tanh(jnp.dot(x, w, precision=how)) @ w.T, w, {"a": (made(10, 256),)}, outputs="y")


def convolved(form: str) -> Program:
    """A convolution of two pictures."""
    made = Made(form, 3)
    kernel = made.weights(3 * 3 * 16, 24).reshape(3, 3, 16, 24)

    def call(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return Program(call, kernel, {"a": (made(2, 8, 8, 16),)}, outputs="y")


def trained(form: str) -> Program:
    """The gradient of a loss."""
    made = Made(form, 4)

    def call(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(w: dict[str, jax.Array]) -> jax.Array:
            return (nn.gelu(x @ w["up"]) @ w["down"]).astype(jnp.float32).var()

        return jax.grad(loss)(w)

    return Program(call, {"up": made.weights(64, 128), "down": made.weights(128, 32)}, {"a": (made(32, 64),)})


def decoded(form: str) -> Program:
    """Attention over a cache that grows by a row a call."""
    made = Made(form, 5)

    def call(w: dict[str, jax.Array], x: jax.Array, cache: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v = jnp.split(x @ w["qkv"], 3, -1)
        cache = lax.dynamic_update_slice(cache, jnp.stack([k, v])[:, :, None], (0, 0, at, 0))
        scores = jnp.where(jnp.arange(16) <= at, jnp.einsum("bd,btd->bt", q, cache[0]) / 8, -1e9)
        probs = nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        return x + jnp.einsum("bt,btd->bd", probs, cache[1]) @ w["o"], cache, at + 1

    empty = (made(1, 64), np.zeros((2, 1, 16, 64), made.dtype), np.int32(3))
    weights = {"qkv": made.weights(64, 192), "o": made.weights(64, 64)}
    return Program(call, weights, {"a": empty}, steps=2, advance=lambda _, out: out, outputs=("y", "cache", "at"))


def batched(form: str) -> Program:
    """A product of every head's row with its own matrix, and one of all."""
    made = Made(form, 6)

    def call(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.einsum("bhd,bhsd->bhs", x, w["k"]).reshape(4, -1) @ w["o"]

    return Program(call, {"k": made(4, 8, 32, 32), "o": made.weights(256, 32)}, {"a": (made(4, 8, 32),)}, outputs="y")


PROGRAMS = {
    **{f"rows{n}-{form}": rows(form, n) for n, form in ((1, "bf16"), (1, "f16"), (1, "f32"), (2, "f32"), (2, "bf16"))},
    **{f"chained-{precision}": chained(precision) for precision in PRECISIONS},
    **{f"{name}-{form}": made(form) for form in ("f32", "bf16") for name, made in (
        ("convolved", convolved), ("trained", trained), ("decoded", decoded), ("batched", batched),
    )},
}  # fmt: skip


if __name__ == "__main__":
    for name, program in PROGRAMS.items():
        precaudit.trace(program, Path(sys.argv[1]) / name, force=True)
        print(name)

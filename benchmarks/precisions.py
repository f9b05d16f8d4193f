"""What a device makes of a matrix product at every precision, of many rows and of one, held against emulations.

    python -m benchmarks.precisions            on JAX's default device

Float32 operands: the nearest emulation, and distances from it and from exact. Narrow ones: distances from exact, and
from products rounded one by one before they are summed.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.arrays import Array
from precaudit.numpy_decoder.accumulation import rounding_products
from precaudit.numpy_decoder.passes import BF16, in_passes, tf32

SETTINGS = (
    "DEFAULT", "HIGH", "HIGHEST", "BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9",
    "TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32",
)  # fmt: skip
ROWS, TERMS, COLUMNS = (200, 1), 384, 256


def distance(a: Array, b: Array) -> float:
    """Return ‖a − b‖ / ‖b‖."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def float32_products(rows: int, draw: np.random.Generator) -> Iterator[str]:
    """Yield a line a setting."""
    a = draw.normal(size=(rows, TERMS)).astype(np.float32)
    b = draw.normal(size=(TERMS, COLUMNS)).astype(np.float32)
    wide = a.astype(np.float64), b.astype(np.float64)
    made = {"exact": np.matmul(*wide)}
    made |= {f"TF32 × {n}": in_passes(n, np.matmul, *wide, tf32) for n in (1, 3)}
    made |= {f"bfloat16 × {n}": in_passes(n, np.matmul, *wide, BF16) for n in (1, 3, 6)}
    for name in SETTINGS:
        setting = getattr(lax.Precision, name, None) or getattr(lax.DotAlgorithmPreset, name)
        try:
            found = np.asarray(lax.dot(a, b, precision=setting), np.float64)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            yield f"{rows:4} {name:18} refused: {str(error).splitlines()[0][:70]}"
            continue
        apart = {how: distance(found, y) for how, y in made.items()}
        near = min(apart, key=apart.__getitem__)
        yield f"{rows:4} {name:18} {near:14} {apart[near]:9.1e} {apart['exact']:9.1e}"


def narrow_products(rows: int, name: str, draw: np.random.Generator) -> Iterator[str]:
    """Yield a line a format of the result."""
    a, b = (jnp.asarray(draw.normal(size=shape), name) for shape in ((rows, TERMS), (TERMS, COLUMNS)))
    wide = np.asarray(a, np.float64), np.asarray(b, np.float64)
    for result in (name, "float32"):
        found = np.asarray(lax.dot(a, b, preferred_element_type=result), np.float64)
        exact, rounded = distance(found, np.matmul(*wide)), distance(found, rounding_products(name)(*wide))
        yield f"{rows:4} {name:9} {result:9} {exact:9.1e} {rounded:9.1e}"


def main() -> None:
    draw = np.random.default_rng(0)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    print("rows setting            nearest          from it     exact")
    for rows in ROWS:
        print(*float32_products(rows, draw), sep="\n")
    print("rows operands  result        exact   rounded")
    for name in ("bfloat16", "float16"):
        for rows in (8, 2, 1):
            print(*narrow_products(rows, name, draw), sep="\n")


if __name__ == "__main__":
    main()

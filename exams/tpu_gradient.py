"""The gradient of examples/training_step.py as a TPU that is not here would make it, beside this CPU's."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr import shadow
from precaudit.interpreters.tpu.target import Target
from precaudit.recording.tracing.predicting import PredictedProgram

EXAMPLE = Path(__file__).parent.parent / "examples" / "training_step.py"
DRAWS = 8  # batches whose gradients are pooled: one alone is uncertain by a factor of 2
# name: format of parameters and inputs, precision of products
WAYS = {"fp32": ("float32", None), "fp32-highest": ("float32", "highest"), "bf16": ("bfloat16", None)}


class Errors(NamedTuple):
    """Relative errors from FP64 of a gradient, all its tensors and batches pooled: on this CPU and as predicted."""

    way: str
    cpu: float
    tpu: float


def measured(target: Target, draws: int = DRAWS) -> Iterator[Errors]:
    """Yield the errors of the gradient in float32 at the default and at the highest precision, and in bfloat16."""
    step = example()
    for way, (dtype, precision) in WAYS.items():

        def gradient(params: Any, inputs: Any, labels: Any, precision: Any = precision) -> Any:
            with jax.default_matmul_precision(precision):
                return jax.grad(step.loss)(params, inputs, labels)

        batches = [batch(step, dtype, seed) for seed in range(draws)]
        exact = [shadow(gradient)(*given) for given in batches]
        cpu, tpu = (error(run, batches, exact) for run in (jax.jit(gradient), PredictedProgram(target, gradient)))
        yield Errors(way, cpu, tpu)


def example() -> ModuleType:
    """Return the example, imported."""
    found = importlib.util.spec_from_file_location("training_step", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def batch(step: ModuleType, dtype: str, seed: int) -> tuple[Any, ...]:
    """Return parameters, inputs [24, 32] and labels [24]: the example's parameters, and a batch drawn."""
    draw = np.random.default_rng(seed)
    inputs = jnp.asarray(draw.standard_normal((24, 32)), jnp.bfloat16).astype(dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), step.program.params)
    return params, inputs, jnp.asarray(draw.integers(0, 10, 24), jnp.int32)


def error(run: Callable[..., Any], batches: list[Any], exact: list[Any]) -> float:
    """Return the root of the squared differences from FP64, all tensors and batches, over that of the squares."""
    off = total = 0.0
    for given, right in zip(batches, exact, strict=True):
        for x, y in zip(jax.tree.leaves(run(*given)), jax.tree.leaves(right), strict=True):
            y = np.asarray(y)
            off += float(np.sum((np.asarray(x).astype(np.float64) - y) ** 2))
            total += float(np.sum(y**2))
    return float(np.sqrt(off / total))

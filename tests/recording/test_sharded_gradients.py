"""Gradients of biases and norms under a batch that lies on several devices: each sums its own examples."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from precaudit import Program, gate
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program

dtype, folder, tokens = jnp.dtype(sys.argv[1]), sys.argv[2], int(sys.argv[3])
mesh = Mesh(np.array(jax.devices()), ("data",))
draw = np.random.default_rng(0)
def values(*shape, scale=1.0):
    return jnp.asarray(draw.standard_normal(shape) * scale, dtype)
params = {"scale": 1 + values(32, scale=0.1), "w": values(32, 64, scale=0.2), "b": values(64, scale=0.1)}
params |= {"v": values(64, 32, scale=0.2), "shift": values(tokens, scale=0.1)}
params = jax.device_put(params, NamedSharding(mesh, P()))
x, y = jax.device_put((values(8, tokens, 32), values(8, tokens, 32)), NamedSharding(mesh, P("data")))

def loss(p, x, y):
    wide = x.astype(jnp.float32)
    h = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(dtype) * p["scale"]
    made = jax.nn.gelu(h @ p["w"] + p["b"]) @ p["v"] + p["shift"][:, None]  # which softmax takes away
    return -jnp.sum(jax.nn.log_softmax(made.astype(jnp.float32)) * jax.nn.softmax(y.astype(jnp.float32)))

program = Program(jax.grad(loss), params, {"a": (x, y)}, outputs="grads")
opened = trace_program(program, folder)
compare_program(opened, program)
judged = gate(opened)
print(*sorted(judged.counts), *sorted(label.partition(".")[0] for label in opened.record.neutrality[0].split))
print(*judged.notes, sep="\\n")
"""


@pytest.mark.turn  # 30 s
@pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", 64), ("float16", 12)])
def test_a_correct_gradient_of_a_broadcast_passes_on_several_devices(dtype, tokens, tmp_path):
    """Of float16, and of more tokens than XLA adds up at once, it failed: added as one device would add them."""
    given = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    given["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # whose keys leave out labels
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype, str(tmp_path / "run"), str(tokens)],
        cwd=ROOT,
        env=given,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    first, *notes = made.stdout.splitlines()
    assert first == "pass product product sum sum sum"
    told = "3 gradients of broadcasts summed over 4 devices: every device rounds its part to 16 bits"
    assert [x for x in notes if x.startswith(told)]

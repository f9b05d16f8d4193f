"""What keeping sketches in place of tensors takes: a decoder's layers beside the bare one (``make bench``).

Bare, with sums, maxima and hashes alone, and with projections, in turns; bfloat16, automatic points. What sketches take
grows with the width, and what products take with its square.
Run: python -m benchmarks.sketching [--tokens 512] [--width 1024] [--layers 2]
"""

import argparse
import math
import sys
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.sketches import sketching
from precaudit.interpreters.jaxpr.tag import capturing
from precaudit.numbers.allocation import share_freed_memory
from precaudit.numbers.bytes_text import bytes_text
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.program import Program

BOUND = 1.1  # times the bare program
HEAD, PROJECTIONS = 64, 128


def decoder(tokens: int, width: int, layers: int) -> Program:
    """Return a decoder's layers in a scan, over one sequence."""
    draw = np.random.default_rng(0)
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {n: jnp.asarray(draw.standard_normal((layers, *s)) / s[0] ** 0.5, jnp.bfloat16) for n, s in shapes.items()}
    mask = np.tri(tokens, dtype=bool)

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    def layer(x: Any, w: Any) -> Any:
        q, k, v = ((norm(x) @ w[n]).reshape(tokens, -1, HEAD) for n in "qkv")
        scores = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        probs = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(x.dtype)
        x = x + jnp.einsum("hts,shd->thd", probs, v).reshape(x.shape) @ w["o"]
        return x + jax.nn.silu(norm(x) @ w["up"]) @ w["down"], None

    def call(params: Any, x: Any) -> Any:
        return norm(jax.lax.scan(layer, x, params)[0])

    x = jnp.asarray(draw.standard_normal((tokens, width)), jnp.bfloat16)
    return Program(call, params, {"a": (x,)}, outputs="out")


def held(made: tuple[Any, Any]) -> int:
    """Return the bytes of what a program gives beside its outputs."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(made[1]))


def temporaries(run: Any, *given: Any) -> int:
    """Return the bytes of a compiled program's temporaries and results."""
    found = run.lower(*given).compile().memory_analysis()
    return int(found.temp_size_in_bytes + found.output_size_in_bytes)


def main() -> int:
    """Print the ratios; return 1 where one is over its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    share_freed_memory()  # as every command does
    program = decoder(args.tokens, args.width, args.layers)
    (inputs,) = program.cases.values()
    made = prepare_program(program)
    runs = {
        "bare": jax.jit(program.call),
        "sums": jax.jit(sketching(made, program.named_outputs, 0)),
        "projections": jax.jit(sketching(made, program.named_outputs, PROJECTIONS)),
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.times + 1):  # the first compiles
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run(program.params, *inputs))
            took[name] += [time.perf_counter() - began] if turn else []
    memory = {name: temporaries(run, program.params, *inputs) for name, run in runs.items()}
    stacked = temporaries(jax.jit(capturing(made)), program.params, *inputs)
    sizes = {name: held(jax.eval_shape(run, program.params, *inputs)) for name, run in runs.items() if name != "bare"}
    tensors = held(jax.eval_shape(capturing(made), program.params, *inputs))
    plain = median(took.pop("bare"))
    over = False
    for name, each in took.items():
        ratio = median(each) / plain
        over |= ratio > BOUND
        said = f"bound {BOUND:g}: {'ok' if ratio <= BOUND else 'over'}"
        print(f"{name:<12} {ratio:5.2f} x the bare program ({said})  {median(each):.3f} s : {plain:.3f} s")
        print(f"{'':<12} {bytes_text(sizes[name])} in place of {bytes_text(tensors)} of tensors")
        more = [bytes_text(x - memory["bare"]) for x in (memory[name], stacked)]
        print(f"{'':<12} needs {more[0]} of memory more than the bare program; one that gives its tensors {more[1]}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
